//! The tensors of a GGUF file that is made of a folder: names, shapes and orders of rows are those of llama.cpp's converter.

use std::collections::{HashMap, HashSet};

use device::DType;

use super::{
    dtype,
    families::Family,
    writer::{Part, Places, PlannedTensor, Values},
};
use crate::{
    EngineError, Isq,
    model::{
        DecoderConfig, LayerConfig, RopeConfig, RopeScaling,
        arch::{PERMUTED, unpermuted},
        config::{DeltaLayout, RecurrentConfig},
        visit::for_each_matrix,
    },
    weights::{Matrix, ModelPlace, Role, WeightId, WeightSource},
};

/// What mixes tokens in a layer, in the order of the file.
const MIXERS: [Role; 28] = [
    Role::AttnQ,
    Role::AttnGate,
    Role::AttnK,
    Role::AttnV,
    Role::AttnQkv,
    Role::AttnQNorm,
    Role::AttnKNorm,
    Role::AttnSinks,
    Role::AttnQDown,
    Role::AttnQDownNorm,
    Role::AttnQUp,
    Role::AttnKvDown,
    Role::AttnKvNorm,
    Role::AttnKvUp,
    Role::AttnOutput,
    Role::MixInput,
    Role::DeltaQkvz,
    Role::DeltaQkv,
    Role::DeltaZ,
    Role::DeltaBa,
    Role::DeltaB,
    Role::DeltaA,
    Role::Conv,
    Role::MixDtBias,
    Role::MixDecay,
    Role::MambaD,
    Role::MixNorm,
    Role::MixOutput,
];

/// A dense network.
const DENSE: [Role; 4] = [Role::FfnGate, Role::FfnUp, Role::FfnGateUp, Role::FfnDown];

/// A mixture of experts.
const EXPERTS: [Role; 13] = [
    Role::Router,
    Role::RouterCorrection,
    Role::LatentDown,
    Role::LatentUp,
    Role::ExpertGate,
    Role::ExpertUp,
    Role::ExpertGateUp,
    Role::ExpertDown,
    Role::SharedGate,
    Role::SharedUp,
    Role::SharedGateUp,
    Role::SharedDown,
    Role::SharedWeight,
];

/// Queries, keys and values one after the other, whatever their order in the source.
const QKV: Pieces = &[(Role::AttnQkv, &[Role::AttnQ, Role::AttnK, Role::AttnV])];

/// The tensors of a file that are one in the source, or lie otherwise there, and the matrices that each has one after the other.
type Pieces = &'static [(Role, &'static [Role])];

/// What a checkpoint keeps as one and a file apart.
const fn pieces(role: Role) -> Pieces {
    match role {
        Role::AttnQkv => &[(Role::AttnQ, &[Role::AttnQ]), (Role::AttnK, &[Role::AttnK]), (Role::AttnV, &[Role::AttnV])],
        Role::AttnKvUp => &[(Role::AttnKeyUp, &[Role::AttnKeyUp]), (Role::AttnValueUp, &[Role::AttnValueUp])],
        Role::DeltaQkvz => &[(Role::DeltaQkv, &[Role::DeltaQ, Role::DeltaK, Role::DeltaV]), (Role::DeltaZ, &[Role::DeltaZ])],
        Role::FfnGateUp => &[(Role::FfnGate, &[Role::FfnGate]), (Role::FfnUp, &[Role::FfnUp])],
        Role::SharedGateUp => &[(Role::SharedGate, &[Role::SharedGate]), (Role::SharedUp, &[Role::SharedUp])],
        Role::ExpertGateUp => &[(Role::ExpertGate, &[Role::ExpertGate]), (Role::ExpertUp, &[Role::ExpertUp])],
        // Stacked otherwise than in a file.
        Role::ExpertGate => &[(Role::ExpertGate, &[Role::ExpertGate])],
        Role::ExpertUp => &[(Role::ExpertUp, &[Role::ExpertUp])],
        Role::ExpertDown => &[(Role::ExpertDown, &[Role::ExpertDown])],
        Role::AttnOutput => &[(Role::AttnOutput, &[Role::AttnOutput])],
        Role::FfnUp => &[(Role::FfnUp, &[Role::FfnUp])],
        Role::FfnDown => &[(Role::FfnDown, &[Role::FfnDown])],
        _ => &[],
    }
}

/// Collects the tensors of the file.
pub(super) struct Tensors<'a> {
    weights: &'a WeightSource,
    config: &'a DecoderConfig,
    isq: Isq,
    family: &'static Family,
    /// The rows of q and k change places.
    is_permuted: bool,
    /// The matrices that the model multiplies by.
    matrices: HashMap<(Option<usize>, Role), Vec<Matrix>>,
    list: Vec<PlannedTensor>,
    /// Names in the source.
    used: HashSet<String>,
}

