//! What the files of an embedding model say: a folder as sentence-transformers writes it, or a GGUF file.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{EmbeddingConfig, EmbeddingOptions, HeadActivation, HeadConfig, Pooling, ScoreActivation};
use crate::{
    EngineError,
    json::read_json,
    model::{
        config::{DecoderConfig, MAX_SIZE},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId, WeightSource},
};

/// The weights of dense layers, in order.
const HEADS: [Role; 2] = [Role::Dense2, Role::Dense3];
/// The kind of module that makes a score of logits.
pub(super) const LOGIT_SCORE: &str = "LogitScore";
/// The module's file of weights.
const WEIGHTS: &str = "model.safetensors";

/// A file of which every key is read, or refused.
pub(super) struct File {
    pub(super) what: String,
    object: Map<String, Value>,
}

impl File {
    /// `None` where there is none.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, EngineError> {
        let what = path.display().to_string();
        match read_json(path).map_err(EngineError::Load)? {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { what, object })),
            Some(_) => Err(EngineError::Load(format!("{what}: not a JSON object"))),
        }
    }

    pub(super) fn required(path: &Path) -> Result<Self, EngineError> {
        Self::open(path)?
            .ok_or_else(|| EngineError::Load(format!("{} does not exist, and modules.json names it", path.display())))
    }

    /// Its fields, once all of them are known by name.
    pub(super) fn fields(&self, known: &[&str]) -> Result<HfFields<'_>, EngineError> {
        let fields = HfFields::new(&self.what, self.object.clone());
        match self.object.iter().find(|(key, value)| !value.is_null() && !known.contains(&key.as_str())) {
            None => Ok(fields),
            Some((key, _)) => {
                Err(fields.error(key, format!("is not supported; what is read of this file: {}", known.join(", "))))
            }
        }
    }
}

/// How a decoder of these sizes makes embeddings, and the files of its heads.
type Found = (EmbeddingConfig, Vec<(Role, std::path::PathBuf)>);

/// Reads a folder: modules.json and what it names, `sentence_bert_config.json`, and `config_sentence_transformers.json`.
pub(crate) fn of_folder(dir: &Path, options: EmbeddingOptions, decoder: &DecoderConfig) -> Result<Found, EngineError> {
    let mut config = EmbeddingConfig {
        pooling: Pooling::Last,
        heads: Vec::new(),
        prompts: Vec::new(),
        default_prompt: None,
        max_input_len: None,
        lower_case: false,
        dimensions: decoder.hidden_size,
        score: None,
        logits: None,
        template: None,
    };
    let (mut pooling, mut files) = (None, Vec::new());
    for module in modules(dir)? {
        match module.kind.as_str() {
            "Pooling" if pooling.is_none() => pooling = Some(read_pooling(&module.path, options, decoder.hidden_size)?),
            "Dense" if pooling.is_some() => {
                let Some(&role) = HEADS.get(config.heads.len()) else {
                    let text = format!("{}: is the third of the kind Dense; two are computed", module.path.display());
                    return Err(EngineError::NotSupported(text));
                };
                let head = read_head(&module.path, role, config.dimensions)?;
                config.dimensions = head.out_features;
                config.heads.push(head);
                files.push((role, module.path.join(WEIGHTS)));
            }
            "Normalize" if pooling.is_some() => {}
            // What it makes of logits does not count where somebody asks for a vector.
            LOGIT_SCORE if options.pooling.is_some() => {}
            kind => {
                let text = format!(
                    "{}: a module of the kind {kind:?} in this place is not supported; what is: Transformer, Pooling, up to two of \
                     the kind Dense, Normalize",
                    dir.join("modules.json").display()
                );
                return Err(EngineError::NotSupported(text));
            }
        }
    }
    config.pooling = options.pooling.or(pooling).ok_or_else(|| no_pooling(&dir.display().to_string(), "no modules.json"))?;
    // A pooling that is asked for is of hidden states, whatever the model was made for.
    let made_for = options.pooling.is_none().then_some(["feature-extraction", "last_hidden_state", "token_embeddings"]);
    (config.max_input_len, config.lower_case) = read_transformer(dir, made_for)?;
    if let Some(file) = File::open(&dir.join("config_sentence_transformers.json"))? {
        read_saved(&file, &mut config)?;
    }
    Ok((config, files))
}

