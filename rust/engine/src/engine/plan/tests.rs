//! What a plan of a model that could not be loaded yet says.

use std::sync::Arc;

use device::{
    Activation, DType, Device, WorkspaceShape,
    cpu::{CpuBackend, Isa},
    cuda::CudaBackend,
};
use kernel_tests::{EmulatedDriver, Order};
use paged::PagedAttentionConfig;

use super::{
    workspaces::{of_decoder, widest},
    *,
};
use crate::model::{
    LayerConfig, ModelFiles,
    config::{MambaScales, RecurrentConfig},
};

fn planned(config: &DecoderConfig, encoder_cache_bytes: u64) -> PlannedModel<'_> {
    PlannedModel {
        config,
        weights: None,
        isq: None,
        tokenizer_bytes: 0,
        encoder_cache_bytes,
        adapter_bytes: 0,
        embedding: None,
        media: None,
        draft: None,
    }
}

/// The budget of encoders' outputs is taken from the pool, to the byte.
#[test]
fn the_encoder_cache_is_in_the_ledger() {
    let folder = goldens::dir().join("text/llama");
    let decoder = ModelFiles::hugging_face_config(&folder, None).unwrap();
    let config = EngineConfig {
        max_num_batched_tokens: 64,
        paged_attention: PagedAttentionConfig {
            mem_gpu: Some(MemoryGpuConfig::Utilization(1.0)),
            ..PagedAttentionConfig::default()
        },
        ..EngineConfig::default()
    };
    let total = 64 << 20;
    let of =
        |encoder_cache_bytes| plan(planned(&decoder, encoder_cache_bytes), &config, PlannedDevices::Cards(&[total])).unwrap();
    let (without, with) = (of(0), of(8 << 20));
    assert_eq!((without.devices[0].encoder_cache, with.devices[0].encoder_cache), (0, 8 << 20));
    let fewer = (without.num_blocks() - with.num_blocks()) as u64 * with.bytes_per_block;
    let taken = (8 << 20) + with.devices[0].margin - without.devices[0].margin;
    assert!(fewer.abs_diff(taken) <= with.bytes_per_block, "{fewer} bytes of blocks for {taken}");
    for plan in [&without, &with] {
        let device = plan.devices[0];
        assert!(device.resident() + device.margin <= total + plan.bytes_per_block, "{plan}"); // the null block comes on top
    }
    assert!(with.to_string().contains("encoders"), "{with}");
}

/// The layer with the most queries a key and value head is not the one with the most heads of either kind.
#[test]
fn workspaces_serve_every_layer_of_unequal_heads() {
    let layers = [[160, 160, 8], [128, 1, 64], [8, 8, 64]].map(|heads| LayerConfig::new(heads, 64, Activation::Silu));
    let of = |layers: &[LayerConfig]| {
        let model = DecoderConfig { vocab_size: 64, hidden_size: 64, layers: layers.into(), ..DecoderConfig::default() };
        of_decoder(&model, &EngineConfig::default(), 4096, [DType::BF16; 2])
    };
    let all = of(&layers);
    assert_eq!([all.num_heads, all.num_kv_heads, all.queries_per_kv, all.head_dim], [160, 160, 128, 64]);
    let few = of(&layers[1..]);
    for num_threads in [1, 4] {
        let bytes = |shape: &WorkspaceShape| CpuBackend::new(Isa::detect(), num_threads).unwrap().workspace_bytes(shape);
        for (shape, layers) in [(&all, &layers[..]), (&few, &layers[1..])] {
            for layer in layers {
                assert!(bytes(shape) >= bytes(&of(&[*layer])), "{num_threads} threads, {layer:?}");
            }
        }
    }
}

/// A draft model that is wider than its model in some ways: the plan has the buffers for both.
#[test]
fn workspaces_serve_a_draft_model_as_well() {
    let folder = goldens::dir().join("text/llama");
    let model = ModelFiles::hugging_face_config(&folder, None).unwrap();
    let layers = vec![LayerConfig::new([8, 8, 16], 640, Activation::Silu); 2];
    let draft = DecoderConfig { hidden_size: 32, layers, ..model.clone() };
    let config = EngineConfig { max_num_batched_tokens: 64, ..EngineConfig::default() };
    let cuda = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
    let cpu = CpuBackend::new(Isa::detect(), 2).unwrap();
    for backend in [&cuda as &dyn Backend, &cpu] {
        let planned =
            PlannedModel { draft: Some(PlannedDraft { config: &draft, weights: None, isq: None }), ..planned(&model, 0) };
        let plan = plan(planned, &config, PlannedDevices::Own { backend, loaded: 0 }).unwrap();
        let of = |model: &DecoderConfig| of_decoder(model, &config, plan.servable_tokens(), [DType::BF16; 2]);
        let (alone, drafting) = (of(&model), of(&draft));
        let both = widest(alone, drafting);
        assert_eq!((both.hidden_size, both.intermediate_size, both.num_kv_heads), (64, 640, 8));
        let bytes = |shape| backend.workspace_bytes(&shape);
        assert_eq!(plan.devices[0].workspaces, bytes(both), "{}", backend.info().device);
        assert!(bytes(both) > bytes(alone) && bytes(both) >= bytes(drafting), "{}", backend.info().device);
    }
}

/// A GPU's kernels have the rows of a state in registers.
#[test]
fn states_of_more_rows_than_kernels_have_are_refused_with_both_figures() {
    let model = |state_dim| {
        let mamba2 = RecurrentConfig::Mamba2 {
            num_heads: 2,
            head_dim: 32,
            num_groups: 1,
            state_dim,
            kernel: 4,
            conv_bias: false,
            proj_bias: false,
            eps: Some(1e-5),
            gates_first: true,
            limits: [0.0, f32::INFINITY],
            scales: MambaScales::ONE,
        };
        let layer = LayerConfig::new([2, 2, 32], 64, Activation::Silu);
        DecoderConfig { hidden_size: 64, layers: vec![layer; 2], ..DecoderConfig::default() }.with_recurrent(mamba2, |i| i == 1)
    };
    let cuda = CudaBackend::new(Arc::new(EmulatedDriver::new(Order::Ascending))).unwrap();
    let cpu = CpuBackend::new(Isa::detect(), 1).unwrap();
    check_layers(&cuda, &model(256)).unwrap();
    check_layers(&cpu, &model(257)).unwrap();
    let text = check_layers(&cuda, &model(257)).unwrap_err().to_string();
    for part in ["257 rows", "256 at most", "cuda", "device=\"cpu\""] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}
