//! The weights of a layer of the tower.

use device::{Constant, Linear, Norm};

use super::{
    bounded::Bounds,
    config::{InnerNorms, Positions, TowerConfig},
    weights::TowerWeights,
};
use crate::EngineError;

/// Norms within a layer.
pub(super) struct Inner {
    pub(super) q: Norm,
    pub(super) k: Norm,
    pub(super) v: Norm,
    pub(super) post_attn: Norm,
    pub(super) post_ffn: Norm,
}

/// A layer.
pub(super) struct TowerLayer {
    pub(super) attn_norm: Norm,
    pub(super) qkv: [Linear; 3],
    pub(super) attn_output: Linear,
    pub(super) ffn_norm: Norm,
    pub(super) gate: Option<Linear>,
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) has_window: bool,
    /// Of each head of queries and keys.
    pub(super) qk_norms: Option<[Norm; 2]>,
    pub(super) inner: Option<Inner>,
    pub(super) bounds: Option<Bounds>,
    /// What is added to the residual stream is multiplied by these: what attention gives, and the feed-forward network.
    pub(super) scales: [f32; 2],
}

impl TowerLayer {
    /// Asks for the weights of a layer; `named` puts before a name what all names of the tower begin with.
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        config: &TowerConfig,
        layer: usize,
        named: &dyn Fn(&str) -> String,
    ) -> Result<Self, EngineError> {
        let (names, kind) = (config.names, (config.norm, config.eps, 0.0));
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let named = |name: &str| named(&name.replace('*', &layer.to_string()));
        let scale = |part: usize| if names.scales[part].is_empty() { String::new() } else { named(names.scales[part]) };
        let is_fused = names.qkv[0] == names.qkv[1];
        let rows = [hidden, config.kv_size(), config.kv_size()];
        let mut of_qkv = |part: usize| {
            let name = named(names.qkv[part]);
            if names.is_paired && part < 2 {
                return weights.unpaired(&name, hidden, config.num_heads);
            }
            if matches!(config.positions, Positions::Axes { .. }) && part < 2 {
                return weights.reordered(&name, hidden, |row| in_halves(row, config.head_dim()));
            }
            let (num_rows, first) = if is_fused { (rows.iter().sum(), rows[..part].iter().sum()) } else { (rows[part], 0) };
            weights.rows_of_linear(&name, num_rows, first, [rows[part], hidden])
        };
        Ok(Self {
            qkv: [of_qkv(0)?, of_qkv(1)?, of_qkv(2)?],
            attn_norm: weights.norm(&named(names.attn_norm), hidden, kind)?,
            attn_output: weights.scaled(&named(names.attn_output), &scale(0), [hidden; 2])?,
            ffn_norm: weights.norm(&named(names.ffn_norm), hidden, kind)?,
            gate: config.is_gated.then(|| weights.linear(&named(names.gate), [inner, hidden])).transpose()?,
            up: weights.linear(&named(names.up), [inner, hidden])?,
            down: weights.scaled(&named(names.down), &scale(1), [hidden, inner])?,
            has_window: config.windows.as_ref().is_some_and(|windows| !windows.full_layers.contains(&layer)),
            qk_norms: match config.qk_norms {
                Some([q, k]) => {
                    let mut norm = |name: &str| weights.norm(&named(name), config.head_dim(), kind);
                    Some([norm(q)?, norm(k)?])
                }
                None => None,
            },
            inner: config.inner_norms.map(|names| Inner::new(weights, config, names, &named)).transpose()?,
            bounds: if config.is_bounded { Some(Bounds::new(weights, &names, &named)?) } else { None },
            scales: [1.0; 2],
        })
    }
}

impl Inner {
    fn new(
        weights: &mut TowerWeights<'_>,
        config: &TowerConfig,
        names: InnerNorms,
        named: &dyn Fn(&str) -> String,
    ) -> Result<Self, EngineError> {
        let (kind, head_dim) = ((config.norm, config.eps, 0.0), config.head_dim());
        let mut of_heads = |name: &str| {
            let norm = weights.norm(&named(name), head_dim, kind)?;
            // A model that is only counted has no weights.
            let order = |weight: &Constant| (0..weight.len()).map(|i| weight[in_halves(i, head_dim)]).collect::<Vec<_>>().into();
            Ok::<_, EngineError>(Norm { weight: order(&norm.weight), ..norm })
        };
        let (q, k) = (of_heads(names.q)?, of_heads(names.k)?);
        Ok(Self {
            v: Norm { weight: vec![1.0; head_dim].into(), ..q.clone() },
            q,
            k,
            post_attn: weights.norm(&named(names.post_attn), config.hidden_size, kind)?,
            post_ffn: weights.norm(&named(names.post_ffn), config.hidden_size, kind)?,
        })
    }
}

/// Where in a file the row of a head lies whose first half of pairs turns by one coordinate and the second by another: there each
/// half of the head has both elements of its pairs. Second and third quarter of a head change places.
fn in_halves(row: usize, head_dim: usize) -> usize {
    let (head, quarter) = (row / head_dim * head_dim, head_dim / 4);
    let (place, within) = (row % head_dim / quarter, row % quarter);
    head + [0, 2, 1, 3][place] * quarter + within
}
