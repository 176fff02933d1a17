//! Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`
//! (<https://huggingface.co/docs/peft/developer_guides/checkpoint>).

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use device::{EmbeddingProduct, mmap::Bytes};
use regex::RegexBuilder;
use safetensors::SafeTensors;
use serde_json::{Map, Value};

use super::{
    builder::{AdapterBuilder, Floats, Product, invalid, view},
    sites::SitePart,
};
use crate::{
    EngineError,
    json::{read_bounded, required_json},
    weights::{ModelPlace, Role, decode_floats},
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Bytes of a compiled pattern at most.
const MAX_PATTERN_BYTES: usize = 1 << 17;

/// Fields that say of the weights what cannot be honoured unless they are empty, and what would work.
const REFUSED: [(&str, &str); 7] = [
    ("lora_ga_config", "an adapter that was converted to a LoRA of the unchanged base"),
    ("layer_replication", "an adapter of the layers as they are"),
    ("use_qalora", "a LoRA without groups"),
    ("alora_invocation_tokens", "an adapter that is always on"),
    ("ensure_weight_tying", "an adapter with lm_head among its target_modules"),
    ("arrow_config", "one adapter at a time"),
    ("corda_config", "an adapter that was converted to a LoRA of the unchanged base"),
];
/// Beginnings of what changes the base weights when it initialises.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];
/// Patterns of names at most.
const MAX_PATTERNS: usize = 1000;

/// The tensors of one module.
#[derive(Default)]
struct Module {
    /// As the adapter has it.
    name: String,
    a: Option<Floats>,
    b: Option<Floats>,
    b_bias: Option<Floats>,
    magnitude: Option<Floats>,
    embedding_a: Option<Floats>,
    embedding_b: Option<Floats>,
    tokens: Option<Floats>,
    base: Option<Floats>,
    base_bias: Option<Floats>,
    weight: Option<Floats>,
    bias: Option<Floats>,
}

/// What follows a module's name, and where it goes.
type Place = fn(&mut Module) -> &mut Option<Floats>;
const SUFFIXES: [(&str, Place); 14] = [
    (".lora_A.weight", |m| &mut m.a),
    (".lora_A.default.weight", |m| &mut m.a),
    (".lora_B.weight", |m| &mut m.b),
    (".lora_B.default.weight", |m| &mut m.b),
    (".lora_B.bias", |m| &mut m.b_bias),
    (".lora_magnitude_vector.weight", |m| &mut m.magnitude),
    (".lora_magnitude_vector", |m| &mut m.magnitude),
    (".lora_embedding_A", |m| &mut m.embedding_a),
    (".lora_embedding_B", |m| &mut m.embedding_b),
    (".token_adapter.trainable_tokens_delta", |m| &mut m.tokens),
    (".base_layer.weight", |m| &mut m.base),
    (".base_layer.bias", |m| &mut m.base_bias),
    (".weight", |m| &mut m.weight),
    (".bias", |m| &mut m.bias),
];

/// Whether a folder is an adapter of PEFT's.
pub(super) fn is_in(dir: &Path) -> bool {
    dir.join(CONFIG).is_file()
}

/// The bytes of the files.
pub(super) struct Files {
    pub config: Map<String, Value>,
    pub weights: Vec<u8>,
}

impl Files {
    /// Reads them, up to so many bytes.
    pub(super) fn read(dir: &Path, max_bytes: u64) -> Result<Self, EngineError> {
        let Value::Object(config) = required_json(&dir.join(CONFIG))? else {
            return Err(invalid(format!("{}: not a JSON object", dir.join(CONFIG).display())));
        };
        let path = dir.join(WEIGHTS);
        let weights = read_bounded(&path, max_bytes).map_err(|error| unreadable(&path, &error))?;
        Ok(Self { config, weights })
    }
}

/// Why a file of an adapter cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> EngineError {
    match error.kind() {
        std::io::ErrorKind::NotFound => EngineError::Adapter {
            code: "adapter_file_not_found",
            message: format!(
                "{} does not exist; other formats of weights are not read: save them as safetensors",
                path.display()
            ),
        },
        std::io::ErrorKind::FileTooLarge => EngineError::Adapter {
            code: "lora_byte_limit_exceeded",
            message: format!("{}: {error}, which is what max_bytes leaves", path.display()),
        },
        _ => invalid(format!("{} cannot be read: {error}", path.display())),
    }
}

