//! The buffers of the kernels, which serve a model, the one that drafts for it, and its encoders.

use device::{Backend, DType, WorkspaceShape};

use super::{KvLayers, MemoryPlan, PlannedDevices, PlannedModel, count, count_draft, counter::Counter, precision};
use crate::{
    EngineError,
    engine::EngineConfig,
    model::{
        DecoderConfig,
        config::{AttentionConfig, Norms},
    },
    model_runner::max_logit_rows,
};

/// Tells a backend which buffers were planned for it.
pub(in super::super) fn plan_workspaces(
    model: PlannedModel<'_>,
    config: &EngineConfig,
    backend: &dyn Backend,
    plan: &MemoryPlan,
) -> Result<(), EngineError> {
    let devices = PlannedDevices::Own { backend, loaded: 0 };
    let layers = KvLayers::of(&model, devices);
    let (counter, drafting) = (count(model, config, devices, &layers)?, count_draft(model, config, devices, &layers)?);
    backend.plan_workspaces(&workspace_shape(model, config, plan.servable_tokens(), (&counter, drafting.as_ref())));
    Ok(())
}

/// What a step with adapters needs on top: products that stand by themselves before they are added or gated.
pub(super) fn adapter_workspace_bytes(model: &DecoderConfig, config: &EngineConfig) -> u64 {
    let inner = model.largest(|layer| layer.ffn.intermediate_size().max(layer.attention.q_size()));
    let of_tokens = config.max_num_batched_tokens.saturating_mul(2 * (model.hidden_size + inner));
    let of_logits = max_logit_rows(config.max_num_seqs).saturating_mul(model.hidden_size + model.vocab_size);
    (of_tokens.saturating_add(of_logits) as u64).saturating_mul(size_of::<f32>() as u64)
}

/// What the kernels need buffers for, in requests of up to `longest` tokens; the counters have seen the weights of the model, and
/// of the one that drafts.
pub(super) fn workspace_shape(
    model: PlannedModel<'_>,
    config: &EngineConfig,
    longest: usize,
    (counter, drafting): (&Counter<'_>, Option<&Counter<'_>>),
) -> WorkspaceShape {
    let of = |model: &DecoderConfig, counter: &Counter<'_>| {
        of_decoder(model, config, longest, [counter.layer_dtype, counter.lm_head_dtype])
    };
    let mut shape = of(model.config, counter);
    if let (Some(draft), Some(counter)) = (model.draft, drafting) {
        shape = widest(shape, of(draft.config, counter));
    }
    model.media.map_or(shape, |(media, _)| media.iter().fold(shape, |shape, config| config.widen(shape)))
}

/// Of a decoder whose matrices of layers, and that of logits, are stored so.
pub(super) fn of_decoder(
    model: &DecoderConfig,
    config: &EngineConfig,
    longest: usize,
    [dtype, lm_head_dtype]: [DType; 2],
) -> WorkspaceShape {
    let largest = |value: fn(&AttentionConfig) -> usize| model.largest(|layer| value(&layer.attention));
    WorkspaceShape {
        num_tokens: config.max_num_batched_tokens,
        seq_len: longest,
        hidden_size: model.hidden_size,
        intermediate_size: model.largest(|layer| layer.ffn.intermediate_size()),
        num_heads: largest(|attention| attention.num_heads),
        num_kv_heads: largest(|attention| attention.num_kv_heads),
        queries_per_kv: largest(|attention| attention.num_heads / attention.num_kv_heads),
        head_dim: largest(|attention| attention.head_dim),
        dtype,
        num_logit_rows: max_logit_rows(config.max_num_seqs),
        num_sampled_rows: config.max_num_seqs,
        vocab_size: model.vocab_size,
        lm_head_dtype,
        precision: precision(config),
        post_norms: model.layers.iter().any(|layer| layer.norms != Norms::Before),
        gated: model.layers.iter().any(|layer| layer.ffn.is_gated()),
        num_experts: model.largest(|layer| layer.ffn.num_experts()),
        num_chosen_experts: model.largest(|layer| layer.ffn.num_chosen_experts()),
        expert_latent_size: model.largest(|layer| layer.ffn.latent_size()),
        recurrent_width: model.largest(|layer| layer.recurrent.map_or(0, |it| it.projected_width(model.hidden_size))),
        has_latent: model.layers.iter().any(|layer| layer.attention.latent.is_some()),
    }
}

/// What serves both, one after the other, in the same requests and with the same precision.
pub(super) fn widest(one: WorkspaceShape, other: WorkspaceShape) -> WorkspaceShape {
    // Blocks of quantized weights have buffers for what they are multiplied with, and floats need less.
    let quantized = |one: DType, other: DType| if matches!(one, DType::Ggml(_)) { one } else { other };
    WorkspaceShape {
        num_tokens: one.num_tokens.max(other.num_tokens),
        seq_len: one.seq_len.max(other.seq_len),
        hidden_size: one.hidden_size.max(other.hidden_size),
        intermediate_size: one.intermediate_size.max(other.intermediate_size),
        num_heads: one.num_heads.max(other.num_heads),
        num_kv_heads: one.num_kv_heads.max(other.num_kv_heads),
        queries_per_kv: one.queries_per_kv.max(other.queries_per_kv),
        head_dim: one.head_dim.max(other.head_dim),
        dtype: quantized(one.dtype, other.dtype),
        num_logit_rows: one.num_logit_rows.max(other.num_logit_rows),
        num_sampled_rows: one.num_sampled_rows.max(other.num_sampled_rows),
        vocab_size: one.vocab_size.max(other.vocab_size),
        lm_head_dtype: quantized(one.lm_head_dtype, other.lm_head_dtype),
        precision: one.precision,
        post_norms: one.post_norms || other.post_norms,
        gated: one.gated || other.gated,
        num_experts: one.num_experts.max(other.num_experts),
        num_chosen_experts: one.num_chosen_experts.max(other.num_chosen_experts),
        expert_latent_size: one.expert_latent_size.max(other.expert_latent_size),
        recurrent_width: one.recurrent_width.max(other.recurrent_width),
        has_latent: one.has_latent || other.has_latent,
    }
}
