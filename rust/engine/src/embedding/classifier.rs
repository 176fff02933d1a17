//! What the files of a model that scores pairs of texts say (a cross-encoder, or a decoder with a classifier): a folder as
//! Transformers and sentence-transformers write it.

use std::path::Path;

use device::Activation;
use serde_json::Value;

use super::{EmbeddingConfig, HeadActivation, HeadConfig, Pooling, ScoreActivation, files};
use crate::{
    EngineError,
    json::{read_json, required_json},
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
    weights::{Role, WeightId, WeightSource},
};

/// What the names of such classes end with.
const CLASS: &str = "ForSequenceClassification";

/// How the model in a folder scores pairs; `None`: its config.json names no class that does, or its files pool hidden states.
pub(crate) fn of_folder(
    dir: &Path,
    decoder: &DecoderConfig,
    weights: &WeightSource,
) -> Result<Option<EmbeddingConfig>, EngineError> {
    let path = dir.join("config.json");
    let what = path.display().to_string();
    let Value::Object(object) = required_json(&path)? else {
        return Err(EngineError::Load(format!("{what}: not a JSON object")));
    };
    let fields = HfFields::new(&what, object);
    let classes = fields.texts("architectures")?.unwrap_or_default();
    let Some(class) = classes.iter().find(|class| class.ends_with(CLASS)) else { return Ok(None) };
    if files::makes_vectors(dir)? {
        return Ok(None);
    }
    files::check_alone(dir)?;
    let (max_input_len, lower_case) = files::read_transformer(dir, Some(["sequence-classification", "logits", "scores"]))?;
    let width = decoder.hidden_size;
    let dense = |activation, has_norm| {
        let id = WeightId::global(Role::ClassifierDense);
        let bias = weights.contains(id.bias());
        HeadConfig { role: id.role, in_features: width, out_features: width, bias, activation, has_norm }
    };
    let (pooling, before) = match decoder.architecture {
        "bert" | "roberta" | "xlm-roberta" | "gte" | "jina_embeddings_v3" => {
            (Pooling::Cls, Some(dense(HeadActivation::Tanh, false)))
        }
        "distilbert" => (Pooling::Cls, Some(dense(HeadActivation::Of(Activation::Relu), false))),
        "modernbert" => {
            fields.only_text("classifier_activation", "gelu")?;
            let pooling = match fields.text("classifier_pooling")?.as_deref() {
                None | Some("cls") => Pooling::Cls,
                Some("mean") => Pooling::Mean,
                Some(other) => return Err(fields.error("classifier_pooling", format!("is {other:?}; implemented: cls, mean"))),
            };
            (pooling, Some(dense(HeadActivation::Of(Activation::Gelu), true)))
        }
        _ if !decoder.sees_ahead() => (Pooling::Last, None),
        other => return Err(EngineError::NotSupported(format!("{what}: {class}: a classifier of {other} is not computed"))),
    };
    let id = WeightId::global(Role::Classifier);
    let [num_labels, _] = weights.matrix_shape(id)?;
    if num_labels != 1 {
        return Err(EngineError::NotSupported(format!(
            "{what}: its classifier tells {num_labels} labels apart, which is not supported; one that scores pairs has one label"
        )));
    }
    let classifier = HeadConfig {
        role: id.role,
        in_features: width,
        out_features: num_labels,
        bias: weights.contains(id.bias()),
        activation: HeadActivation::Identity,
        has_norm: false,
    };
    let heads = before.into_iter().chain([classifier]).collect();
    let scores =
        EmbeddingConfig { max_input_len, lower_case, ..EmbeddingConfig::scores(pooling, heads, ScoreActivation::Sigmoid) };
    with_saved(scores, dir, &fields).map(Some)
}

/// With what scores become, and with the text that goes before queries: sentence-transformers keeps it in a file of its own, and
/// before in config.json, in one place or another.
pub(super) fn with_saved(mut scores: EmbeddingConfig, dir: &Path, fields: &HfFields<'_>) -> Result<EmbeddingConfig, EngineError> {
    let file = dir.join("config_sentence_transformers.json");
    let what = file.display().to_string();
    let own = match read_json(&file).map_err(EngineError::Load)? {
        Some(Value::Object(object)) => Some(HfFields::new(&what, object)),
        _ => fields.child("sentence_transformers")?,
    };
    if let Some(own) = &own {
        files::read_prompts(own, &mut scores)?;
    }
    let newer = own.map(|own| own.text("activation_fn")).transpose()?.flatten();
    let older = fields.text("sbert_ce_default_activation_function")?;
    let activation = match newer.or(older).as_deref() {
        None | Some("torch.nn.modules.activation.Sigmoid") => ScoreActivation::Sigmoid,
        Some("torch.nn.modules.linear.Identity") => ScoreActivation::Identity,
        Some(other) => {
            return Err(EngineError::NotSupported(format!(
                "{}: scores that pass {other} are not computed; those that pass a sigmoid, or nothing, are",
                fields.what
            )));
        }
    };
    Ok(EmbeddingConfig { score: Some(activation), ..scores })
}