impl<'a> Tensors<'a> {
    pub fn new(
        weights: &'a WeightSource,
        config: &'a DecoderConfig,
        isq: Isq,
        family: &'static Family,
    ) -> Result<Self, EngineError> {
        let mut matrices = HashMap::<_, Vec<_>>::new();
        for_each_matrix(config, |matrix| {
            matrices.entry((matrix.id.layer, matrix.id.role)).or_default().push(*matrix);
            Ok(())
        })?;
        let is_permuted = PERMUTED.contains(&config.architecture);
        Ok(Self { weights, config, isq, family, is_permuted, matrices, list: Vec::new(), used: HashSet::new() })
    }

    /// All of them.
    pub fn all(mut self) -> Result<Vec<PlannedTensor>, EngineError> {
        self.rope_factors();
        self.add(WeightId::global(Role::Embedding))?;
        self.add(WeightId::global(Role::Positions))?;
        for layer in 0..self.config.layers.len() {
            let LayerConfig { norms, is_parallel, has_own_ffn_norm, .. } = self.config.layers[layer];
            // What one family calls the norm after attention is another's before the feed-forward network.
            let has_weights = self.config.norm.has_weights;
            let [before, after] =
                [norms.are_before(), norms.are_after()].map(|norms| norms.map(|is_there| is_there && has_weights));
            let of_norms = [
                (Role::AttnNorm, before[0]),
                (Role::FfnNorm, before[1] && (!is_parallel || has_own_ffn_norm)),
                (Role::PostAttnNorm, after[0]),
                (Role::PostFfnNorm, after[1]),
            ];
            let networks: &[Role] = if self.config.layers[layer].ffn.num_experts() > 0 { &EXPERTS } else { &DENSE };
            let norms = of_norms.into_iter().filter(|(_, is_there)| *is_there).map(|(role, _)| role);
            for role in norms.chain(MIXERS).chain(networks.iter().copied()) {
                self.add_with_bias(WeightId::layer(layer, role))?;
            }
        }
        if self.config.norm.has_weights {
            self.add_with_bias(WeightId::global(Role::OutputNorm))?;
        }
        if self.config.tie_word_embeddings {
            self.used.insert(self.weights.name(WeightId::global(Role::Output)));
        } else {
            self.add_with_bias(WeightId::global(Role::Output))?;
        }
        self.check_all_used()?;
        Ok(self.list)
    }

    fn add_with_bias(&mut self, id: WeightId) -> Result<(), EngineError> {
        self.add(id)?;
        self.add(id.bias())
    }

    /// Does nothing for a tensor that is not there.
    fn add(&mut self, id: WeightId) -> Result<(), EngineError> {
        if self.weights.contains(id) && self.is_in_pieces(id) {
            let keeps_one = id.role == Role::AttnQkv && !self.family.cuts_qkv;
            return self.add_pieces(id, if keeps_one { QKV } else { pieces(id.role) });
        }
        let mut names = self.weights.stored_names(id);
        names.retain(|name| !self.used.contains(name));
        let Some(first) = names.first() else { return Ok(()) };
        let (view, mut shape) = self.weights.tensor(first)?;
        self.used.extend(names.iter().cloned());
        if self.weights.name(id).contains('*') {
            shape.insert(0, names.len());
        }
        if matches!(id.role, Role::SharedWeight | Role::Conv) {
            shape.retain(|n| *n != 1);
        }
        let mut dims: Vec<_> = shape.iter().rev().copied().collect();
        let num_rows = if dims.len() == 1 { view.cols } else { view.rows };
        let places = Places { rows: self.rows(id, num_rows)?, cols: self.cols(id) };
        if dims.len() == 1 || is_values(id.role) {
            self.shape_values(id, &mut dims);
            return self.add_values(id, &names, dims, places);
        }
        // What chooses experts is multiplied exactly, and vectors of positions are added as they are.
        let dtype = match id.role {
            Role::Router | Role::Positions => DType::F32,
            _ => dtype(self.isq, view.dtype, &dims, Some(id.layer.is_none())),
        };
        let parts = names.into_iter().map(Part::Tensor).collect();
        self.list.push(PlannedTensor { name: self.name(id), dims, dtype, values: Values::Stored { parts, places } });
        Ok(())
    }

    /// The name in the file.
    fn name(&self, id: WeightId) -> String {
        let otherwise = if self.family.otherwise.contains(&id.role) { id.gguf_otherwise() } else { None };
        otherwise.unwrap_or_else(|| id.gguf())
    }

