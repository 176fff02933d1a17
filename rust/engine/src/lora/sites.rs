//! The linear layers of a loaded model, as adapters name them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use device::{Backend, Constant, Linear, Norm, Precision, RopeStyle};

use crate::{
    EngineError,
    model::{
        DecoderConfig,
        arch::{PERMUTED, unpermuted},
        architectures,
        config::{DeltaLayout, RecurrentConfig},
        loader::Loader,
        part::{Table, Weights},
    },
    weights::{FusedRows, MambaRole, Matrix, Names, Role, WeightId, WeightSource},
};

/// A linear layer that adapters may change.
pub(super) struct Site {
    pub matrix: Matrix,
    pub linear: Linear,
    /// The files have it among others.
    is_fused: bool,
    /// As the files have it, `[rows]`.
    pub bias: Option<Vec<f32>>,
}

/// All of them, and what is to be known of the model.
pub(crate) struct Sites {
    pub(super) list: Vec<Site>,
    names: Names,
    pub(super) is_gguf: bool,
    pub(super) config: DecoderConfig,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) precision: Precision,
}

/// Rows of a module, as a checkpoint has it, that are those of a site.
#[derive(Clone, Copy, Debug)]
pub(super) struct SitePart {
    pub site: usize,
    /// Rows of the site.
    pub own_rows: usize,
    /// All rows of the module.
    pub num_rows: usize,
    /// Where the site's are, unless they are all.
    fused: Option<FusedRows>,
}

impl SitePart {
    /// All rows of a module.
    pub fn whole(site: usize, num_rows: usize) -> Self {
        Self { site, own_rows: num_rows, num_rows, fused: None }
    }

    /// Its rows among those of a fused matrix, and which.
    fn fused(site: usize, matrix: &Matrix) -> Option<(WeightId, Self)> {
        let fused = matrix.fused?;
        let part = Self { site, own_rows: matrix.shape[0], num_rows: fused.num_rows, fused: Some(fused) };
        Some((matrix.id.with_role(fused.whole), part))
    }

    /// The row of the module that is row `row` of the site.
    pub fn row(&self, row: usize) -> usize {
        self.fused.map_or(row, |fused| fused.row(self.own_rows, row))
    }
}

/// Loads weights, and keeps what adapters must know of them.
pub(crate) struct Recorder<'a, 'b> {
    loader: &'b mut Loader<'a>,
    list: Vec<Site>,
}

impl<'a, 'b> Recorder<'a, 'b> {
    pub(crate) fn new(loader: &'b mut Loader<'a>) -> Self {
        Self { loader, list: Vec::new() }
    }

    /// The layers that were asked for.
    pub(crate) fn sites(self, backend: &Arc<dyn Backend>) -> Sites {
        let config = self.loader.config.clone();
        let (names, is_gguf) = match self.loader.weights {
            WeightSource::Safetensors { names, .. } => (*names, false),
            WeightSource::Gguf(_) => {
                let own = architectures().find(|architecture| architecture.model_types[0] == config.architecture);
                (own.map_or(&[][..], |architecture| architecture.names), true)
            }
        };
        let precision = self.loader.precision;
        Sites { list: self.list, names, is_gguf, config, backend: Arc::clone(backend), precision }
    }
}

/// Whether the outputs of such a layer are those of a module of the checkpoint's: what latent attention absorbs has none.
fn is_adaptable(role: Role) -> bool {
    use Role::{
        AttnGate, AttnK, AttnKvDown, AttnOutput, AttnOwnQ, AttnQ, AttnQDown, AttnQUp, AttnV, ConvB, ConvC, ConvX, DeltaADown,
        DeltaZDown, Embedding, ExpertDown, ExpertGate, ExpertUp, FfnDown, FfnGate, FfnUp, LatentDown, LatentUp, MambaDt,
        MambaXbc, MambaZ, Output, Router, SharedDown, SharedGate, SharedUp, SharedWeight,
    };
    let attention = [AttnQ, AttnK, AttnV, AttnOutput, AttnOwnQ, AttnGate, AttnQDown, AttnQUp, AttnKvDown];
    let network = [
        FfnGate, FfnUp, FfnDown, Router, ExpertGate, ExpertUp, ExpertDown, LatentDown, LatentUp, SharedGate, SharedUp, SharedDown,
    ];
    let mamba = [MambaRole::X, MambaRole::StepsDown, MambaRole::B, MambaRole::C, MambaRole::Steps].map(Role::Mamba);
    let recurrent = [ConvB, ConvC, ConvX, MambaZ, MambaXbc, MambaDt, DeltaZDown, DeltaADown];
    let others = [SharedWeight, Embedding, Output];
    is_of_gated_delta(role) || [&attention[..], &network, &recurrent, &mamba, &others].iter().any(|roles| roles.contains(&role))
}