/// Values of all its tensors, by the file's header.
pub(super) fn num_values(dir: &Path) -> Result<u64, EngineError> {
    let path = dir.join(WEIGHTS);
    let bytes = Bytes::map_file(&path)?;
    let (_, metadata) =
        SafeTensors::read_metadata(bytes.as_slice()).map_err(|error| invalid(format!("{}: {error}", path.display())))?;
    let of = |shape: &[usize]| shape.iter().fold(1u64, |product, n| product.saturating_mul(*n as u64));
    Ok(metadata.tensors().values().map(|tensor| of(&tensor.shape)).fold(0, u64::saturating_add))
}

/// Puts an adapter together.
pub(super) fn build<'a>(mut builder: AdapterBuilder<'a>, files: &Files) -> Result<AdapterBuilder<'a>, EngineError> {
    if builder.sites.is_gguf && builder.sites.config.architecture == "falcon_h1" {
        let why =
            "the weights of a GGUF file of Falcon-H1 have its multipliers in them: take its folder, or an adapter in a GGUF file";
        return Err(invalid(why.into()));
    }
    let config = Config::new(&files.config)?;
    let mut modules = modules(&files.weights)?;
    let known = builder.sites.hugging_face();
    let embedding = builder.sites.embedding_name();
    if let Some(module) = modules.remove(&embedding) {
        add_embedding(&mut builder, &config, &embedding, module, &known)?;
    }
    let names: Vec<_> = modules.keys().cloned().collect();
    for name in names {
        // Several parameters of one module are wrapped in each other: the outer one goes on with the inner.
        let Some(mut module) = modules.remove(&name) else { continue };
        let experts = layer_of(&name).filter(|layer| builder.sites.is_of_experts(&name, *layer));
        if let Some(layer) = experts {
            let mut wrapped = vec![module];
            let mut inner = format!("{name}.base_layer");
            while let Some(next) = modules.remove(&inner) {
                wrapped.push(next);
                inner.push_str(".base_layer");
            }
            add_experts(&mut builder, &config, &name, layer, &wrapped)?;
            continue;
        }
        let Some(parts) = known.get(&name) else {
            return Err(invalid(format!(
                "it changes `{}`, which is no linear layer of this model that adapters may change",
                module.name
            )));
        };
        if let Some(base) = module.base.take() {
            check_base(&builder, &name, parts, &base)?;
        }
        if let Some(base) = module.base_bias.take() {
            check_base_bias(&builder, &name, parts, &base)?;
        }
        add_module(&mut builder, &config, &name, module, parts)?;
    }
    Ok(builder)
}

fn add_module(
    builder: &mut AdapterBuilder<'_>,
    config: &Config<'_>,
    name: &str,
    module: Module,
    parts: &[SitePart],
) -> Result<(), EngineError> {
    let Module { name: full_name, a, b, b_bias, magnitude, weight, bias, embedding_a, embedding_b, tokens, .. } = module;
    let is_alone = [&a, &b, &b_bias, &magnitude, &weight, &bias].iter().all(|part| part.is_none());
    if let (Some(tokens), Some(site), true) = (&tokens, builder.sites.lm_head().filter(|_| name.ends_with("lm_head")), is_alone) {
        let ids = trained_ids(builder, config, &full_name, tokens)?;
        return builder.replace_rows(site, name, &ids, tokens);
    }
    if embedding_a.is_some() || embedding_b.is_some() || tokens.is_some() {
        return Err(invalid(format!("`{name}` is no token embedding, and has tensors of one")));
    }
    if a.is_some() && (config.has_magnitudes != magnitude.is_some() || config.has_biases != b_bias.is_some()) {
        return Err(invalid(format!("`{name}` has not the tensors that `use_dora` and `lora_bias` say")));
    }
    match (a, b, weight) {
        (Some(a), Some(b), None) if bias.is_none() => {
            let scale = config.scale(&full_name, a.matrix(name)?[0])?;
            let (b_bias, magnitude) = (b_bias.as_ref(), magnitude.as_ref());
            builder.product(parts, &Product { name, a: &a, b: &b, b_bias, magnitude, scale, is_hugging_face: true })
        }
        (None, None, Some(weight)) if b_bias.is_none() && magnitude.is_none() => {
            let is_transposed = parts.first().is_some_and(|part| builder.sites.is_transposed(part));
            let weight = if is_transposed { weight.transposed(name)? } else { weight };
            builder.replace(parts, name, &weight, bias.as_ref())
        }
        _ => Err(invalid(format!("the tensors of `{name}` are neither a product of low rank nor another weight"))),
    }
}

