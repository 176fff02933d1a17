//! What is recorded and replayed, seen by a driver that records.

use std::sync::Arc;

use super::{
    CudaBackend,
    driver::Driver,
    recording::{Event, RecordingDriver},
};
use crate::{
    Adapter, AdapterRows, AttentionArgs, AttentionParams, CacheEngine, Constant, Device, DeviceSampler, EmbedArgs,
    EmbeddingTable, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, LinearDelta, LinearOptions, LowRank, Phases, Precision,
    ResidualArgs, RopeArgs, RopeStyle, RopeTable, RowSampling, StepGraphs, StepMetadata, StepRecorder, Tensor, TokenMask,
    WeightView, WorkspaceShape, backend::Linear, mmap::Bytes,
};

const DIM: usize = 64;
const BLOCK: usize = 8;

/// A layer of two query heads that share a KV head, and what it is computed with.
struct Layer {
    graphs: StepGraphs,
    table: Linear,
    recording: Arc<RecordingDriver>,
    backend: CudaBackend,
    cache: CacheEngine,
    output: Linear,
    rope: RopeTable,
    hidden: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Tensor,
}

impl Layer {
    fn new() -> Self {
        let recording = RecordingDriver::new(1 << 28);
        let backend = CudaBackend::new(Arc::<RecordingDriver>::clone(&recording) as Arc<dyn Driver>).unwrap();
        let spec = KvCacheSpec::uniform((600, BLOCK), KvDType::BF16, KvShape::new(1, DIM), 1).unwrap();
        let weight = WeightView::new(crate::DType::BF16, DIM, 2 * DIM, Bytes::from_vec(vec![0; DIM * 2 * DIM * 2])).unwrap();
        let options = LinearOptions { name: "o".into(), precision: Precision::Fast, bias: None };
        let table = || -> Constant { Arc::new(vec![0.0; 64 * DIM / 2]) };
        let tensor = |cols| backend.alloc(300, cols).unwrap();
        let rows = WeightView::new(crate::DType::BF16, 9, DIM, Bytes::from_vec(vec![0; 9 * DIM * 2])).unwrap();
        let mut output = backend.load_linear(&weight, &options).unwrap();
        output.site = Some(3);
        Self {
            graphs: StepGraphs::new(300, usize::MAX),
            table: backend.load_linear(&rows, &options).unwrap(),
            cache: backend.alloc_kv_cache(&spec).unwrap(),
            output,
            rope: RopeTable { style: RopeStyle::Neox, rotary_dim: DIM, cos: table(), sin: table() },
            hidden: tensor(DIM),
            q: tensor(2 * DIM),
            k: tensor(DIM),
            v: tensor(DIM),
            attention: tensor(2 * DIM),
            recording,
            backend,
        }
    }

    /// Whether the step was replayed.
    fn run(&mut self, step: &StepMetadata) -> bool {
        let Self { graphs, table, backend, cache, output, rope, hidden, q, k, v, attention, .. } = self;
        let token_ids = vec![3; step.positions.len()];
        let mut run = |token_ids: &[u32], step: &StepMetadata| {
            let args = EmbedArgs { table: EmbeddingTable::Loaded(table), token_ids, beyond: None, adapters: &[], scale: 1.0 };
            backend.embed(&args, hidden);
            for tensor in [&mut *q, k, v] {
                tensor.set_rows(step.positions.len());
            }
            backend.rope_and_cache(RopeArgs::new(q, Some((k, Some(v))), Some(rope), (cache, 0)), step);
            let params = AttentionParams { scale: 0.1, ..AttentionParams::new([2, 1, DIM], Precision::Fast) };
            backend.attention(AttentionArgs { q, out: attention, cache, layer: 0, sinks: None, params, next: None }, step);
            let args = ResidualArgs { x: attention, linear: output, post_norm: None, scale: 1.0, residual: hidden };
            backend.linear_residual(args, step);
        };
        let recorded = backend.begin_recorded(graphs, &token_ids, step, &mut run);
        if recorded {
            backend.replay(graphs);
        } else {
            backend.begin_step(step);
            run(&token_ids, step);
        }
        recorded
    }

