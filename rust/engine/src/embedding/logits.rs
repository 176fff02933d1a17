//! What the files of a decoder say that scores pairs of texts by the logits of one token or of two, such as "yes" and "no": a
//! folder of sentence-transformers with a module `LogitScore`.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{
    EmbeddingConfig, PairTemplate, Pooling, ScoreActivation,
    classifier::with_saved,
    files::{self, File, LOGIT_SCORE, TRANSFORMER_KEYS},
};
use crate::{
    EngineError,
    json::required_json,
    model::{
        config::DecoderConfig,
        decoder::softcap,
        fields::{Fields, HfFields},
    },
    weights::{FusedRows, Matrix, Role, WeightId},
};

/// A score that is the logit of a token, or by how much that is larger than the logit of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogits {
    /// The token that says yes.
    pub yes: u32,
    /// The one that says no, if there is one.
    pub no: Option<u32>,
    /// Values of a hidden state.
    pub in_features: usize,
    /// The matrix that has a row for each token, and its rows.
    table: (Role, usize),
    scale: f32,
    softcap: Option<f32>,
}

impl TokenLogits {
    /// The rows of the output projection that are needed, each as a matrix.
    pub(super) fn matrices(&self) -> impl Iterator<Item = Matrix> {
        let (whole, num_rows) = self.table;
        let in_features = self.in_features;
        [Some(self.yes), self.no].into_iter().flatten().map(move |token| {
            let fused = FusedRows { sign: Role::Classifier, whole, num_rows, first_row: token as usize, num_groups: 1 };
            Matrix { fused: Some(fused), ..Matrix::new(WeightId::global(Role::Classifier), [1, in_features], false).exact() }
        })
    }

    /// The score by what the rows give.
    pub(super) fn score(&self, products: &mut [f32]) -> f32 {
        for product in &mut *products {
            *product *= self.scale;
        }
        softcap(products, self.softcap);
        products.iter().copied().reduce(|yes, no| yes - no).unwrap_or_default()
    }
}

/// How the model in a folder scores pairs; `None`: its modules.json has no such module.
pub(crate) fn of_folder(dir: &Path, decoder: &DecoderConfig) -> Result<Option<EmbeddingConfig>, EngineError> {
    let modules = files::modules(dir)?;
    let [module] = &modules[..] else { return Ok(None) };
    if module.kind != LOGIT_SCORE {
        return Ok(None);
    }
    if decoder.sees_ahead() {
        let text = format!("{}: a {} has no logits of a next token", module.path.display(), decoder.architecture);
        return Err(EngineError::NotSupported(text));
    }
    let logits = read_score(&module.path, decoder)?;
    let file = files::transformer_file(dir)?.ok_or_else(|| {
        EngineError::Load(format!(
            "{}: modules.json has a {LOGIT_SCORE}, and sentence_bert_config.json, which says how texts become a prompt, is \
             missing",
            dir.display()
        ))
    })?;
    let fields = file.fields(&[&TRANSFORMER_KEYS[..], &["processing_kwargs"]].concat())?;
    let task = fields.text("transformer_task")?.unwrap_or_default();
    if task != "text-generation" {
        return Err(fields.error("transformer_task", format!("is {task:?}; with a {LOGIT_SCORE} it must be \"text-generation\"")));
    }
    fields.only(&[("module_output_name", json!("causal_logits"))])?;
    let (max_input_len, lower_case) = files::limits(dir, &fields)?;
    let template = read_template(&fields)?;
    if lower_case && template.is_some() {
        return Err(fields.error("do_lower_case", "is true, which is not supported with a chat template"));
    }
    let scores = EmbeddingConfig::scores(Pooling::Last, Vec::new(), ScoreActivation::Sigmoid);
    let scores = EmbeddingConfig { max_input_len, lower_case, template, logits: Some(logits), ..scores };
    let path = dir.join("config.json");
    let what = path.display().to_string();
    let Value::Object(object) = required_json(&path)? else {
        return Err(EngineError::Load(format!("{what}: not a JSON object")));
    };
    with_saved(scores, dir, &HfFields::new(&what, object)).map(Some)
}

