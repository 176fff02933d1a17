//! Checks of what files say, before memory or a kernel depends on it.

use device::{MAX_EXPERT_GROUPS, MAX_EXPERTS, MAX_STREAMS, Mask, QueryScale};

use super::{
    AttentionConfig, DecoderConfig, DenseConfig, ExpertsConfig, FfnConfig, LayerInputsConfig, MAX_HEAD_DIM, MAX_HEADS,
    MAX_LAYERS, MAX_SIZE, Norms, PositionsConfig, QkNorm, ResidualScales, StreamsConfig,
};
use crate::EngineError;

impl FfnConfig {
    fn check(&self) -> Result<(), String> {
        if *self != Self::Nothing {
            in_range("feed-forward size", self.intermediate_size(), MAX_SIZE)?;
        }
        let experts = match self {
            Self::Experts(experts) => experts,
            Self::Dense(DenseConfig { cutoff: Some(cutoff), is_gated, .. }) if !cutoff.is_finite() || !is_gated => {
                return Err(format!(
                    "a gate passes what is {cutoff} deviations above the mean; there must be a gate, and a number"
                ));
            }
            Self::Dense(_) | Self::Nothing => return Ok(()),
        };
        if experts.has_own_norms && experts.shared.is_none() {
            return Err("experts with norms of their own have no network beside them; there must be one".into());
        }
        if experts.has_own_norms && (experts.latent_size.is_some() || !experts.is_gated()) {
            return Err(
                "experts with norms of their own have no gates or work in a space of their own, which is not computed".into()
            );
        }
        let ExpertsConfig { num_experts, intermediate_size, shared, rule, .. } = *experts;
        in_range("number of experts", num_experts, MAX_EXPERTS)?;
        in_range("number of experts a token", rule.num_chosen, num_experts)?;
        in_range("size of an expert", intermediate_size, MAX_SIZE)?;
        shared.map_or(Ok(()), |shared| in_range("size of the shared expert", shared.intermediate_size, MAX_SIZE))?;
        positive("scale of the experts' weights", rule.scale)?;
        let Some(groups) = rule.groups else { return Ok(()) };
        in_range("number of groups of experts", groups.num_groups, num_experts.min(MAX_EXPERT_GROUPS))?;
        in_range("number of groups a token", groups.num_chosen, groups.num_groups)?;
        if !num_experts.is_multiple_of(groups.num_groups) {
            return Err(format!("{num_experts} experts are not a multiple of {} groups", groups.num_groups));
        }
        in_range("number of experts a token", rule.num_chosen, num_experts / groups.num_groups * groups.num_chosen)
    }
}

impl DecoderConfig {
    /// Checks what no single field can tell; `what` names the file in errors.
    pub(crate) fn validate(&self, what: &str) -> Result<(), EngineError> {
        self.check().map_err(|why| EngineError::Load(format!("{what}: {why}")))
    }