    fn events(&self) -> Vec<Event> {
        self.recording.events()
    }

    /// An adapter of the output projection, of such a rank.
    fn adapter(&self, rank: usize) -> Arc<Adapter> {
        let low_rank = LowRank::new(rank, &vec![0.0; rank * 2 * DIM], vec![0.0; rank * DIM]).unwrap();
        let mut adapter = Adapter::default();
        assert!(adapter.insert(3, LinearDelta::LowRank(low_rank)));
        Arc::new(self.backend.load_adapter(adapter).unwrap())
    }
}

/// Requests that decode, after so many tokens.
fn decodes(positions: &[usize]) -> StepMetadata {
    let max_blocks = positions.iter().max().unwrap() / BLOCK + 1;
    let count = positions.len();
    StepMetadata {
        state_slots: Vec::new(),
        adapters: Vec::new(),
        span_ends: Vec::new(),
        positions: positions.iter().map(|position| *position as u32).collect(),
        rope_positions: vec![3; count],
        query_start_loc: (0..=count as u32).collect(),
        seq_lens: positions.iter().map(|position| *position as u32 + 1).collect(),
        groups: vec![KvGroupMetadata { block_tables: vec![1; count * max_blocks], max_blocks, slot_mapping: vec![9; count] }],
    }
}

#[test]
fn a_step_of_a_size_that_was_met_is_one_copy_and_one_launch() {
    let mut layer = Layer::new();
    assert!(layer.run(&decodes(&[5, 200, 17])));
    layer.events();
    for positions in [&[0, 1, 2][..], &[250, 9, 31, 255], &[40; 3]] {
        assert!(layer.run(&decodes(positions)));
        let events = layer.events();
        assert!(matches!(events[..], [Event::Upload(_), Event::Replay]), "{events:?}");
    }
    // Two requests are another size, and so are keys in parts.
    for positions in [&[5, 6][..], &[5, 6, 600]] {
        assert!(layer.run(&decodes(positions)));
        assert!(layer.events().iter().any(|event| matches!(event, Event::Recorded(_))));
    }
}

#[test]
fn tokens_of_all_rows_are_drawn_with_one_copy_of_masks_and_one_back() {
    let layer = Layer::new();
    let Layer { backend, mut hidden, table, recording, .. } = layer;
    let mut sampled = backend.alloc(8, DIM).unwrap();
    let mut logits = backend.alloc(8, 9).unwrap();
    hidden.set_rows(8);
    let words = [u32::MAX];
    let mask = TokenMask::new(&words, 9).unwrap();
    let row = |mask| Some(RowSampling { temperature: None, top_k: None, top_p: 1.0, min_p: 0.0, uniform: 0.0, mask });
    let mut draw = |rows: &[u32]| {
        backend.gather_rows(&hidden, rows, &mut sampled);
        backend.logits(&sampled, None, &table, &[], &mut logits);
        let rows: Vec<_> = rows.iter().map(|row_index| row(row_index.is_multiple_of(2).then_some(mask))).collect();
        backend.sample(&logits, &rows, 2);
        let copies = |event: &Event| matches!(event, Event::Upload(_) | Event::Download(_));
        recording.events().into_iter().filter(copies).collect::<Vec<_>>()
    };
    draw(&[0, 1, 2, 3, 4, 5, 6, 7]);
    // Masks of 4 bytes; ids and log probabilities of a row's token and its two likeliest ones.
    assert_eq!(draw(&[0, 1, 2, 3]), [Event::Upload(2 * 4), Event::Download(4 * 3 * 8)]);
    assert_eq!(draw(&[2, 3]), [Event::Upload(4), Event::Download(2 * 3 * 8)]);
    assert_eq!(draw(&[3]), [Event::Download(3 * 8)], "how a row without a mask is sampled is an argument");
    assert_eq!(draw(&[2, 4])[0], Event::Upload(8), "rows that do not follow each other are a list");
}

