//! Adapters of a model's own: files have them beside the base, and a request runs with the one for what it holds.

use std::{path::PathBuf, sync::Arc};

use regex::{Regex, RegexBuilder};

use super::{
    AdapterBuilder, Generation, Sites,
    builder::{Floats, Product, invalid},
    registry,
};
use crate::{
    EngineError, MediaKind,
    media::Encoders,
    model::fields::{Fields, HfFields},
    weights::{ModelPlace, WeightSource, floats},
};

/// The largest rank.
const MAX_RANK: usize = 4096;
/// Bytes of a compiled pattern at most.
const MAX_PATTERN_BYTES: usize = 1 << 17;
/// What the adapters are called, by what a request must hold to run with one.
const NAMES: [(MediaKind, &str); 2] = [(MediaKind::Image, "vision"), (MediaKind::Sound, "speech")];

/// Where one lies.
#[derive(Clone, Debug)]
pub(crate) enum OwnAdapter {
    /// In a folder of PEFT's.
    Folder(PathBuf),
    /// Among the base's weights.
    Among(Among),
}

/// One among the base's weights.
#[derive(Clone, Debug)]
pub(crate) struct Among {
    name: &'static str,
    rank: usize,
    alpha: f32,
    /// The modules that it changes, as the model without its head calls them.
    modules: Regex,
}

impl Encoders<OwnAdapter> {
    /// Those of Phi-4-multimodal, of the kinds that the model takes. In its first files they lie among the weights, as
    /// config.json says; Transformers has folders of them, and a model whose base holds what they would do has none: `None`.
    pub(crate) fn of_phi4(
        path: &std::path::Path,
        whole: &HfFields<'_>,
        kinds: &[MediaKind],
    ) -> Result<Option<Self>, EngineError> {
        let is_first = whole.text("model_type")?.as_deref() == Some("phi4mm");
        let mut all = Self::default();
        for (kind, name) in NAMES.into_iter().filter(|(kind, _)| kinds.contains(kind)) {
            if is_first {
                all = all.with(kind, OwnAdapter::Among(Among::read(whole, name)?));
                continue;
            }
            let folder = path.join(format!("{name}-lora"));
            if folder.is_dir() {
                all = all.with(kind, OwnAdapter::Folder(folder));
            } else {
                tracing::warn!(
                    "{}: there is no such folder, so {} are answered without an adapter",
                    folder.display(),
                    kind.plural()
                );
            }
        }
        Ok(Some(all).filter(|all| !all.is_empty()))
    }

    /// Bytes that they will keep.
    pub(crate) fn planned_bytes(&self, weights: &WeightSource) -> Result<u64, EngineError> {
        self.iter()
            .map(|adapter| match adapter {
                OwnAdapter::Folder(folder) => registry::planned_bytes(folder),
                OwnAdapter::Among(among) => among.planned_bytes(weights),
            })
            .sum()
    }

    /// Loads them.
    ///
    /// # Errors
    /// [`EngineError::Adapter`] and [`EngineError::Load`] for files that cannot be honoured.
    pub(crate) fn load(&self, sites: &Arc<Sites>, weights: &WeightSource) -> Result<Encoders<Arc<Generation>>, EngineError> {
        self.try_map(|adapter| {
            let builder = AdapterBuilder::new(sites, MAX_RANK);
            let generation = match adapter {
                OwnAdapter::Folder(folder) => registry::read(builder, folder, u64::MAX),
                OwnAdapter::Among(among) => among.load(builder, weights),
            };
            generation.map(Arc::new)
        })
    }
}

impl Among {
    /// As config.json says under `vision_lora` and `speech_lora`; `dp` is of training alone.
    fn read(whole: &HfFields<'_>, name: &'static str) -> Result<Self, EngineError> {
        let key = format!("{name}_lora");
        let fields = whole.child(&key)?.ok_or_else(|| whole.error(&key, "is missing"))?;
        if let Some(other) = fields.object.keys().find(|key| !["r", "lora_alpha", "layer", "dp"].contains(&&key[..])) {
            return Err(fields.error(other, "is not known; implemented: r, lora_alpha, layer, dp"));
        }
        let rank = fields.required_size("r")?;
        let alpha = fields.number("lora_alpha")?.ok_or_else(|| fields.error("lora_alpha", "is missing"))? as f32;
        if rank == 0 || rank > MAX_RANK || !(alpha / rank as f32).is_finite() {
            return Err(fields.error("r", format!("is {rank}, with lora_alpha {alpha}; there may be ranks from 1 to {MAX_RANK}")));
        }
        let pattern = fields.text("layer")?.ok_or_else(|| fields.error("layer", "is missing"))?;
        let modules = RegexBuilder::new(&format!("^(?:{pattern})$")).size_limit(MAX_PATTERN_BYTES).build();
        let modules = modules.map_err(|why| fields.error("layer", format!("is no pattern: {why}")))?;
        Ok(Self { name, rank, alpha, modules })
    }

