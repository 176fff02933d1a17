//! The sizing of the pool: the promises of `calculate_cache_config` and the defects of the formulas it replaces.

use paged::*;
use proptest::prelude::*;

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

#[derive(Clone, Debug)]
struct Model {
    elements: Vec<usize>,
    num_kv_heads: usize,
    windows: Vec<Option<usize>>,
    devices: Vec<usize>,
    max_seq_len: usize,
}

impl Model {
    fn uniform(num_layers: usize, elements: usize) -> Self {
        Self {
            elements: vec![elements; num_layers],
            num_kv_heads: 1,
            windows: vec![None; num_layers],
            devices: vec![0; num_layers],
            max_seq_len: 8192,
        }
    }
}

impl ModelConfigLike for Model {
    fn num_layers(&self) -> usize {
        self.elements.len()
    }
    fn kv_shape(&self, layer: usize) -> KvShape {
        let both = self.elements[layer] / self.num_kv_heads;
        KvShape { num_kv_heads: self.num_kv_heads, k_head_dim: both / 2, v_head_dim: both - both / 2 }
    }
    fn retention(&self, layer: usize) -> Retention {
        self.windows[layer].into()
    }
    fn device(&self, layer: usize) -> usize {
        self.devices[layer]
    }
    fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }
}

/// SmolLM2-135M: 30 layers, 3 KV heads of 64.
fn smollm2() -> Model {
    Model::uniform(30, 2 * 3 * 64)
}

/// Qwen2.5-0.5B: 24 layers, 2 KV heads of 64; 12 KiB a token in f16.
fn qwen() -> Model {
    Model::uniform(24, 2 * 2 * 64)
}

fn gpu(gib: u64) -> DeviceMemory {
    DeviceMemory { total: gib * GIB, available: gib * GIB, pending: 0, unified: false }
}

fn host(gib: u64) -> DeviceMemory {
    DeviceMemory { unified: true, ..gpu(gib) }
}

const LIMITS: PoolLimits = PoolLimits { max_num_seqs: 32, max_num_batched_tokens: 4096, max_model_len: 8192 };

fn size(
    mem_gpu: MemoryGpuConfig,
    block_size: usize,
    model: &Model,
    devices: &[DeviceMemory],
) -> Result<CacheConfig, ConfigError> {
    let config = PagedAttentionConfig { block_size: Some(block_size), mem_gpu: Some(mem_gpu), ..PagedAttentionConfig::default() };
    calculate_cache_config(&config, model, KvDType::F16, devices, &LIMITS)
}

/// Serves one sequence of `num_tokens` tokens, prompt and answer, and says how many it got to.
fn serve_alone(config: &CacheConfig, num_tokens: usize) -> usize {
    let scheduler_config = SchedulerConfig::new(1, LIMITS.max_num_batched_tokens, num_tokens + 10);
    let mut scheduler = Scheduler::new(scheduler_config, config.kv_cache_config(true, [0; 32])).unwrap();
    let request_id = RequestId(1);
    let num_prompt_tokens = num_tokens.saturating_sub(3).max(1);
    let prompt_token_ids = vec![1; num_prompt_tokens];
    let request = NewRequest::new(request_id, prompt_token_ids, 10);
    if scheduler.add_request(request).is_err() {
        return 0;
    }
    let mut served = 0;
    loop {
        let output = scheduler.schedule();
        let Some(row) = output.rows.first() else { return served };
        served = row.num_computed_tokens + row.num_scheduled_tokens;
        if served == num_tokens {
            return served;
        }
        let sampled: Vec<_> = (row.num_outputs > 0).then_some((request_id, &[2][..])).into_iter().collect();
        scheduler.update(&output, &sampled).unwrap();
    }
}

/// The divisions one after the other, as in the formula this replaces.
fn nested_floors(bytes: u64, model: &Model, block_size: u64) -> u64 {
    bytes / 2 / block_size / model.elements.len() as u64 / model.elements[0] as u64
}