#[test]
fn what_is_recorded_depends_on_the_padded_size_alone() {
    let recorded = |positions: &[usize]| {
        let mut layer = Layer::new();
        assert!(layer.run(&decodes(positions)));
        layer.recording.recorded().pop().unwrap()
    };
    let of_sixteen = recorded(&[7; 9]);
    assert_eq!(
        of_sixteen.len(),
        5,
        "embedding, rotation, attention, rounding and the product; nothing is merged: {of_sixteen:#?}"
    );
    assert_eq!(of_sixteen, recorded(&[255; 16]));
    let in_parts = recorded(&[600, 1]);
    assert_eq!(in_parts, recorded(&[800, 1000]));
    assert_ne!(in_parts, recorded(&[2047, 1400]), "more parts");
    assert!(in_parts.iter().any(|launch| launch.contains("attention_merge")));
    assert_ne!(in_parts, recorded(&[2, 1]));
}

#[test]
fn steps_with_more_parts_than_are_kept_merge_some_before_others_begin() {
    let mut layer = Layer::new();
    assert!(layer.run(&decodes(&[32_767; 64])), "64 parts each");
    let of_parts = |layer: &Layer| layer.backend.state().lists.buffers()[..2].to_vec();
    let buffers = of_parts(&layer);
    layer.events();
    assert!(!layer.run(&decodes(&[32_767; 66])));
    let events = layer.events();
    assert_eq!(of_parts(&layer), buffers, "they grew");
    let of_attention = |event: &Event| match event {
        Event::Launch { kernel, grid } if kernel.starts_with("attention") => Some((*kernel, *grid)),
        _ => None,
    };
    let launches: Vec<_> = events.iter().filter_map(of_attention).collect();
    let round = |rows| [("attention_bf16_d64", [rows * 64, 1, 1]), ("attention_merge", [rows, 1, 1])];
    assert_eq!(launches, [round(64), round(2)].concat());
}

#[test]
fn a_recording_that_fails_leaves_steps_of_its_size_as_they_are() {
    let mut layer = Layer::new();
    assert!(layer.run(&decodes(&[5])));
    layer.recording.fail_recordings();
    for _ in 0..2 {
        assert!(!layer.run(&decodes(&[5, 6])), "two requests cannot be recorded");
    }
    layer.events();
    assert!(!layer.run(&decodes(&[8, 6])));
    let launches = layer.events().into_iter().filter(|event| matches!(event, Event::Launch { .. })).count();
    assert_eq!(launches, 4, "a row each, a rotation, attention and a product: it is not tried again");
}

/// A request with so many rows from the first position on.
fn rows_of_one(count: usize) -> StepMetadata {
    let slots = (0..count as i64).map(|row| 8 + row).collect();
    StepMetadata {
        query_start_loc: vec![0, count as u32],
        seq_lens: vec![count as u32],
        groups: vec![KvGroupMetadata { block_tables: vec![1], max_blocks: 1, slot_mapping: slots }],
        ..decodes(&(0..count).collect::<Vec<_>>())
    }
}

#[test]
fn prompts_are_not_recorded() {
    let mut layer = Layer::new();
    assert!(!layer.run(&rows_of_one(10)));
    assert!(layer.recording.recorded().is_empty());
}

#[test]
fn requests_with_drafts_share_the_recording_of_as_many_rows_unless_theirs_may_have_one_row() {
    let mut layer = Layer::new();
    assert!(layer.run(&rows_of_one(4)));
    assert!(layer.run(&decodes(&[5, 6, 7])));
    assert_eq!(layer.recording.recorded().len(), 1);
    layer.graphs.max_request_rows = 1;
    assert!(!layer.run(&rows_of_one(4)));
    assert!(layer.run(&decodes(&[5, 6, 7])));
}

#[test]
fn recordings_with_buffers_that_are_gone_are_made_anew() {
    let mut layer = Layer::new();
    assert!(layer.run(&decodes(&[5])));
    // A rope table that has grown is another one.
    Arc::make_mut(&mut layer.rope.cos).push(0.0);
    layer.events();
    assert!(layer.run(&decodes(&[6])));
    assert!(layer.events().iter().any(|event| matches!(event, Event::Recorded(_))));
    // Block tables of more than 1 MB.
    assert!(layer.run(&decodes(&[6; 200])));
    layer.events();
    assert!(layer.run(&decodes(&[70_000; 60])));
    assert_eq!(layer.recording.recorded().len(), 1, "those of other sizes knew the smaller buffer");
}