fn read_score(dir: &Path, decoder: &DecoderConfig) -> Result<TokenLogits, EngineError> {
    let file = File::required(&dir.join("config.json"))?;
    let fields = file.fields(&["true_token_id", "false_token_id", "module_input_name"])?;
    fields.only(&[("module_input_name", json!("causal_logits"))])?;
    let token = |key: &str| {
        let Some(id) = fields.size(key)? else { return Ok(None) };
        let known = u32::try_from(id).ok().filter(|_| id < decoder.vocab_size);
        known.map(Some).ok_or_else(|| {
            fields.error(key, format!("is {id}, which is outside of the model's vocabulary of {}", decoder.vocab_size))
        })
    };
    let yes = token("true_token_id")?.ok_or_else(|| fields.error("true_token_id", "is missing"))?;
    let table = if decoder.tie_word_embeddings {
        (Role::Embedding, decoder.vocab_size + decoder.num_further_rows)
    } else {
        (Role::Output, decoder.vocab_size)
    };
    let (scale, softcap) = (decoder.logit_scale, decoder.final_softcap);
    Ok(TokenLogits { yes, no: token("false_token_id")?, in_features: decoder.hidden_size, table, scale, softcap })
}

/// What `processing_kwargs.chat_template` may not have: it is about tokenizing, or about other templates.
const NO_VARIABLES: [&str; 12] = [
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenize",
    "tokenizer_kwargs",
    "continue_final_message",
    "chat_template",
    "messages",
    "conversation",
];

/// How two texts become a prompt: by the chat template where messages are among what the model takes.
fn read_template(fields: &HfFields<'_>) -> Result<Option<PairTemplate>, EngineError> {
    let processing = fields.child("processing_kwargs")?;
    let variables = match &processing {
        None => None,
        Some(processing) => match processing.object.iter().find(|(key, value)| *key != "chat_template" && **value != json!({})) {
            Some((key, value)) => return Err(processing.error(key, format!("is {value}, which is not supported"))),
            None => processing.child("chat_template")?,
        },
    };
    let plain = json!({"method": "forward", "method_output_name": "logits"});
    let wrong = |value: &Value| {
        let why = format!("is {value}; implemented: `text`, and `message` in the format flat or structured, by the logits");
        fields.error("modality_config", why)
    };
    let Some(given) = fields.value("modality_config") else { return Ok(None) };
    let kinds = given.as_object().ok_or_else(|| wrong(&given))?;
    if kinds.iter().any(|(kind, value)| kind != "message" && (kind != "text" || *value != plain)) {
        return Err(wrong(&given));
    }
    let Some(message) = kinds.get("message") else { return Ok(None) };
    let has_parts = match message["format"].as_str() {
        Some("flat") => false,
        Some("structured") => true,
        _ => return Err(wrong(&given)),
    };
    if ["method", "method_output_name"].iter().any(|key| message[*key] != plain[*key]) {
        return Err(wrong(&given));
    }
    let flag = |key: &str, usual| match &variables {
        None => Ok(usual),
        Some(variables) => Ok::<_, EngineError>(variables.flag(key)?.unwrap_or(usual)),
    };
    let (add_generation_prompt, keeps_end) = (flag("add_generation_prompt", false)?, flag("restore_suffix", true)?);
    let mut extra = Map::new();
    if let Some(variables) = &variables {
        for (key, value) in &variables.object {
            if NO_VARIABLES.contains(&key.as_str()) {
                return Err(variables.error(key, format!("is {value}, which is not supported")));
            }
            if !["add_generation_prompt", "restore_suffix"].contains(&key.as_str()) {
                extra.insert(key.clone(), value.clone());
            }
        }
    }
    Ok(Some(PairTemplate { has_parts, add_generation_prompt, keeps_end, variables: extra }))
}