    /// Whether it is one in the source and several in the file, or lies otherwise there.
    fn is_in_pieces(&self, id: WeightId) -> bool {
        match id.role {
            Role::FfnGateUp => self.family.cuts_ffn,
            Role::AttnQkv => {
                let is_in_groups = id.layer.is_some_and(|layer| self.config.layers[layer].attention.qkv_groups > 1);
                self.family.cuts_qkv || is_in_groups || self.weights.is_transposed(id)
            }
            Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => self.weights.is_stacked_otherwise(id),
            Role::AttnOutput | Role::FfnUp | Role::FfnDown => self.weights.is_transposed(id),
            role => !pieces(role).is_empty(),
        }
    }

    fn add_pieces(&mut self, id: WeightId, pieces: Pieces) -> Result<(), EngineError> {
        self.used.extend(self.weights.names_of_parts(id));
        for (role, parts) in pieces {
            let matrices = parts.iter().filter_map(|part| self.matrices.get(&(id.layer, *part))).flatten();
            let matrices: Vec<_> = matrices.copied().collect();
            let Some(first) = matrices.first() else { continue };
            let mut dims = vec![first.shape[1], matrices.iter().map(|matrix| matrix.shape[0]).sum()];
            if let Some(of) = first.expert {
                dims = vec![first.shape[1], first.shape[0], of.count];
            }
            let piece = WeightId { role: *role, ..id };
            if id.bias {
                dims.remove(0);
                let mut values = Vec::new();
                for matrix in &matrices {
                    values.extend(self.weights.bias(matrix)?.unwrap_or_default());
                }
                if let Some(rows) = self.rows(piece, values.len())? {
                    values = rows.iter().map(|row| values[*row]).collect();
                }
                let name = self.name(piece);
                self.list.push(PlannedTensor { name, dims, dtype: DType::F32, values: Values::Given(values) });
                continue;
            }
            let dtype = dtype(self.isq, self.weights.dtype(first)?, &dims, Some(false));
            let places = Places { rows: self.rows(piece, dims[1])?, cols: None };
            let parts = matrices.into_iter().map(Part::Matrix).collect();
            let values = Values::Stored { parts, places };
            self.list.push(PlannedTensor { name: self.name(piece), dims, dtype, values });
        }
        Ok(())
    }

    /// A tensor that stays as it is, in F32.
    fn add_values(&mut self, id: WeightId, names: &[String], dims: Vec<usize>, places: Places) -> Result<(), EngineError> {
        let mut values = Vec::new();
        for name in names {
            values.extend(self.weights.floats(name)?);
        }
        for value in &mut values {
            match id.role {
                // The rate itself, of its negative's logarithm.
                Role::MixDecay => *value = -value.exp(),
                role if is_norm(role) && !id.bias => *value += self.config.norm.offset,
                _ => {}
            }
        }
        if let Some(rows) = places.rows {
            let width = values.len() / rows.len().max(1);
            values = rows.iter().flat_map(|row| values[row * width..(row + 1) * width].to_vec()).collect();
        }
        self.list.push(PlannedTensor { name: self.name(id), dims, dtype: DType::F32, values: Values::Given(values) });
        Ok(())
    }

    /// What a layer of Mamba-2 has a number of for each head or group is a column there.
    fn shape_values(&self, id: WeightId, dims: &mut Vec<usize>) {
        let recurrent = id.layer.and_then(|layer| self.config.layers[layer].recurrent);
        let Some(RecurrentConfig::Mamba2 { num_groups, .. }) = recurrent else { return };
        match id.role {
            Role::MixDecay | Role::MambaD => dims.insert(0, 1),
            Role::MixNorm if dims[0].is_multiple_of(num_groups) => *dims = vec![dims[0] / num_groups, num_groups],
            _ => {}
        }
    }

    /// Of so many rows in the source, those that are the rows of the file.
    fn rows(&self, id: WeightId, num_rows: usize) -> Result<Option<Vec<usize>>, EngineError> {
        let Some(layer) = id.layer.map(|layer| &self.config.layers[layer]) else { return Ok(None) };
        if self.is_permuted && matches!(id.role, Role::AttnQ | Role::AttnK) {
            let head_dim = layer.attention.head_dim;
            if !head_dim.is_multiple_of(2) || !num_rows.is_multiple_of(head_dim) {
                let name = self.weights.name(id);
                return Err(EngineError::Load(format!(
                    "tensor `{name}` has {num_rows} rows, no multiple of heads of {head_dim}"
                )));
            }
            return Ok(Some((0..num_rows).map(|row| unpermuted(head_dim, row)).collect()));
        }
        let Some((heads, value_dim, keys)) = tiled_heads(layer) else { return Ok(None) };
        let (first, of_head) = match id.role {
            Role::DeltaQkv | Role::Conv => (keys, value_dim),
            Role::DeltaZ => (0, value_dim),
            Role::DeltaB | Role::DeltaA | Role::MixDtBias | Role::MixDecay => (0, 1),
            _ => return Ok(None),
        };
        let rows: Vec<_> = (0..first).chain(elements(&heads, of_head).map(|row| first + row)).collect();
        if rows.len() != num_rows {
            let name = self.weights.name(id);
            return Err(EngineError::Load(format!(
                "tensor `{name}` has {num_rows} rows; the configuration asks for {}",
                rows.len()
            )));
        }
        Ok(Some(rows))
    }