/// The fields of adapter_config.json that the tensors do not tell.
struct Config<'a> {
    fields: &'a Map<String, Value>,
    alpha: f32,
    is_rank_stabilized: bool,
    /// Products come with DoRA's magnitudes, and with biases.
    has_magnitudes: bool,
    has_biases: bool,
    /// Patterns of module names, with the alpha of those.
    alphas: Vec<(regex::Regex, f32)>,
}

impl<'a> Config<'a> {
    fn new(fields: &'a Map<String, Value>) -> Result<Self, EngineError> {
        let text = |key: &str| fields.get(key).and_then(Value::as_str);
        if text("peft_type") != Some("LORA") {
            return Err(invalid(format!("`peft_type` is {}: only LORA is taken", json(fields.get("peft_type")))));
        }
        let is_set = |value: &&Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(map) => !map.is_empty(),
            Value::Array(items) => !items.is_empty(),
            _ => true,
        };
        for (key, instead) in REFUSED {
            if let Some(value) = fields.get(key).filter(is_set) {
                return Err(invalid(format!("`{key}` is {value}, which is not supported: use {instead}")));
            }
        }
        if let Some(bias) = fields.get("bias").filter(|bias| **bias != "none" && !bias.is_null()) {
            return Err(invalid(format!(
                "`bias` is {bias}: biases of the base that were trained are not supported; use \"none\""
            )));
        }
        let changes_base = |init: &&Value| match init {
            Value::Null | Value::Bool(_) => false,
            Value::String(text) => CHANGES_BASE.iter().any(|name| text.to_lowercase().starts_with(name)),
            _ => true,
        };
        if let Some(init) = fields.get("init_lora_weights").filter(changes_base) {
            return Err(invalid(format!(
                "`init_lora_weights` is {init}, which changes the base: save the adapter converted to a LoRA \
                 (`path_initial_model_for_weight_conversion`)"
            )));
        }
        let flag = |key: &str| match fields.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            other => Err(invalid(format!("`{key}` is {}, and must be true or false", json(other)))),
        };
        let number = |value: Option<&Value>, key: &str| match value.and_then(Value::as_f64).map(|number| number as f32) {
            Some(number) if number.is_finite() => Ok(number),
            _ => Err(invalid(format!("`{key}` is {}, and must be a number", json(value)))),
        };
        let mut alphas = Vec::new();
        if let Some(patterns) = fields.get("alpha_pattern").filter(|patterns| !patterns.is_null()) {
            let patterns = patterns
                .as_object()
                .filter(|patterns| patterns.len() <= MAX_PATTERNS)
                .ok_or_else(|| invalid(format!("`alpha_pattern` must be an object of {MAX_PATTERNS} patterns at most")))?;
            for (key, value) in patterns {
                let pattern = RegexBuilder::new(&format!(r"^(.*\.)?({key})$")).size_limit(MAX_PATTERN_BYTES).build();
                let pattern = pattern.map_err(|error| invalid(format!("`alpha_pattern` has {key:?}: {error}")))?;
                alphas.push((pattern, number(Some(value), "alpha_pattern")?));
            }
        }
        Ok(Self {
            fields,
            alpha: number(fields.get("lora_alpha"), "lora_alpha")?,
            is_rank_stabilized: flag("use_rslora")?,
            has_magnitudes: flag("use_dora")?,
            has_biases: flag("lora_bias")?,
            alphas,
        })
    }

    /// What the product of a module is multiplied by.
    fn scale(&self, module: &str, rank: usize) -> Result<f32, EngineError> {
        let alpha = self.alphas.iter().find(|(pattern, _)| pattern.is_match(module)).map_or(self.alpha, |(_, alpha)| *alpha);
        let divisor = if self.is_rank_stabilized { (rank as f32).sqrt() } else { rank as f32 };
        Some(alpha / divisor)
            .filter(|scale| scale.is_finite())
            .ok_or_else(|| invalid(format!("`{module}` is scaled beyond all numbers")))
    }

    /// The tokens whose embeddings were trained.
    fn token_ids(&self, module: &str) -> Result<Vec<u32>, EngineError> {
        let value = self.fields.get("trainable_token_indices");
        let last = module.rsplit('.').next().unwrap_or(module);
        let of_module = |map: &Map<String, Value>| map.get(last).or_else(|| map.get(module)).cloned();
        let ids = match value {
            Some(Value::Object(map)) => of_module(map),
            other => other.cloned(),
        };
        let ids: Option<Vec<u32>> = ids.as_ref().and_then(Value::as_array).and_then(|ids| {
            let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
            ids.iter().map(id).collect()
        });
        ids.ok_or_else(|| invalid(format!("`trainable_token_indices` is {}, and must list the ids of `{module}`", json(value))))
    }
}