    fn check(&self) -> Result<(), String> {
        in_range("vocabulary size", self.vocab_size, MAX_SIZE)?;
        in_range("hidden size", self.hidden_size, MAX_SIZE)?;
        in_range("number of layers", self.layers.len(), MAX_LAYERS)?;
        in_range("context length", self.max_position_embeddings, MAX_SIZE)?;
        positive("norm epsilon", self.norm.eps)?;
        positive("embedding scale", self.embedding_scale)?;
        positive("logit scale", self.logit_scale)?;
        self.final_softcap.map_or(Ok(()), |cap| positive("softcap of logits", cap))?;
        if let Some(LayerInputsConfig { width, vocab_size, pad_token_id, .. }) = self.layer_inputs {
            in_range("width of the inputs of layers", width, MAX_SIZE / self.layers.len())?;
            in_range("vocabulary of the inputs of layers", vocab_size, MAX_SIZE)?;
            if pad_token_id as usize >= vocab_size {
                return Err(format!("token {pad_token_id} stands for images, and inputs of layers are there for {vocab_size}"));
            }
        }
        self.streams.map_or(Ok(()), |streams| self.check_streams(streams))?;
        (0..self.layers.len()).try_for_each(|layer| self.check_layer(layer))?;
        if !self.layers.iter().any(|layer| layer.has_kv() || layer.recurrent.is_some()) {
            return Err("no layer has attention over tokens or a state; at least one must".into());
        }
        if self.num_further_rows > 0 && self.tie_word_embeddings {
            return Err(format!(
                "the token embedding has {} rows for tokens that are no answers, and logits are made of it; they must be made of \
                 another matrix",
                self.num_further_rows
            ));
        }
        if let Some(PositionsConfig { padding, num_token_types, .. }) = self.positions {
            in_range("number of kinds of tokens and one", num_token_types.saturating_add(1), MAX_SIZE)?;
            in_range("number of rows of positions", self.max_position_embeddings.saturating_add(padding), MAX_SIZE)?;
        }
        in_range("number of tokens with embeddings", self.vocab_size + self.num_further_rows, MAX_SIZE)?;
        // Tables are made of those that no layer uses too.
        let head_dim = self.largest(|layer| layer.attention.head_dim);
        self.ropes.iter().try_for_each(|rope| rope.validate(head_dim))
    }

    fn check_streams(&self, streams: StreamsConfig) -> Result<(), String> {
        let StreamsConfig { count, active, branch_rank, .. } = streams;
        in_range("number of residual streams", count, MAX_STREAMS)?;
        in_range("rank of the branch beside attention", branch_rank, MAX_SIZE)?;
        if active >= count {
            return Err(format!("layers run on residual stream {active} of {count}, which are counted from 0"));
        }
        if self.layers.iter().any(|layer| layer.is_parallel || layer.has_output_scale) {
            return Err(
                "layers of several residual streams have parallel parts or a factor behind them, which is not computed".into()
            );
        }
        Ok(())
    }

    fn check_ffn(&self, ffn: &FfnConfig) -> Result<(), String> {
        ffn.check()?;
        let FfnConfig::Experts(ExpertsConfig { latent_size: Some(size), .. }) = ffn else { return Ok(()) };
        in_range("width of the experts' own space", *size, self.hidden_size)
    }

    /// A layer may lack one of its two parts, or mix tokens in two ways, where nothing else is unusual.
    fn check_parts(&self, index: usize) -> Result<(), String> {
        let layer = &self.layers[index];
        let (mixes, is_double) = (layer.mixes(), layer.has_attention && layer.recurrent.is_some());
        if !mixes && layer.ffn == FfnConfig::Nothing {
            return Err(format!("layer {index} has neither attention, nor a state, nor a feed-forward network"));
        }
        let is_partial = !mixes || layer.ffn == FfnConfig::Nothing;
        let is_plain = layer.norms == Norms::Before && !layer.is_parallel && !layer.is_cross && self.streams.is_none();
        if layer.norms == Norms::OfSums && (layer.is_parallel || layer.ffn.num_experts() > 0 || self.streams.is_some()) {
            return Err(format!(
                "layer {index} has norms of sums, and parallel parts, experts or several residual streams, which is not computed"
            ));
        }
        if (is_partial || is_double) && !is_plain {
            return Err(format!(
                "layer {index} lacks a part or has a state beside attention, and has parallel parts, norms behind them or several \
                 residual streams, which is not computed"
            ));
        }
        if is_double && (layer.attention.output_gate.is_some() || layer.attention.latent.is_some()) {
            return Err(format!(
                "layer {index} has a state beside attention that is latent or has a gate, which is not computed"
            ));
        }
        Ok(())
    }