#[test]
fn recordings_outlive_larger_steps_that_were_planned_for() {
    let mut layer = Layer::new();
    let shape = WorkspaceShape {
        num_tokens: 300,
        seq_len: 4096,
        hidden_size: DIM,
        intermediate_size: 0,
        num_heads: 2,
        num_kv_heads: 1,
        queries_per_kv: 2,
        head_dim: DIM,
        dtype: crate::DType::BF16,
        num_logit_rows: 8,
        num_sampled_rows: 8,
        vocab_size: 9,
        lm_head_dtype: crate::DType::BF16,
        precision: Precision::Fast,
        post_norms: false,
        gated: false,
        num_experts: 0,
        num_chosen_experts: 0,
        expert_latent_size: 0,
        has_latent: false,
        recurrent_width: 0,
    };
    layer.backend.plan_workspaces(&shape);
    // The smallest of each kind: with a product of matrices, with parts, and with rows that are rounded.
    for rows in [33, 9] {
        assert!(layer.run(&decodes(&vec![600; rows])));
    }
    layer.events();
    for positions in [vec![600; 17], vec![4000; 9], vec![900; 200]] {
        assert!(layer.run(&decodes(&positions)));
        let freed = layer.events().into_iter().filter(|event| matches!(event, Event::Free(_))).count();
        assert_eq!(freed, 0, "a buffer grew for {} rows", positions.len());
    }
    assert_eq!(layer.recording.recorded().len(), 5);
    layer.events();
    assert!(layer.run(&decodes(&[600; 9])));
    assert!(!layer.events().iter().any(|event| matches!(event, Event::Recorded(_))), "it was recorded before");
}

#[test]
fn recordings_are_forgotten_with_their_model() {
    let mut layer = Layer::new();
    assert!(layer.run(&decodes(&[5])));
    let recording = Arc::clone(&layer.recording);
    assert_eq!(recording.recorded().len(), 1);
    drop(layer);
    assert!(recording.recorded().is_empty());
    assert_eq!(recording.used_bytes(), 0);
}

#[test]
fn a_step_with_adapters_is_one_copy_and_one_launch_whichever_they_are() {
    let mut layer = Layer::new();
    let [small, other, large] = [2, 2, 9].map(|rank| layer.adapter(rank));
    let step = |adapters: &[(&Arc<Adapter>, &[u32])]| {
        let of = |(adapter, rows): &(&Arc<Adapter>, &[u32])| AdapterRows { adapter: Arc::clone(adapter), rows: rows.to_vec() };
        StepMetadata { adapters: adapters.iter().map(of).collect(), ..decodes(&[5, 200, 17]) }
    };
    let launches = |recorded: &[String]| recorded.iter().filter(|asked| asked.contains("lora_")).count();
    assert!(layer.run(&step(&[])) && layer.run(&step(&[(&small, &[1])])));
    let recorded = layer.recording.recorded();
    assert_eq!([launches(&recorded[0]), launches(&recorded[1])], [0, 2], "those without are not the slower for others");
    layer.events();
    for adapters in [&[(&small, &[0, 1, 2][..])][..], &[(&other, &[2]), (&small, &[0])], &[]] {
        assert!(layer.run(&step(adapters)));
        let events = layer.events();
        assert!(matches!(events[..], [Event::Upload(_), Event::Replay]), "{events:?}");
    }
    // A larger rank is another launch, and then serves the others.
    assert!(layer.run(&step(&[(&large, &[1])])));
    assert!(layer.events().iter().any(|event| matches!(event, Event::Recorded(_))));
    assert!(layer.run(&step(&[(&small, &[1])])));
    assert!(matches!(layer.events()[..], [Event::Upload(_), Event::Replay]));
    // Nothing keeps an adapter that nobody has.
    let before = layer.recording.used_bytes();
    let bytes = large.bytes() as usize;
    drop(large);
    assert_eq!(layer.recording.used_bytes(), before - bytes);
}