fn any_model() -> impl Strategy<Value = Model> {
    let layer = (1usize..40, prop_oneof![Just(None), Just(Some(16)), Just(Some(100))], 0usize..2);
    proptest::collection::vec(layer, 1..20).prop_map(|layers| Model {
        elements: layers.iter().map(|layer| layer.0 * 64).collect(),
        num_kv_heads: 1,
        windows: layers.iter().map(|layer| layer.1).collect(),
        devices: layers.iter().map(|layer| layer.2).collect(),
        max_seq_len: 4096,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn blocks_equal_the_nested_floors(amount in 1usize..4096, layers in 1usize..80, heads in 1usize..17, block in 0usize..3) {
        let block_size = SUPPORTED_BLOCK_SIZES[block];
        let model = Model::uniform(layers, heads * 128);
        let expected = nested_floors(amount as u64 * MIB, &model, block_size as u64);
        match size(MemoryGpuConfig::MbAmount(amount), block_size, &model, &[gpu(100)]) {
            Ok(config) => prop_assert_eq!(config.num_gpu_blocks as u64, expected),
            Err(error) => {
                prop_assert!(matches!(error, ConfigError::NoBlocks { .. }), "{}", error);
                prop_assert_eq!(expected, 0);
            }
        }
    }

    #[test]
    fn more_memory_never_means_fewer_blocks(model in any_model(), amount in 1usize..2000, more in 0usize..500, fraction in 0.01f32..1.0) {
        let devices = [gpu(40), gpu(30)];
        let blocks = |knob| size(knob, 16, &model, &devices).map_or(0, |config| config.num_gpu_blocks);
        prop_assert!(blocks(MemoryGpuConfig::MbAmount(amount)) <= blocks(MemoryGpuConfig::MbAmount(amount + more)));
        prop_assert!(blocks(MemoryGpuConfig::ContextSize(amount)) <= blocks(MemoryGpuConfig::ContextSize(amount + more)));
        let wider = (fraction * 1.1).min(1.0);
        prop_assert!(blocks(MemoryGpuConfig::Utilization(fraction)) <= blocks(MemoryGpuConfig::Utilization(wider)));
    }

    /// Findings 2 and 3: rounding down to MiB and forgetting the null block served 896 of 1000 tokens, or none.
    #[test]
    fn a_context_size_is_really_servable(model in any_model(), num_tokens in 1usize..3000, block in 0usize..3) {
        let config = size(MemoryGpuConfig::ContextSize(num_tokens), SUPPORTED_BLOCK_SIZES[block], &model, &[gpu(100), gpu(100)]).unwrap();
        prop_assert!(config.ledger.servable_tokens >= num_tokens);
        prop_assert!(serve_alone(&config, num_tokens) >= num_tokens);
    }

    /// The figure in the ledger is what the scheduler does: so many tokens and not one more.
    #[test]
    fn servable_tokens_is_exact(model in any_model(), amount in 1usize..40) {
        if let Ok(config) = size(MemoryGpuConfig::MbAmount(amount), 8, &model, &[gpu(100), gpu(100)]) {
            let servable = config.ledger.servable_tokens;
            if servable < 100_000 {
                prop_assert_eq!(serve_alone(&config, servable), servable);
                if model.windows.contains(&None) && servable > model.max_seq_len {
                    prop_assert!(serve_alone(&config, servable + 1) <= servable);
                }
            }
        }
    }

    #[test]
    fn no_device_is_asked_for_more_than_its_budget(model in any_model(), fraction in 0.01f32..1.0) {
        if let Ok(config) = size(MemoryGpuConfig::Utilization(fraction), 32, &model, &[gpu(10), gpu(20)]) {
            for device in &config.ledger.devices {
                prop_assert!(config.num_gpu_blocks as u64 * device.bytes_per_block <= device.budget_bytes);
                prop_assert_eq!(device.pool_bytes, (config.num_gpu_blocks as u64 + 1) * device.bytes_per_block);
            }
            let tightest = config.ledger.devices[config.ledger.tightest_device];
            prop_assert!((config.num_gpu_blocks as u64 + 1) * tightest.bytes_per_block > tightest.budget_bytes);
        }
    }
}

/// Defects 10 and 11: the null block was counted among the usable ones.
#[test]
fn defects_10_and_11_the_null_block_comes_on_top_of_what_is_promised() {
    let served = |model: &Model, num_tokens| {
        let config = size(MemoryGpuConfig::ContextSize(num_tokens), 32, model, &[gpu(100)]).unwrap();
        (config.num_gpu_blocks, serve_alone(&config, num_tokens))
    };
    assert_eq!(served(&qwen(), 1000), (32, 1000));
    assert_eq!(served(&smollm2(), 80), (3, 80));
    // Llama-3-8B, where every figure is a power of two.
    assert_eq!(served(&Model::uniform(32, 2 * 8 * 128), 4096), (128, 4096));
}

/// Finding 8: K and V of different widths, and layers that differ, are counted as they are.
#[test]
fn layers_of_different_sizes_are_summed() {
    let mut model = Model::uniform(2, 1000);
    model.elements[1] = 24;
    let config = size(MemoryGpuConfig::MbAmount(1), 32, &model, &[gpu(1)]).unwrap();
    assert_eq!(config.ledger.bytes_per_block, 32 * 2 * 1024);
    assert_eq!(config.num_gpu_blocks, 16);
}

/// Finding 6: each device paid for all layers, and so used only its share of the budget.
#[test]
fn devices_are_sized_by_their_own_layers() {
    let whole = size(MemoryGpuConfig::MbAmount(512), 32, &Model::uniform(32, 1024), &[gpu(1)]).unwrap();
    let mut split = Model::uniform(32, 1024);
    split.devices[16..].fill(1);
    let halves = size(MemoryGpuConfig::MbAmount(512), 32, &split, &[gpu(1), gpu(1)]).unwrap();
    assert_eq!(halves.num_gpu_blocks, 2 * whole.num_gpu_blocks);
    // Uneven: the one with three times the layers decides.
    split.devices[8..16].fill(1);
    let uneven = size(MemoryGpuConfig::MbAmount(512), 32, &split, &[gpu(1), gpu(1)]).unwrap();
    assert_eq!(uneven.ledger.tightest_device, 1);
    assert_eq!(uneven.num_gpu_blocks, 512 * 1024 * 1024 / (24 * 1024 * 2 * 32));
    // A device without layers limits nothing.
    assert_eq!(
        size(MemoryGpuConfig::MbAmount(512), 32, &Model::uniform(32, 1024), &[gpu(1), gpu(0)]).unwrap().num_gpu_blocks,
        whole.num_gpu_blocks
    );
}

/// Findings 5 and 10: weights were divided by the number of layers, and other processes ignored before loading.
#[test]
fn a_fraction_subtracts_what_is_used_and_what_is_pending_on_each_device() {
    let device = DeviceMemory { total: 10 * GIB, available: 8 * GIB, pending: 3 * GIB, unified: false };
    let config = size(MemoryGpuConfig::Utilization(0.75), 32, &smollm2(), &[device]).unwrap();
    assert_eq!(config.ledger.budget_bytes, 2 * GIB + GIB / 2);
}

#[test]
fn a_fraction_that_is_not_one_is_refused() {
    for fraction in [0.0, -0.5, 1.01, f32::NAN, f32::INFINITY] {
        let error = size(MemoryGpuConfig::Utilization(fraction), 32, &smollm2(), &[gpu(8)]).unwrap_err();
        assert!(matches!(error, ConfigError::Fraction { .. }), "{error}");
        assert!(PagedAttentionConfig::new(None, MemoryGpuConfig::Utilization(fraction), PagedCacheType::Auto).is_err());
    }
    assert!(size(MemoryGpuConfig::Utilization(1.0), 32, &smollm2(), &[gpu(8)]).is_ok());
}

/// Finding 10: an empty list left the budget at its largest value, which wrapped.
#[test]
fn an_empty_list_of_devices_and_a_wrong_device_are_refused() {
    assert_eq!(size(MemoryGpuConfig::MbAmount(1), 32, &smollm2(), &[]), Err(ConfigError::NoDevices));
    let mut model = smollm2();
    model.devices[3] = 1;
    let expected = ConfigError::UnknownDevice { layer: 3, device: 1, num_devices: 1 };
    assert_eq!(size(MemoryGpuConfig::MbAmount(1), 32, &model, &[gpu(8)]), Err(expected));
    let huge = size(MemoryGpuConfig::MbAmount(usize::MAX), 32, &smollm2(), &[gpu(8)]).unwrap_err();
    assert!(matches!(huge, ConfigError::TooLarge { .. }), "{huge}");
    let huge = size(MemoryGpuConfig::ContextSize(usize::MAX), 32, &smollm2(), &[gpu(8)]).unwrap_err();
    assert!(matches!(huge, ConfigError::TooLarge { .. }), "{huge}");
}

#[test]
fn errors_name_the_figures_and_what_would_work() {
    let error = size(MemoryGpuConfig::MbAmount(1), 7, &smollm2(), &[gpu(8)]).unwrap_err();
    assert_eq!(error.to_string(), "Block size must be in [8, 16, 32], got 7");
    let error = size(MemoryGpuConfig::MbAmount(1), 32, &Model::uniform(80, 32 * 1024), &[gpu(8)]).unwrap_err().to_string();
    assert!(error.starts_with("Num GPU blocks is 0. "), "{error}");
    assert!(error.contains("1048576 bytes") && error.contains("167772160 bytes") && error.contains("raise"), "{error}");
    let error = size(MemoryGpuConfig::MbAmount(9 * 1024), 32, &smollm2(), &[gpu(8)]).unwrap_err().to_string();
    assert!(error.contains("9663676416") && error.contains("8589934592"), "{error}");
    let error = size(MemoryGpuConfig::ContextSize(1_000_000), 32, &smollm2(), &[gpu(8)]).unwrap_err();
    // 11520 elements of 2 bytes a token.
    let fitting = 8 * GIB as usize / (11520 * 2 * 32) * 32;
    assert!(matches!(error, ConfigError::DoesNotFit { fitting_tokens, .. } if fitting_tokens == fitting), "{error}");
    assert!(size(MemoryGpuConfig::ContextSize(fitting), 32, &smollm2(), &[gpu(8)]).is_ok());
    assert!(size(MemoryGpuConfig::ContextSize(fitting + 1), 32, &smollm2(), &[gpu(8)]).is_err());
    for knob in [MemoryGpuConfig::MbAmount(0), MemoryGpuConfig::ContextSize(0)] {
        assert!(matches!(size(knob, 32, &smollm2(), &[gpu(8)]), Err(ConfigError::Zero { .. })));
    }
}

#[test]
fn unified_memory_is_only_reserved() {
    let busy = DeviceMemory { available: GIB, ..host(8) };
    assert!(size(MemoryGpuConfig::MbAmount(4096), 32, &smollm2(), &[busy]).is_ok());
    assert!(size(MemoryGpuConfig::MbAmount(8193), 32, &smollm2(), &[busy]).is_err());
}

#[test]
fn the_default_in_unified_memory_is_what_the_requests_can_use_and_at_most_half_of_what_is_free() {
    let default =
        |device| calculate_cache_config(&PagedAttentionConfig::default(), &smollm2(), KvDType::F16, &[device], &LIMITS).unwrap();
    let roomy = default(host(1000));
    assert_eq!(roomy.num_gpu_blocks, 32 * 8192 / 32);
    assert_eq!(roomy.block_size, 32);
    let tight = default(DeviceMemory { available: 3 * GIB, pending: GIB, ..host(64) });
    assert_eq!(tight.ledger.budget_bytes, GIB);
    let own = default(gpu(10));
    assert_eq!(own.ledger.budget_bytes, (10.0 * GIB as f64 * f64::from(DEFAULT_UTILIZATION)) as u64);
}

#[test]
fn cache_types_are_named_and_resolved() {
    let types = [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::F8E4M3, KvDType::Int8];
    for (name, cache_type) in ["f32", "f16", "bf16", "f8e4m3", "int8"].into_iter().zip(types) {
        assert_eq!(name.parse::<PagedCacheType>().unwrap().resolve(KvDType::F32), cache_type);
        assert_eq!("auto".parse::<PagedCacheType>().unwrap().resolve(cache_type), cache_type);
    }
    let error = "q4".parse::<PagedCacheType>().unwrap_err().to_string();
    assert!(error.contains("q4") && error.contains("int8"), "{error}");
    let wide = PagedAttentionConfig { cache_type: PagedCacheType::F32, ..PagedAttentionConfig::default() };
    let config = calculate_cache_config(&wide, &smollm2(), KvDType::F16, &[gpu(1)], &LIMITS).unwrap();
    assert_eq!(config.ledger.bytes_per_block, 32 * 4 * 30 * 384);
}

#[test]
fn one_byte_types_count_their_scales() {
    // SmolLM2's K or V of a block: 3 heads of 32 tokens, 64 bytes and a scale of 2 each.
    for cache_type in [PagedCacheType::Int8, PagedCacheType::F8E4M3] {
        let narrow = PagedAttentionConfig { cache_type, ..PagedAttentionConfig::default() };
        let mut model = smollm2();
        model.num_kv_heads = 3;
        let config = calculate_cache_config(&narrow, &model, KvDType::F16, &[gpu(1)], &LIMITS).unwrap();
        assert_eq!(config.ledger.bytes_per_block, 30 * 2 * 3 * 32 * (64 + 2));
    }
    // Elements and scales start on a multiple of 16 bytes each, whatever the head size.
    assert_eq!(KvDType::Int8.plane_block_bytes(1, 8, 81), Some(8 * 81 + 8 + 16));
    assert_eq!(KvDType::Int8.plane_block_bytes(3, 4, 8), Some(96 + 32));
    assert_eq!(KvDType::F16.plane_block_bytes(3, 32, 64), Some(3 * 32 * 64 * 2));
    assert_eq!(KvDType::F32.plane_block_bytes(usize::MAX, 8, 64), None);
}

#[test]
fn mixed_windows_share_planes() {
    let mut model = Model::uniform(18, 256);
    model.windows[..15].fill(Some(512));
    let config = size(MemoryGpuConfig::ContextSize(4096), 32, &model, &[gpu(8)]).unwrap();
    assert_eq!((config.groups.groups.len(), config.groups.layers_per_group), (6, 3));
    assert_eq!(config.ledger.bytes_per_block, 32 * 2 * 3 * 256);
    assert!(serve_alone(&config, 4096) == 4096);
}

/// A layer that reads another's KV takes none, and those of one kind share a block table whatever their sizes.
#[test]
fn unequal_heads_and_shared_kv_are_summed() {
    let mut model = Model::uniform(6, 512);
    model.elements = vec![512, 0, 1024, 0, 64, 512];
    let config = size(MemoryGpuConfig::ContextSize(64), 32, &model, &[gpu(1)]).unwrap();
    assert_eq!(config.groups.groups.len(), 1);
    assert_eq!(config.ledger.bytes_per_block, 32 * 2 * (512 + 1024 + 64 + 512));
    assert_eq!((config.num_gpu_blocks, config.groups.layer_slot(1)), (2, None));
    // Windowed layers of half the size: two of them in the bytes of a full one.
    model.elements = vec![256, 256, 256, 256, 512, 512];
    model.windows = vec![Some(64), Some(64), Some(64), Some(64), None, None];
    let config = size(MemoryGpuConfig::ContextSize(4096), 32, &model, &[gpu(1)]).unwrap();
    assert_eq!(config.ledger.bytes_per_block, 32 * 2 * 1024);
    assert_eq!(config.groups.groups.len(), 2);
    assert_eq!(serve_alone(&config, 4096), 4096);
}

/// The blocks of any group lie on the same devices, so each device has room for the group that has most there.
#[test]
fn groups_that_span_devices_are_sized_by_the_largest_share_on_each() {
    let mut model = Model::uniform(8, 512);
    model.windows[..4].fill(Some(64));
    model.devices = vec![0, 0, 0, 1, 0, 1, 1, 1];
    let config = size(MemoryGpuConfig::MbAmount(64), 32, &model, &[gpu(1), gpu(1)]).unwrap();
    assert_eq!((config.groups.groups.len(), config.groups.layers_per_group), (2, 4));
    let bytes: Vec<_> = config.ledger.devices.iter().map(|device| device.bytes_per_block).collect();
    assert_eq!(bytes, [3 * 32 * 2 * 512; 2]);
}

#[test]
fn blocks_without_bytes_are_as_many_as_sequences_need() {
    let empty = |mem_gpu, guaranteed, max_model_len| {
        let config = PagedAttentionConfig { mem_gpu, guaranteed, ..PagedAttentionConfig::default() };
        let limits = PoolLimits { max_model_len, ..LIMITS };
        let model = Model { max_seq_len: max_model_len, ..Model::uniform(4, 0) };
        calculate_cache_config(&config, &model, KvDType::F16, &[host(1)], &limits)
    };
    for knob in [None, Some(MemoryGpuConfig::MbAmount(1)), Some(MemoryGpuConfig::Utilization(0.1))] {
        let cache = empty(knob, false, 8192).unwrap();
        assert_eq!((cache.num_gpu_blocks, cache.ledger.devices[0].pool_bytes), (32 * 8192 / 32, 0), "{knob:?}");
        assert_eq!((cache.groups.groups.len(), cache.num_requests_that_fit(8192, 4096)), (1, 32), "{knob:?}");
    }
    // Long contexts are not there for all at once, unless they must be.
    assert_eq!(empty(None, false, 1 << 20).unwrap().num_gpu_blocks, 1 << 17);
    assert_eq!(empty(None, false, 1 << 24).unwrap().num_gpu_blocks, 1 << 19);
    assert_eq!(empty(None, true, 1 << 20).unwrap().num_gpu_blocks, 1 << 20);
    assert_eq!(empty(Some(MemoryGpuConfig::ContextSize(1000)), false, 8192).unwrap().num_gpu_blocks, 32);
    assert_eq!(empty(Some(MemoryGpuConfig::ContextSize(1000)), true, 8192).unwrap().num_gpu_blocks, 32 * 32);
    let error = empty(Some(MemoryGpuConfig::MbAmount(2000)), false, 8192).unwrap_err();
    assert!(matches!(error, ConfigError::MoreThanTheMachine { .. }), "{error}");
    assert!(matches!(empty(Some(MemoryGpuConfig::ContextSize(0)), false, 8192), Err(ConfigError::Zero { .. })));
}