fn json(value: Option<&Value>) -> String {
    value.map_or("missing".into(), Value::to_string)
}

/// The tensors of a file by module, which is named as in [`Sites::hugging_face`](super::sites::Sites::hugging_face).
fn modules(bytes: &[u8]) -> Result<BTreeMap<String, Module>, EngineError> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| invalid(format!("{WEIGHTS}: {error}")))?;
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    for (name, tensor) in file.tensors() {
        let path = name.strip_prefix("base_model.model.").unwrap_or(&name);
        let found = SUFFIXES.iter().find_map(|(suffix, place)| Some((path.strip_suffix(suffix)?, place)));
        let Some((module, place)) = found else {
            return Err(invalid(format!("tensor `{name}` is none that is known of an adapter")));
        };
        let values = decode_floats(tensor.dtype(), tensor.data())
            .ok_or_else(|| invalid(format!("tensor `{name}` has type {:?}; F32, F16 and BF16 are taken", tensor.dtype())))?;
        let floats = Floats { shape: tensor.shape().to_vec(), values };
        if !floats.are_finite() {
            return Err(invalid(format!("tensor `{name}` has values that are no numbers")));
        }
        let of_module = modules.entry(ModelPlace::plain(module)).or_default();
        module.clone_into(&mut of_module.name);
        if place(of_module).replace(floats).is_some() {
            return Err(invalid(format!("there are two tensors `{name}`")));
        }
    }
    Ok(modules)
}

/// A copy of the base's weight, which PEFT saves beside what it changes of an embedding, must be the base's.
fn check_base(builder: &AdapterBuilder<'_>, name: &str, parts: &[SitePart], base: &Floats) -> Result<(), EngineError> {
    let [rows, cols] = base.matrix(name)?;
    for part in parts {
        let site = &builder.sites.list[part.site];
        let mut row = vec![0.0; site.matrix.shape[1]];
        if (rows, cols) != (part.num_rows, row.len()) {
            return Err(other_base(name));
        }
        // A few rows tell one model from another.
        for n in (0..part.own_rows).step_by(part.own_rows / 16 + 1) {
            builder.sites.backend.read_rows(&site.linear, n, &mut row)?;
            if !near(&row, &base.values[part.row(n) * cols..][..cols]) {
                return Err(other_base(name));
            }
        }
    }
    Ok(())
}