    /// The tensors of it, in order: their modules, and their names.
    fn tensors<'a>(&self, weights: &'a WeightSource, factor: &str) -> Vec<(&'a str, &'a str)> {
        let suffix = format!(".lora_{factor}.{}.weight", self.name);
        let mut all: Vec<_> =
            weights.tensor_names().into_iter().filter_map(|name| Some((name.strip_suffix(&suffix[..])?, name))).collect();
        all.sort_unstable();
        all
    }

    fn planned_bytes(&self, weights: &WeightSource) -> Result<u64, EngineError> {
        let tensors = ["A", "B"].map(|factor| self.tensors(weights, factor)).concat();
        let num_values = |(_, name): &(&str, &str)| {
            let (_, shape) = weights.tensor(name)?;
            Ok::<_, EngineError>(shape.iter().fold(1_u64, |product, len| product.saturating_mul(*len as u64)))
        };
        let values =
            tensors.iter().map(num_values).try_fold(0_u64, |sum, values| Ok::<_, EngineError>(sum.saturating_add(values?)))?;
        Ok(values.saturating_mul(size_of::<f32>() as u64))
    }

    /// Whether it is to change a module.
    fn changes(&self, module: &str) -> bool {
        self.modules.is_match(module.strip_prefix("model.").unwrap_or(module))
    }

    fn load(&self, mut builder: AdapterBuilder<'_>, weights: &WeightSource) -> Result<Generation, EngineError> {
        let is_other = |name: &&str| {
            let is_of =
                |(_, own): &(MediaKind, &str)| ["A", "B"].iter().any(|it| name.ends_with(&format!(".lora_{it}.{own}.weight")));
            name.contains(".lora_") && !NAMES.iter().any(is_of)
        };
        if let Some(other) = weights.tensor_names().into_iter().find(is_other) {
            return Err(invalid(format!("tensor `{other}` is of no adapter that is known; known are vision and speech")));
        }
        let known = builder.sites.hugging_face();
        let [of_a, of_b] = ["A", "B"].map(|factor| self.tensors(weights, factor));
        let modules: Vec<_> = of_a.iter().map(|(module, _)| ModelPlace::plain(module)).collect();
        if let Some(missing) = known.keys().filter(|module| self.changes(module) && !modules.contains(module)).min() {
            return Err(invalid(format!("`{}_lora.layer` has `{missing}`, and there are no tensors of it", self.name)));
        }
        if !of_a.iter().map(|(module, _)| module).eq(of_b.iter().map(|(module, _)| module)) {
            return Err(invalid(format!("the adapter `{}` has modules with one of two factors", self.name)));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{} {}", self.rank, self.alpha).as_bytes());
        for ((name, (_, of_a)), (_, of_b)) in modules.iter().zip(of_a).zip(of_b) {
            let Some(parts) = known.get(name).filter(|_| self.changes(name)) else {
                let name = format!("it changes `{name}`, which is no linear layer of this model that `layer` has");
                return Err(invalid(name));
            };
            let mut factor = |tensor: &str| {
                let (view, shape) = weights.tensor(tensor)?;
                hasher.update(tensor.as_bytes()).update(view.bytes());
                let values = floats(view.dtype, view.bytes());
                view.release();
                let factor = values.map(|values| Floats { shape, values }).filter(Floats::are_finite);
                factor.ok_or_else(|| invalid(format!("tensor `{tensor}` has no floats, or some that are no numbers")))
            };
            let (a, b) = (factor(of_a)?, factor(of_b)?);
            if a.shape.first() != Some(&self.rank) {
                return Err(invalid(format!("`{of_a}` has shape {:?}, and `{}_lora.r` is {}", a.shape, self.name, self.rank)));
            }
            let scale = self.alpha / self.rank as f32;
            let (b_bias, magnitude) = (None, None);
            builder.product(parts, &Product { name, a: &a, b: &b, b_bias, magnitude, scale, is_hugging_face: true })?;
        }
        registry::generation(builder, &hasher)
    }
}