    fn check_layer(&self, index: usize) -> Result<(), String> {
        let layer = &self.layers[index];
        let ResidualScales { attention, recurrent, ffn } = layer.residual_scales;
        [attention, recurrent, ffn].into_iter().try_for_each(|scale| positive("residual scale", scale))?;
        self.check_ffn(&layer.ffn)?;
        layer.recurrent.as_ref().map_or(Ok(()), |recurrent| recurrent.check(self.hidden_size))?;
        self.check_parts(index)?;
        if !layer.has_kv() && !layer.is_cross {
            return Ok(());
        }
        if layer.is_cross && (layer.is_parallel || layer.ffn.num_experts() > 0 || layer.norms != Norms::Before) {
            return Err(format!("layer {index} looks at images, and has experts, parallel parts or norms behind them"));
        }
        let attention = &layer.attention;
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = *attention;
        in_range("number of attention heads", num_heads, MAX_HEADS)?;
        in_range("number of key and value heads", num_kv_heads, MAX_HEADS)?;
        in_range("head dimension", head_dim, MAX_HEAD_DIM)?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!("{num_heads} attention heads are not a multiple of {num_kv_heads} key and value heads"));
        }
        positive("attention scale", attention.scale)?;
        attention.clip.map_or(Ok(()), |clip| positive("bound of queries, keys and values", clip))?;
        let groups = attention.qkv_groups;
        if groups == 0 || !num_kv_heads.is_multiple_of(groups) {
            return Err(format!("{num_kv_heads} key and value heads are not a multiple of {groups} groups in one matrix"));
        }
        attention.v_norm.map_or(Ok(()), |eps| positive("epsilon of the norm of values", eps))?;
        attention.softcap.map_or(Ok(()), |cap| positive("softcap of attention scores", cap))?;
        for (what, reach) in [("sliding window", attention.window), ("chunk of attention", attention.chunk)] {
            if reach == Some(0) {
                return Err(format!("a {what} of 0 tokens sees nothing; it must be at least 1"));
            }
        }
        if let Some(QueryScale { beta, length, offset }) = attention.q_scale {
            in_range("length of a step of the queries' scale", length as usize, MAX_SIZE)?;
            if !beta.is_finite() || beta < 0.0 {
                return Err(format!("the scale of queries grows by {beta:?}; it must be finite, and not negative"));
            }
            in_range("offset of the queries' scale", offset as usize + 1, MAX_SIZE)?;
        }
        if attention.norms_last && attention.qk_norm == Some(QkNorm::Row) {
            return Err("a norm of whole rows of queries follows their rotation; it must come before it".into());
        }
        if let Some(of) = attention.shared_kv {
            let is_alike = |other: &AttentionConfig| {
                let kv = |config: &AttentionConfig| (config.num_kv_heads, config.head_dim, config.window, config.chunk);
                other.shared_kv.is_none() && kv(other) == kv(attention)
            };
            if !self.layers[..index].get(of).is_some_and(|layer| is_alike(&layer.attention)) {
                return Err(format!(
                    "layer {index} is to read the keys and values of layer {of}, which must come before it, have its own, and have \
                     as many heads of the same size and the same window"
                ));
            }
        }
        if attention.mask == Mask::Full && (attention.chunk.is_some() || attention.latent.is_some()) {
            return Err(format!(
                "layer {index} sees the tokens behind one in chunks or by latent attention, which is not computed"
            ));
        }
        if let Some(latent) = &attention.latent {
            latent.check(attention)?;
        }
        let Some(rope) = attention.rope else { return Ok(()) };
        self.ropes.get(rope).ok_or_else(|| format!("there is no rotation {rope}"))?.validate(head_dim)
    }
}

pub(super) fn in_range(name: &str, value: usize, max: usize) -> Result<(), String> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(format!("the {name} is {value}; it must be from 1 to {max}")) }
}

pub(in crate::model) fn positive(name: &str, value: impl Into<f64>) -> Result<(), String> {
    let value = value.into();
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(format!("the {name} is {value:?}; it must be positive and finite"))
    }
}