/// The same of a bias.
fn check_base_bias(builder: &AdapterBuilder<'_>, name: &str, parts: &[SitePart], base: &Floats) -> Result<(), EngineError> {
    let is_own = |part: &SitePart| {
        let own = builder.sites.list[part.site].bias.as_deref().unwrap_or_default();
        let is_near = |row| near(&[own.get(row).copied().unwrap_or(0.0)], &[base.values[part.row(row)]]);
        base.values.len() == part.num_rows && (0..part.own_rows).all(is_near)
    };
    if parts.iter().all(is_own) { Ok(()) } else { Err(other_base(name)) }
}

/// Whether weights are the same but for how they are stored.
fn near(a: &[f32], b: &[f32]) -> bool {
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    difference <= 0.25 * norm(&mut b.iter().copied()) + 1e-6
}

fn other_base(name: &str) -> EngineError {
    invalid(format!(
        "it was trained on another base, or one whose vocabulary was resized: its copy of `{name}` is not this model's"
    ))
}

/// The ids of the tokens whose rows were trained, of which `tokens` has one each.
fn trained_ids(builder: &AdapterBuilder<'_>, config: &Config<'_>, name: &str, tokens: &Floats) -> Result<Vec<u32>, EngineError> {
    let (vocab_size, hidden) = (builder.sites.config.vocab_size, builder.sites.config.hidden_size);
    let ids = config.token_ids(name)?;
    if tokens.matrix(name)? != [ids.len(), hidden] || ids.iter().any(|id| *id as usize >= vocab_size) {
        return Err(invalid(format!(
            "`trainable_token_indices` lists {} tokens, and `{name}` has {:?} of a vocabulary of {vocab_size}",
            ids.len(),
            tokens.shape
        )));
    }
    Ok(ids)
}

/// What an adapter does to the token embedding, and with trained tokens to logits that come of the same weights.
fn add_embedding(
    builder: &mut AdapterBuilder<'_>,
    config: &Config<'_>,
    name: &str,
    module: Module,
    known: &HashMap<String, Vec<SitePart>>,
) -> Result<(), EngineError> {
    let (vocab_size, hidden) = (builder.sites.config.vocab_size, builder.sites.config.hidden_size);
    let is_tied = builder.sites.config.tie_word_embeddings;
    let Module { name: full_name, embedding_a, embedding_b, tokens, base, base_bias, weight, a, b, b_bias, magnitude, bias } =
        module;
    if [a, b, b_bias, magnitude, bias, base_bias].iter().any(Option::is_some) {
        return Err(invalid(format!("`{name}` is the token embedding, and has tensors of a linear layer")));
    }
    if let Some(base) = base {
        let has_shape = base.shape == [vocab_size, hidden];
        match known.get("lm_head").filter(|_| is_tied && has_shape) {
            Some(parts) => check_base(builder, name, parts, &base)?,
            None if has_shape => {}
            None => return Err(other_base(name)),
        }
    }
    if let Some(weight) = weight {
        if weight.shape != [vocab_size, hidden] {
            return Err(invalid(format!(
                "`{name}` has shape {:?}; the model's is [{vocab_size}, {hidden}]: a resized vocabulary is not supported",
                weight.shape
            )));
        }
        builder.embedding().table = Some(view(vocab_size, hidden, &weight.values)?);
    }
    match (embedding_a, embedding_b) {
        (None, None) => {}
        (Some(a), Some(b)) => {
            let ([rank, columns], [rows, b_rank]) = (a.matrix(name)?, b.matrix(name)?);
            builder.check_rank(name, rank)?;
            if (columns, rows, b_rank) != (vocab_size, hidden, rank) {
                return Err(invalid(format!("`{name}` has shapes [{rank}, {columns}] and [{rows}, {b_rank}]")));
            }
            let scale = config.scale(&full_name, rank)?;
            let transposed = |values: &[f32], rows: usize, cols: usize, scale: f32| -> Vec<f32> {
                (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c] * scale)).collect()
            };
            let (a, b) = (transposed(&a.values, rank, vocab_size, 1.0), transposed(&b.values, hidden, rank, scale));
            builder.embedding().low_rank = Some(EmbeddingProduct { rank, a, b });
        }
        _ => return Err(invalid(format!("`{name}` has one of two factors"))),
    }
    let Some(tokens) = tokens else { return Ok(()) };
    let ids = trained_ids(builder, config, &full_name, &tokens)?;
    let rows = ids.iter().copied().zip(tokens.values.chunks_exact(hidden).map(<[f32]>::to_vec)).collect();
    builder.embedding().rows = rows;
    match builder.sites.lm_head().filter(|_| is_tied) {
        Some(site) => builder.replace_rows(site, name, &ids, &tokens),
        None => Ok(()),
    }
}

