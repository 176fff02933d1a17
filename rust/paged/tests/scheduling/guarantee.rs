//! Contexts that are guaranteed to so many requests at once, and the figures of those that are refused.

use paged::*;
use proptest::prelude::*;

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

#[derive(Clone, Debug)]
struct Model {
    /// Elements a token, keys and values together, and the window of each layer.
    layers: Vec<(usize, Option<usize>)>,
    max_seq_len: usize,
}

impl ModelConfigLike for Model {
    fn num_layers(&self) -> usize {
        self.layers.len()
    }
    fn kv_shape(&self, layer: usize) -> KvShape {
        let head_dim = self.layers[layer].0 / 2;
        KvShape { num_kv_heads: 1, k_head_dim: head_dim, v_head_dim: head_dim }
    }
    fn retention(&self, layer: usize) -> Retention {
        self.layers[layer].1.into()
    }
    fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }
}

fn device(bytes: u64) -> DeviceMemory {
    DeviceMemory { total: bytes, available: bytes, pending: 0, unified: false }
}

fn guarantee(mem_gpu: Option<MemoryGpuConfig>, block_size: usize) -> PagedAttentionConfig {
    PagedAttentionConfig { block_size: Some(block_size), mem_gpu, guaranteed: true, ..PagedAttentionConfig::default() }
}

fn limits(max_num_seqs: usize, max_num_batched_tokens: usize, model: &Model) -> PoolLimits {
    PoolLimits { max_num_seqs, max_num_batched_tokens, max_model_len: model.max_seq_len }
}

/// Runs requests that were all sent at once, each of `num_tokens` tokens, to the end. Returns how often one was preempted, and
/// how many ran together at most.
fn serve(config: &CacheConfig, limits: &PoolLimits, num_tokens: usize, num_prompt_tokens: usize) -> (usize, usize) {
    let scheduler_config = SchedulerConfig::new(limits.max_num_seqs, limits.max_num_batched_tokens, num_tokens);
    let mut scheduler = Scheduler::new(scheduler_config, config.kv_cache_config(true, [0; 32])).unwrap();
    for id in 0..limits.max_num_seqs as u64 {
        let prompt = (0..num_prompt_tokens as u32).map(|i| i + 1000 * id as u32).collect();
        scheduler.add_request(NewRequest::new(RequestId(id), prompt, num_tokens)).unwrap();
    }
    let (mut preemptions, mut together, mut longest) = (0, 0, 0);
    loop {
        let output = scheduler.schedule();
        preemptions += output.preempted.len();
        if output.rows.is_empty() {
            assert_eq!(longest, num_tokens, "the last token of a request is computed but for its own KV");
            return (preemptions, together);
        }
        together = together.max(scheduler.stats().requests_running);
        let sampled: Vec<_> =
            output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| (row.request_id, &[7][..])).collect();
        longest = output.rows.iter().map(|row| row.num_computed_tokens + row.num_scheduled_tokens + 1).fold(longest, usize::max);
        scheduler.update(&output, &sampled).unwrap();
    }
}