/// How sentence-transformers calls the file about the model itself, now and in older versions.
const TRANSFORMER_FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// Tokens of an input at most, and whether it is written in small letters. `made_for` is the model's task, what of its output
/// counts, and how that is called.
pub(super) fn read_transformer(dir: &Path, made_for: Option<[&str; 3]>) -> Result<(Option<usize>, bool), EngineError> {
    let Some(file) = transformer_file(dir)? else { return Ok((tokenizer_limit(dir)?, false)) };
    let Some([task, output, called]) = made_for else {
        return limits(dir, &file.fields(&[&TRANSFORMER_KEYS[..], &["processing_kwargs"]].concat())?);
    };
    let fields = file.fields(&TRANSFORMER_KEYS)?;
    fields.only(&[
        ("transformer_task", json!(task)),
        ("modality_config", json!({"text": {"method": "forward", "method_output_name": output}})),
        ("module_output_name", json!(called)),
    ])?;
    limits(dir, &fields)
}

/// Its keys; without padding there is none to be taken off.
pub(super) const TRANSFORMER_KEYS: [&str; 6] =
    ["max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "unpad_inputs"];

/// The file about the model itself.
pub(super) fn transformer_file(dir: &Path) -> Result<Option<File>, EngineError> {
    let mut files = TRANSFORMER_FILES.iter().map(|name| File::open(&dir.join(name)));
    files.find(|file| !matches!(file, Ok(None))).unwrap_or(Ok(None))
}

/// Tokens of an input at most, and whether it is written in small letters.
pub(super) fn limits(dir: &Path, fields: &HfFields<'_>) -> Result<(Option<usize>, bool), EngineError> {
    fields.flag("unpad_inputs")?;
    let given = fields.size("max_seq_length")?.filter(|n| *n > 0);
    Ok((given.or(tokenizer_limit(dir)?), fields.flag("do_lower_case")?.unwrap_or(false)))
}

/// Whether its files make a vector of a text, whatever class the model is of.
pub(super) fn makes_vectors(dir: &Path) -> Result<bool, EngineError> {
    Ok(modules(dir)?.iter().any(|module| module.kind == "Pooling"))
}

/// What stands behind the model of a cross-encoder is refused.
pub(super) fn check_alone(dir: &Path) -> Result<(), EngineError> {
    match modules(dir)?.first() {
        None => Ok(()),
        Some(module) => Err(EngineError::NotSupported(format!(
            "{}: a module of the kind {:?} behind a model that scores pairs is not supported",
            dir.join("modules.json").display(),
            module.kind
        ))),
    }
}

/// Tokens of an input at most, by its tokenizer. Files that say nothing of it have a number that no context reaches.
fn tokenizer_limit(dir: &Path) -> Result<Option<usize>, EngineError> {
    let config = read_json(&dir.join("tokenizer_config.json")).map_err(EngineError::Load)?;
    let limit = config.and_then(|config| config["model_max_length"].as_u64());
    Ok(limit.and_then(|limit| usize::try_from(limit).ok()).filter(|limit| (1..=MAX_SIZE).contains(limit)))
}

fn no_pooling(what: &str, why: &str) -> EngineError {
    EngineError::InvalidArgument(format!(
        "{what}: {why} says how hidden states become one vector: give pooling=\"last\", \"mean\" or \"cls\" (Which.Embedding, or \
         --pooling). A {LOGIT_SCORE} module, as sentence-transformers writes it for a CrossEncoder, would make it score pairs"
    ))
}

/// What stands in modules.json behind the decoder.
pub(super) struct Module {
    /// The class, without where it is defined.
    pub(super) kind: String,
    pub(super) path: std::path::PathBuf,
}

pub(super) fn modules(dir: &Path) -> Result<Vec<Module>, EngineError> {
    let path = dir.join("modules.json");
    let what = path.display();
    let Some(json) = read_json(&path).map_err(EngineError::Load)? else { return Ok(Vec::new()) };
    let malformed =
        || EngineError::Load(format!("{what}: must be a list of objects with `type` and `path`, the model itself first"));
    let mut modules = Vec::new();
    for entry in json.as_array().ok_or_else(malformed)? {
        let text = |key: &str| entry.get(key).and_then(Value::as_str).ok_or_else(malformed);
        let (class, place) = (text("type")?, text("path")?);
        let kind = class.rsplit('.').next().unwrap_or_default().to_owned();
        if !class.starts_with("sentence_transformers.") {
            return Err(EngineError::NotSupported(format!(
                "{what}: the module {class:?} is code of the model's own; it is not run"
            )));
        }
        let is_first = modules.is_empty();
        let is_plain = if is_first { place.is_empty() } else { Path::new(place).file_name().is_some_and(|name| name == place) };
        if !is_plain {
            let text =
                format!("{what}: `path` is {place:?}; the model lies in the folder itself, other modules in folders of it");
            return Err(EngineError::Load(text));
        }
        if is_first != (kind == "Transformer") {
            return Err(malformed());
        }
        modules.push(Module { kind, path: dir.join(place) });
    }
    if modules.is_empty() {
        return Err(malformed());
    }
    modules.remove(0);
    Ok(modules)
}

/// Flags of older files, with what they say; newer ones have one key.
const POOLING_FLAGS: [(&str, Option<Pooling>); 6] = [
    ("pooling_mode_cls_token", Some(Pooling::Cls)),
    ("pooling_mode_mean_tokens", Some(Pooling::Mean)),
    ("pooling_mode_lasttoken", Some(Pooling::Last)),
    ("pooling_mode_max_tokens", None),
    ("pooling_mode_mean_sqrt_len_tokens", None),
    ("pooling_mode_weightedmean_tokens", None),
];

fn read_pooling(dir: &Path, options: EmbeddingOptions, hidden_size: usize) -> Result<Pooling, EngineError> {
    let file = File::required(&dir.join("config.json"))?;
    let flags = POOLING_FLAGS.map(|(key, _)| key);
    let others = ["word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"];
    let fields = file.fields(&[&flags[..], &others].concat())?;
    for key in ["word_embedding_dimension", "embedding_dimension"] {
        if let Some(n) = fields.size(key)?.filter(|n| *n != hidden_size) {
            return Err(fields.error(key, format!("is {n}, and hidden states have {hidden_size} values")));
        }
    }
    let mut found = fields.text("pooling_mode")?.map(|mode| {
        let named = if mode == "lasttoken" { Ok(Pooling::Last) } else { mode.parse() };
        named.map_err(|_| fields.error("pooling_mode", format!("is {mode:?}; what is computed: mean, cls, lasttoken")))
    });
    for (key, pooling) in POOLING_FLAGS {
        if fields.flag(key)? != Some(true) {
            continue;
        }
        if found.is_some() {
            return Err(fields
                .error(key, "is true, and so is another: vectors of several poolings, one behind the other, are not computed"));
        }
        let unsupported = || fields.error(key, "is true; what is computed: the mean, the first token, or the last one");
        found = Some(pooling.ok_or_else(unsupported));
    }
    let pooling = match (options.pooling, found) {
        (Some(pooling), _) => pooling,
        (None, Some(found)) => found?,
        (None, None) => return Err(no_pooling(&file.what, "nothing")),
    };
    if fields.flag("include_prompt")? == Some(false) && pooling != Pooling::Last {
        return Err(
            fields.error("include_prompt", "is false, which is not supported: the prompt's tokens are pooled with the text's")
        );
    }
    Ok(pooling)
}

fn read_head(dir: &Path, role: Role, width: usize) -> Result<HeadConfig, EngineError> {
    let file = File::required(&dir.join("config.json"))?;
    let known = ["in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"];
    let fields = file.fields(&known)?;
    for key in ["module_input_name", "module_output_name"] {
        if let Some(name) = fields.text(key)?.filter(|name| name != "sentence_embedding") {
            return Err(fields.error(key, format!("is {name:?}; what is computed: \"sentence_embedding\"")));
        }
    }
    let in_features = fields.required_size("in_features")?;
    if in_features != width {
        return Err(fields.error("in_features", format!("is {in_features}, and what comes before gives {width}")));
    }
    let out_features = fields.required_size("out_features")?;
    if !(1..=MAX_SIZE).contains(&out_features) {
        return Err(fields.error("out_features", format!("is {out_features}; it must be from 1 to {MAX_SIZE}")));
    }
    let activation = match fields.text("activation_function")?.as_deref() {
        Some("torch.nn.modules.linear.Identity") => HeadActivation::Identity,
        None | Some("torch.nn.modules.activation.Tanh") => HeadActivation::Tanh,
        Some(other) => {
            let why =
                format!("is {other:?}; what is computed: torch.nn.modules.linear.Identity, torch.nn.modules.activation.Tanh");
            return Err(fields.error("activation_function", why));
        }
    };
    Ok(HeadConfig { role, in_features, out_features, bias: fields.flag("bias")?.unwrap_or(true), activation, has_norm: false })
}

fn read_saved(file: &File, config: &mut EmbeddingConfig) -> Result<(), EngineError> {
    let known = ["__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"];
    // What it says is about scores, and somebody has asked for a pooling.
    if file.object.get("model_type").is_some_and(|kind| kind == "CrossEncoder") {
        return Ok(());
    }
    let fields = file.fields(&known)?;
    if let Some(kind) = fields.text("model_type")?.filter(|kind| kind != "SentenceTransformer") {
        return Err(fields.error("model_type", format!("is {kind:?}; what is computed: \"SentenceTransformer\"")));
    }
    read_prompts(&fields, config)
}

/// The texts that go before others, and which of them does by itself.
pub(super) fn read_prompts(fields: &HfFields<'_>, config: &mut EmbeddingConfig) -> Result<(), EngineError> {
    if let Some(prompts) = fields.child("prompts")? {
        for (name, text) in &prompts.object {
            let text = text.as_str().ok_or_else(|| prompts.error(name, "is no text"))?;
            config.prompts.push((name.clone(), text.to_owned()));
        }
    }
    config.default_prompt = fields.text("default_prompt_name")?;
    if let Some(name) = &config.default_prompt
        && config.prompt(Some(name)).is_err()
    {
        return Err(fields.error("default_prompt_name", format!("is {name:?}, which is none of `prompts`")));
    }
    Ok(())
}

/// Reads a GGUF file's `pooling_type` and its dense layers, as llama.cpp's converter writes them.
pub(crate) fn of_gguf(
    fields: &GgufFields<'_>,
    options: EmbeddingOptions,
    decoder: &DecoderConfig,
) -> Result<EmbeddingConfig, EngineError> {
    let pooling = match (options.pooling, fields.size("pooling_type")?) {
        (Some(pooling), _) => pooling,
        (None, Some(1)) => Pooling::Mean,
        (None, Some(2)) => Pooling::Cls,
        (None, Some(3)) => Pooling::Last,
        (None, Some(4)) => return scores_of_gguf(fields, decoder),
        (None, None | Some(0)) => return Err(no_pooling(fields.what, "no `pooling_type`")),
        (None, Some(other)) => return Err(fields.error("pooling_type", format!("is {other}; it must be 1, 2 or 3"))),
    };
    let (mut heads, mut dimensions) = (Vec::new(), decoder.hidden_size);
    for role in HEADS {
        let id = WeightId::global(role);
        if !fields.weights.contains(id) {
            continue;
        }
        let [out_features, in_features] = fields.weights.matrix_shape(id)?;
        if in_features != dimensions {
            let name = fields.weights.name(id);
            let text =
                format!("{}: tensor `{name}` takes {in_features} values, and what comes before gives {dimensions}", fields.what);
            return Err(EngineError::Load(text));
        }
        let bias = fields.weights.contains(id.bias());
        let activation = HeadActivation::Identity;
        heads.push(HeadConfig { role, in_features, out_features, bias, activation, has_norm: false });
        dimensions = out_features;
    }
    Ok(EmbeddingConfig {
        pooling,
        heads,
        prompts: Vec::new(),
        default_prompt: None,
        max_input_len: None,
        lower_case: false,
        dimensions,
        score: None,
        logits: None,
        template: None,
    })
}

/// A reranker's file: its classifier, over the first token of an encoder or the last of a decoder. It does not say what becomes
/// of the logit.
fn scores_of_gguf(fields: &GgufFields<'_>, decoder: &DecoderConfig) -> Result<EmbeddingConfig, EngineError> {
    let head = |role, activation| {
        let id = WeightId::global(role);
        let [out_features, in_features] = fields.weights.matrix_shape(id)?;
        let width = decoder.hidden_size;
        if in_features != width || (role == Role::ClassifierDense && out_features != width) {
            let name = fields.weights.name(id);
            let text =
                format!("{}: tensor `{name}` makes {out_features} values of {in_features}; it must take {width}", fields.what);
            return Err(EngineError::Load(text));
        }
        let bias = fields.weights.contains(id.bias());
        Ok(HeadConfig { role, in_features, out_features, bias, activation, has_norm: false })
    };
    let mut heads = Vec::new();
    if fields.weights.contains(WeightId::global(Role::ClassifierDense)) {
        heads.push(head(Role::ClassifierDense, HeadActivation::Tanh)?);
    }
    let id = WeightId::global(Role::Classifier);
    if !fields.weights.contains(id) {
        let name = fields.weights.name(id);
        return Err(fields.error("pooling_type", format!("is 4, a reranker's, and its tensor `{name}` is missing")));
    }
    let classifier = head(Role::Classifier, HeadActivation::Identity)?;
    if classifier.out_features != 1 {
        let text =
            format!("{}: its classifier has {} labels; one that scores pairs has one", fields.what, classifier.out_features);
        return Err(EngineError::NotSupported(text));
    }
    heads.push(classifier);
    let pooling = if decoder.sees_ahead() { Pooling::Cls } else { Pooling::Last };
    Ok(EmbeddingConfig::scores(pooling, heads, ScoreActivation::Identity))
}

/// Adds the weights of heads to those of the decoder.
pub(crate) fn add_heads(weights: &mut WeightSource, heads: &[(Role, std::path::PathBuf)]) -> Result<(), EngineError> {
    heads.iter().try_for_each(|(role, path)| weights.add_file(WeightId::global(*role), path))
}