/// The number of a module's layer.
fn layer_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once("layers.")?;
    rest.split('.').next()?.parse().ok()
}

/// Products for all experts at once (PEFT's `target_parameters`): of A the rows of an expert stand together, of B the columns of
/// each rank. `wrapped` has the outermost first; the first parameter of the module is wrapped first.
fn add_experts(
    builder: &mut AdapterBuilder<'_>,
    config: &Config<'_>,
    name: &str,
    layer: usize,
    wrapped: &[Module],
) -> Result<(), EngineError> {
    let targets: Vec<_> = config.fields.get("target_parameters").and_then(Value::as_array).into_iter().flatten().collect();
    let full_name = wrapped[0].name.trim_end_matches(".base_layer");
    let is_targeted = |parameter: &&str| {
        let whole = format!("{full_name}.{parameter}");
        let ends = |target: &str| whole == target || whole.ends_with(&format!(".{target}"));
        targets.iter().filter_map(|target| target.as_str()).any(ends)
    };
    let parameters: Vec<_> = ["gate_up_proj", "down_proj"].into_iter().filter(is_targeted).collect();
    if parameters.len() != wrapped.len() {
        return Err(invalid(format!(
            "`{name}` has {} products, and `target_parameters` names {} of its parameters",
            wrapped.len(),
            parameters.len()
        )));
    }
    for (parameter, module) in parameters.iter().rev().zip(wrapped) {
        let what = format!("{name}.{parameter}");
        let Module {
            name: _,
            a: Some(a),
            b: Some(b),
            b_bias: None,
            magnitude: None,
            embedding_a: None,
            embedding_b: None,
            tokens: None,
            base: None,
            base_bias: None,
            weight: None,
            bias: None,
        } = module
        else {
            return Err(invalid(format!("`{what}` must have the two factors of a product, and nothing else")));
        };
        let roles: &[Role] = if *parameter == "down_proj" { &[Role::ExpertDown] } else { &[Role::ExpertGate, Role::ExpertUp] };
        if !roles.iter().all(|role| builder.sites.has_plain_experts(*role)) {
            return Err(invalid(format!("`{what}` of this architecture is stored transposed, which is not supported")));
        }
        let sites = builder.sites;
        let num_experts = sites.experts(layer, roles[0]).count();
        let ([rows, cols], [out, columns]) = (a.matrix(&what)?, b.matrix(&what)?);
        if num_experts == 0 || rows != columns || !rows.is_multiple_of(num_experts) || !out.is_multiple_of(roles.len()) {
            return Err(invalid(format!(
                "`{what}` has shapes [{rows}, {cols}] and [{out}, {columns}] for {num_experts} experts"
            )));
        }
        let rank = rows / num_experts;
        let scale = config.scale(&format!("{full_name}.{parameter}"), rank)?;
        for (part, role) in roles.iter().enumerate() {
            let num_rows = out / roles.len();
            for (site, expert) in sites.experts(layer, *role) {
                let of_a = a.values[expert * rank * cols..(expert + 1) * rank * cols].to_vec();
                let rows = part * num_rows..(part + 1) * num_rows;
                let of_b = rows.flat_map(|row| (0..rank).map(move |k| row * columns + k * num_experts + expert));
                let a = Floats { shape: vec![rank, cols], values: of_a };
                let b = Floats { shape: vec![num_rows, rank], values: of_b.map(|at| b.values[at]).collect() };
                let parts = [SitePart::whole(site, num_rows)];
                let (b_bias, magnitude) = (None, None);
                builder
                    .product(&parts, &Product { name: &what, a: &a, b: &b, b_bias, magnitude, scale, is_hugging_face: true })?;
            }
        }
    }
    Ok(())
}