#[cfg(test)]
mod tests {
    use device::{Activation, KvDType};
    use paged::KvGroups;

    use super::*;
    use crate::model::config::LayerConfig;

    /// Of these heads and windows, each a layer; the last two read what layers 0 and 1 have written.
    fn sharing() -> DecoderConfig {
        let layers = [([4, 2, 16], None), ([2, 1, 32], Some(12)), ([2, 2, 16], None), ([3, 1, 32], Some(12))];
        let mut config = DecoderConfig {
            vocab_size: 8,
            hidden_size: 8,
            max_position_embeddings: 64,
            layers: layers.map(|(heads, _)| LayerConfig::new(heads, 8, Activation::Silu)).into(),
            ..DecoderConfig::default()
        };
        for (layer, (_, window)) in config.layers.iter_mut().zip(layers) {
            (layer.attention.window, layer.attention.rope) = (window, None);
        }
        for (layer, of) in [(2, 0), (3, 1)] {
            config.layers[layer].attention.shared_kv = Some(of);
        }
        config
    }

    #[test]
    fn layers_of_unequal_heads_share_a_pool_and_some_have_no_place_of_their_own() {
        let config = sharing();
        config.validate("made up").unwrap();
        let groups = KvGroups::of_model(&config, paged::KvDType::F16, 8).unwrap();
        assert_eq!(groups.groups.iter().map(|group| &group.layers[..]).collect::<Vec<_>>(), [[0], [1]]);
        let spec = config.kv_cache_spec((5, 8), KvDType::F16, &groups).unwrap();
        assert_eq!(spec.bytes_per_block(), Some(2 * 8 * 32 * 2));
        assert_eq!((spec.layers[2], spec.layers[3]), (spec.layers[0], spec.layers[1]));
    }

    #[test]
    fn keys_and_values_are_shared_with_a_layer_before_that_has_like_ones() {
        let refused = |change: &dyn Fn(&mut [LayerConfig])| {
            let mut config = sharing();
            change(&mut config.layers);
            config.validate("made up").unwrap_err().to_string()
        };
        for (layer, of) in [(2, 2), (2, 3), (2, 9), (3, 2), (3, 0)] {
            let error = refused(&|layers| layers[layer].attention.shared_kv = Some(of));
            assert!(error.contains(&format!("layer {layer} is to read the keys and values of layer {of}")), "{error}");
        }
        assert!(refused(&|layers| layers[3].attention.window = None).contains("the same window"));
        assert!(refused(&|layers| layers[2].attention.head_dim = 8).contains("heads of the same size"));
    }

    #[test]
    fn streams_and_cutoffs_are_checked() {
        let refused = |change: &dyn Fn(&mut DecoderConfig)| {
            let mut config = sharing();
            config.streams = Some(StreamsConfig { count: 4, active: 0, has_output_scale: true, branch_rank: 8 });
            config.validate("made up").unwrap();
            change(&mut config);
            config.validate("made up").unwrap_err().to_string()
        };
        let streams = |change: fn(&mut StreamsConfig)| refused(&|config| change(config.streams.as_mut().unwrap()));
        assert!(streams(|streams| streams.count = 0).contains("number of residual streams is 0"));
        assert!(streams(|streams| streams.count = 9).contains("from 1 to 8"));
        assert!(streams(|streams| streams.active = 4).contains("residual stream 4 of 4"));
        assert!(streams(|streams| streams.branch_rank = 0).contains("rank of the branch"));
        assert!(refused(&|config| config.layers[1].is_parallel = true).contains("not computed"));
        let cut = |cutoff| refused(&|config| config.layers[0].ffn.set_dense(|dense| dense.cutoff = Some(cutoff)));
        assert!(cut(f32::NAN).contains("deviations above the mean"));
        assert!(cut(f32::INFINITY).contains("deviations above the mean"));
    }
}