/// The gated delta rule's. llama.cpp's converter changes the order of its value heads (`DeltaLayout::Tiled`): of rows beside
/// those of queries and keys in one module, and of the output's columns.
fn is_of_gated_delta(role: Role) -> bool {
    use Role::{DeltaA, DeltaB, DeltaK, DeltaQ, DeltaV, DeltaZ, MixOutput};
    [DeltaQ, DeltaK, DeltaV, DeltaZ, DeltaB, DeltaA, MixOutput].contains(&role)
}

/// What Transformers 5 calls a module of Mixtral's and Phi-3.5-MoE's, whose checkpoints have the older name.
fn newer_names(name: &str, role: Role) -> Vec<String> {
    let Some((before, after)) = name.split_once("block_sparse_moe.") else { return Vec::new() };
    let router = (role == Role::Router).then(|| format!("{before}mlp.router"));
    router.into_iter().chain([format!("{before}mlp.{after}")]).collect()
}

impl Weights for Recorder<'_, '_> {
    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, EngineError> {
        let mut linear = self.loader.linear(matrix)?;
        if is_adaptable(matrix.id.role) {
            linear.site = u32::try_from(self.list.len()).ok();
            let bias = self.loader.weights.bias(matrix)?;
            let is_fused = self.loader.weights.fused(matrix).is_some();
            self.list.push(Site { matrix: *matrix, linear: linear.clone(), is_fused, bias });
        }
        Ok(linear)
    }

    fn norm(&mut self, id: WeightId, shape: [usize; 2]) -> Result<Norm, EngineError> {
        self.loader.norm(id, shape)
    }

    fn vector(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.loader.vector(id, len)
    }

    fn values(&mut self, id: WeightId, len: usize) -> Result<Constant, EngineError> {
        self.loader.values(id, len)
    }

    fn table(&mut self, matrix: &Matrix) -> Result<Table, EngineError> {
        self.loader.table(matrix)
    }

    fn table_of_sums(&mut self, shape: [usize; 2], outer: Option<&Matrix>, inner: &Matrix) -> Result<Table, EngineError> {
        self.loader.table_of_sums(shape, outer, inner)
    }
}

impl Sites {
    /// The parts of each module of a Hugging Face checkpoint, by the name that a decoder by itself has for it
    /// ([`ModelPlace::plain`](crate::weights::ModelPlace::plain)), without `.weight`. The matrix of logits is `lm_head`, whether
    /// it is the token embedding or not.
    pub(super) fn hugging_face(&self) -> HashMap<String, Vec<SitePart>> {
        // Transformers' own modules may be called as only some checkpoints call them.
        let names = |id: WeightId, matrix: &Matrix| -> Vec<String> {
            let id = if id.role == Role::Embedding { id.with_role(Role::Output) } else { id };
            let number = matrix.expert.map_or(0, |expert| expert.index);
            let plain = |name: String| Some(name.strip_suffix(".weight")?.replace('*', &number.to_string()));
            let both = [Some(id.hugging_face(self.names)), id.hugging_face_otherwise(self.names)];
            both.into_iter().flatten().filter_map(plain).collect()
        };
        let mut modules: HashMap<_, Vec<_>> = HashMap::new();
        for (site, Site { matrix, .. }) in self.list.iter().enumerate() {
            if self.is_tiled(&matrix.id) {
                continue;
            }
            // A file may keep by itself what a checkpoint has among others, and the other way round.
            let parts = [Some((matrix.id, SitePart::whole(site, matrix.shape[0]))), SitePart::fused(site, matrix)];
            for (id, part) in parts.into_iter().flatten() {
                let names = names(id, matrix).into_iter();
                let all = names.flat_map(|name| newer_names(&name, id.role).into_iter().chain([name]));
                for name in all.collect::<BTreeSet<_>>() {
                    modules.entry(name).or_default().push(part);
                }
            }
        }
        modules
    }

    /// Whether the order of heads is not that of Hugging Face checkpoints.
    fn is_tiled(&self, id: &WeightId) -> bool {
        let layer = id.layer.and_then(|layer| self.config.layers.get(layer)?.recurrent);
        let layout = layer.and_then(|recurrent| match recurrent {
            RecurrentConfig::GatedDelta { layout, .. } => Some(layout),
            _ => None,
        });
        layout == Some(DeltaLayout::Tiled) && is_of_gated_delta(id.role)
    }