fn any_model() -> impl Strategy<Value = Model> {
    let layer = (1usize..5, prop_oneof![Just(None), Just(Some(16)), Just(Some(40))]);
    proptest::collection::vec(layer, 1..8)
        .prop_map(|layers| Model { layers: layers.into_iter().map(|l| (l.0 * 64, l.1)).collect(), max_seq_len: 512 })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Full, windowed and mixed models; lengths on and around block boundaries.
    #[test]
    fn all_requests_reach_the_guaranteed_length_without_a_preemption(
        model in any_model(), seqs in 1usize..6, blocks in 1usize..12, off in 0usize..3, chunk in 1usize..80, prompt in 1usize..100
    ) {
        let num_tokens = (8 * blocks + off).saturating_sub(1).max(2);
        let limits = limits(seqs, chunk, &model);
        let knob = Some(MemoryGpuConfig::ContextSize(num_tokens));
        let config = calculate_cache_config(&guarantee(knob, 8), &model, KvDType::F16, &[device(GIB)], &limits).unwrap();
        let (preemptions, together) = serve(&config, &limits, num_tokens, prompt.min(num_tokens - 1));
        prop_assert_eq!(preemptions, 0);
        prop_assert!(together <= seqs);
        prop_assert!(config.num_requests_that_fit(num_tokens, chunk) >= seqs);
    }

    /// Megabytes, a fraction and a context that come to the same bytes come to the same blocks.
    #[test]
    fn the_knobs_agree(model in any_model(), num_tokens in 1usize..500) {
        let limits = limits(1, 64, &model);
        let size = |mem_gpu, device| {
            let config = PagedAttentionConfig { mem_gpu: Some(mem_gpu), ..PagedAttentionConfig::default() };
            calculate_cache_config(&config, &model, KvDType::F16, &[device], &limits)
        };
        let context = size(MemoryGpuConfig::ContextSize(num_tokens), device(GIB)).unwrap();
        let budget = context.ledger.budget_bytes;
        prop_assert_eq!(budget, context.num_gpu_blocks as u64 * context.ledger.bytes_per_block);
        let whole = size(MemoryGpuConfig::Utilization(1.0), device(budget)).unwrap();
        prop_assert_eq!(whole.num_gpu_blocks, context.num_gpu_blocks);
        let megabytes = budget.div_ceil(MIB);
        let amount = size(MemoryGpuConfig::MbAmount(megabytes as usize), device(GIB)).unwrap();
        prop_assert_eq!(amount.num_gpu_blocks as u64, megabytes * MIB / context.ledger.bytes_per_block);
    }

    /// What a refusal says would fit does fit, and one more does not.
    #[test]
    fn a_refusal_tells_what_would_fit(model in any_model(), seqs in 1usize..40, num_tokens in 1usize..513, kib in 8u64..4000) {
        let limits = limits(seqs, 64, &model);
        let size = |seqs, num_tokens| {
            let knob = Some(MemoryGpuConfig::ContextSize(num_tokens));
            let limits = PoolLimits { max_num_seqs: seqs, ..limits };
            calculate_cache_config(&guarantee(knob, 16), &model, KvDType::F16, &[device(kib << 10)], &limits)
        };
        if let Err(ConfigError::DoesNotFit { fitting_seqs, fitting_tokens, .. }) = size(seqs, num_tokens) {
            prop_assert!(fitting_seqs < seqs && fitting_tokens < num_tokens);
            prop_assert!(fitting_seqs == 0 || size(fitting_seqs, num_tokens).is_ok());
            prop_assert!(size(fitting_seqs + 1, num_tokens).is_err());
            prop_assert!(fitting_tokens == 0 || size(seqs, fitting_tokens).is_ok());
            prop_assert!(size(seqs, fitting_tokens + 1).is_err());
        } else {
            prop_assert!(size(seqs, num_tokens).is_ok());
        }
    }
}

fn llama3_8b() -> Model {
    Model { layers: vec![(2 * 8 * 128, None); 32], max_seq_len: 8192 }
}

/// The geometry of preallocation: 128 KiB a token, 1 GiB a request of 8192 tokens; 8 030 261 248 parameters of 2 bytes.
#[test]
fn seven_requests_of_llama_3_8b_fit_a_card_of_24_gb_and_eight_do_not() {
    let model = llama3_8b();
    let card = DeviceMemory { pending: 2 * 8_030_261_248, ..device(24 * GIB) };
    let size = |num_seqs| {
        let fraction = Some(MemoryGpuConfig::Utilization(0.95));
        calculate_cache_config(&guarantee(fraction, 32), &model, KvDType::BF16, &[card], &limits(num_seqs, 4096, &model))
    };
    let config = size(7).unwrap();
    assert_eq!(config.ledger.bytes_per_block, 32 * 128 * 1024);
    assert_eq!(config.num_requests_that_fit(8192, 4096), 7);
    let error = size(8).unwrap_err();
    assert!(matches!(error, ConfigError::DoesNotFit { fitting_seqs: 7, num_tokens: 8192, .. }), "{error}");
    assert!(error.to_string().contains("7 x 8192 tokens would fit"), "{error}");
}

#[test]
fn a_guarantee_beyond_the_models_context_is_refused() {
    let model = llama3_8b();
    let knob = Some(MemoryGpuConfig::ContextSize(8193));
    let error = calculate_cache_config(&guarantee(knob, 32), &model, KvDType::F16, &[device(GIB)], &limits(1, 4096, &model));
    assert_eq!(error, Err(ConfigError::BeyondTheModel { num_tokens: 8193, longest: 8192 }));
}

/// Memory that is only reserved may be in others' use; memory that is guaranteed must be free.
#[test]
fn a_guarantee_needs_memory_that_is_free_now() {
    let model = llama3_8b();
    let host = DeviceMemory { total: 8 * GIB, available: 2 * GIB, pending: GIB / 2, unified: true };
    let knob = |num_tokens| Some(MemoryGpuConfig::ContextSize(num_tokens));
    let size =
        |config: PagedAttentionConfig| calculate_cache_config(&config, &model, KvDType::F16, &[host], &limits(2, 4096, &model));
    assert!(size(PagedAttentionConfig { mem_gpu: knob(8192), ..PagedAttentionConfig::default() }).is_ok());
    let error = size(guarantee(knob(8192), 32)).unwrap_err();
    assert!(matches!(error, ConfigError::DoesNotFit { fitting_tokens: 6144, fitting_seqs: 1, .. }), "{error}");
    assert!(size(guarantee(knob(6144), 32)).is_ok());
}