    /// The same of columns.
    fn cols(&self, id: WeightId) -> Option<Vec<usize>> {
        let layer = &self.config.layers[id.layer.filter(|_| id.role == Role::MixOutput && !id.bias)?];
        let (heads, value_dim, _) = tiled_heads(layer)?;
        Some(elements(&heads, value_dim).collect())
    }

    /// Divisors of frequencies are tensors of their own.
    fn rope_factors(&mut self) {
        let Some(rope) = self.config.ropes.first() else { return };
        let mut add = |role, values: Vec<f32>| {
            let name = WeightId::global(role).gguf();
            self.list.push(PlannedTensor { name, dims: vec![values.len()], dtype: DType::F32, values: Values::Given(values) });
        };
        match &rope.scaling {
            RopeScaling::Llama3 { .. } => {
                let plain = RopeConfig { scaling: RopeScaling::None, ..rope.clone() };
                let pairs = plain.frequencies(0).into_iter().zip(rope.frequencies(0));
                add(Role::RopeFreqs, pairs.map(|(plain, stretched)| plain / stretched).collect());
            }
            RopeScaling::Factors(values) => add(Role::RopeFreqs, values.clone()),
            RopeScaling::LongRope { short, long, .. } => {
                add(Role::RopeFactorsLong, long.clone());
                add(Role::RopeFactorsShort, short.clone());
            }
            // No model that is made into a file has one of a part, or turns backwards.
            RopeScaling::None
            | RopeScaling::Backwards
            | RopeScaling::Linear(_)
            | RopeScaling::Yarn { .. }
            | RopeScaling::Partial(_) => {}
        }
    }

    /// A tensor of the decoder that has no place in the file would be lost. What is not of the decoder has a file of its own, or
    /// none.
    fn check_all_used(&self) -> Result<(), EngineError> {
        let path = self.weights.path().display();
        let (mut encoders, mut heads) = (0, 0);
        for name in self.weights.tensor_names() {
            let plain = ModelPlace::plain(name);
            let layer = plain.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            if self.used.contains(name) || is_derived(name) {
                continue;
            }
            if plain.starts_with("mtp.") || layer.is_some_and(|layer| layer >= self.config.layers.len()) {
                heads += 1;
            } else if layer.is_none() && self.weights.is_beside_decoder(name) {
                encoders += 1;
            } else {
                let architecture = self.config.architecture;
                return Err(EngineError::NotSupported(format!(
                    "{path}: tensor `{name}` has no place in a GGUF file of the architecture {architecture}"
                )));
            }
        }
        for (count, what) in [(encoders, "encoders of images and sounds"), (heads, "heads that predict further tokens (MTP)")] {
            if count > 0 {
                tracing::warn!("{path}: {count} tensors of {what} are left out of the GGUF file");
            }
        }
        Ok(())
    }
}

/// The value heads of a layer in the order of the file, by their number within their key head, if that is another one; the
/// elements of each, and the rows of queries and keys before them.
fn tiled_heads(layer: &LayerConfig) -> Option<(Vec<usize>, usize, usize)> {
    let Some(RecurrentConfig::GatedDelta { num_key_heads, num_value_heads, key_dim, value_dim, layout, .. }) = layer.recurrent
    else {
        return None;
    };
    let shared = num_value_heads / num_key_heads.max(1);
    let heads = (0..shared).flat_map(|within| (0..num_key_heads).map(move |key| key * shared + within)).collect();
    (layout == DeltaLayout::Apart && shared > 1).then_some((heads, value_dim, 2 * num_key_heads * key_dim))
}

/// All elements of heads.
fn elements(heads: &[usize], of_head: usize) -> impl Iterator<Item = usize> {
    heads.iter().flat_map(move |head| head * of_head..(head + 1) * of_head)
}

/// Whether it stays as it is, whatever its shape.
const fn is_values(role: Role) -> bool {
    is_norm(role) || matches!(role, Role::Conv)
}

const fn is_norm(role: Role) -> bool {
    use Role::{AttnKNorm, AttnNorm, AttnQNorm, FfnNorm, OutputNorm, PostAttnNorm, PostFfnNorm};
    matches!(role, AttnNorm | AttnQNorm | AttnKNorm | FfnNorm | PostAttnNorm | PostFfnNorm | OutputNorm)
}

/// Computed from the configuration: frequencies, and the masks of GPT-2 and GPT-NeoX.
fn is_derived(name: &str) -> bool {
    ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"]
        .iter()
        .any(|derived| name.ends_with(derived))
}