    /// The same of a GGUF file, with `.weight`; experts are stacked in one module.
    pub(super) fn gguf(&self) -> HashMap<String, Vec<SitePart>> {
        let mut modules: HashMap<_, Vec<_>> = HashMap::new();
        for (site, Site { matrix, is_fused, .. }) in self.list.iter().enumerate() {
            let fused = SitePart::fused(site, matrix).filter(|_| *is_fused);
            let (id, part) = fused.unwrap_or_else(|| (matrix.id, SitePart::whole(site, matrix.shape[0])));
            for name in [Some(id.gguf()), id.gguf_otherwise()].into_iter().flatten() {
                modules.entry(name).or_default().push(part);
            }
        }
        modules
    }

    /// The token embedding, named as in [`hugging_face`](Self::hugging_face).
    pub(super) fn embedding_name(&self) -> String {
        let name = WeightId::global(Role::Embedding).hugging_face(self.names);
        name.trim_end_matches(".weight").to_owned()
    }

    /// `general.architecture` of GGUF files of such models.
    pub(super) fn gguf_architecture(&self) -> Option<&'static str> {
        let own = architectures().find(|architecture| architecture.model_types[0] == self.config.architecture);
        own.map(|architecture| architecture.gguf)
    }

    /// Whether a module, named so too, is that of all experts of a layer.
    pub(super) fn is_of_experts(&self, module: &str, layer: usize) -> bool {
        let name = WeightId::layer(layer, Role::ExpertDown).hugging_face(self.names);
        let newer = newer_names(&name, Role::ExpertDown);
        let before = |name: &str| name.split_once(".experts").map(|(before, _)| before.len());
        newer.iter().chain([&name]).any(|name| before(name).is_some_and(|len| module == format!("{}.experts", &name[..len])))
    }

    /// The site of the matrix of logits.
    pub(super) fn lm_head(&self) -> Option<usize> {
        self.list.iter().position(|site| site.matrix.id.layer.is_none())
    }

    /// The experts of a layer with this role, by number.
    pub(super) fn experts(&self, layer: usize, role: Role) -> impl Iterator<Item = (usize, usize)> {
        self.list.iter().enumerate().filter_map(move |(site, of)| {
            let is_one = of.matrix.id.layer == Some(layer) && of.matrix.id.role == role;
            Some((site, of.matrix.expert.filter(|_| is_one)?.index))
        })
    }

    /// Whether the experts of this role lie in a checkpoint as rows of their outputs, one after the other.
    pub(super) fn has_plain_experts(&self, role: Role) -> bool {
        WeightId::layer(0, role).place(self.names).is_plain()
    }

    /// Whether a module of a Hugging Face checkpoint has the transpose of its weight.
    pub(super) fn is_transposed(&self, part: &SitePart) -> bool {
        let matrix = &self.list[part.site].matrix;
        let role = part.fused.map_or(matrix.id.role, |fused| fused.whole);
        matrix.expert.is_none() && matrix.id.with_role(role).place(self.names).is_transposed
    }

    /// The row of a Hugging Face checkpoint's module that is row `row` of a site.
    pub(super) fn source_row(&self, site: &Site, row: usize) -> usize {
        let is_rotated = matches!(site.matrix.id.role, Role::AttnQ | Role::AttnK);
        let layer = site.matrix.id.layer.and_then(|layer| self.config.layers.get(layer));
        let Some(layer) = layer.filter(|_| is_rotated && self.is_permuted()) else { return row };
        unpermuted(layer.attention.head_dim, row)
    }

    fn is_permuted(&self) -> bool {
        self.is_gguf
            && PERMUTED.contains(&self.config.architecture)
            && self.config.ropes.first().is_some_and(|rope| rope.style == RopeStyle::Interleaved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_the_names_of_checkpoints_and_of_transformers_5() {
        let newer = |name, role| newer_names(name, role);
        assert_eq!(
            newer("model.layers.3.block_sparse_moe.gate", Role::Router),
            ["model.layers.3.mlp.router", "model.layers.3.mlp.gate"]
        );
        assert_eq!(newer("model.layers.3.block_sparse_moe.experts.2.w1", Role::ExpertGate), ["model.layers.3.mlp.experts.2.w1"]);
        assert!(newer("model.layers.3.mlp.gate", Role::Router).is_empty());
    }
}
