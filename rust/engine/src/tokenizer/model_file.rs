//! `tokenizer.model`: a model of `SentencePiece` (the format: its `sentencepiece_model.proto`), or the ranks of tiktoken that
//! Llama 3 has. Both become what a GGUF file of the same model would say. Everything in them is untrusted.

use std::{collections::HashMap, fmt::Display, path::Path};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message;
use serde_json::Value;

use super::pieces::byte_chars;
use crate::{
    EngineError,
    json::{read_bounded, read_json},
    weights::MetadataValue,
};

/// What a GGUF file says, by its keys.
pub(super) type Entries = HashMap<String, MetadataValue>;

/// Such a file at most; those in use have 5 MB.
const MAX_BYTES: u64 = 16 << 20;
/// Tokens at most; the largest vocabularies in use have a quarter of a million.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// A token of tiktoken at most; the longest in use is 128 spaces.
pub(super) const MAX_TOKEN_BYTES: usize = 128;
/// Special tokens behind the ranks of Llama 3.
const NUM_SPECIAL: usize = 256;

pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const NORMAL: i64 = 1;

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    text: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    /// As `tokenizer.ggml.token_type`.
    #[prost(int32, optional, tag = "3", default = "1")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3", default = "1")]
    model_type: Option<i32>,
    #[prost(int32, optional, tag = "40", default = "0")]
    unk_id: Option<i32>,
    #[prost(int32, optional, tag = "41", default = "1")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42", default = "2")]
    eos_id: Option<i32>,
    #[prost(int32, optional, tag = "43", default = "-1")]
    pad_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    remove_extra_whitespaces: Option<bool>,
}

/// `TrainerSpec.model_type` of merges by score.
const BPE: i32 = 2;

/// What a GGUF file would say of the tokenizer in a file of either kind; `is_later`: Llama 3.1 or later, whose special tokens
/// have other names.
///
/// # Errors
/// [`EngineError::Tokenizer`] for a file that is neither, or that needs what is not done here.
pub(crate) fn read(path: &Path, is_later: bool) -> Result<Entries, EngineError> {
    let error = |why: &dyn Display| EngineError::Tokenizer(format!("{}: {why}", path.display()));
    let bytes = read_bounded(path, MAX_BYTES).map_err(|why| error(&why))?;
    let entries = if is_tiktoken(&bytes) { tiktoken(&bytes, is_later) } else { sentencepiece(&bytes) };
    entries.map_err(|why| error(&why))
}

/// The same of a folder of the hub, whose configuration adds tokens.
///
/// # Errors
/// As [`read`]'s; [`EngineError::Tokenizer`] for added tokens that leave a gap.
pub(super) fn read_dir(dir: &Path) -> Result<Entries, EngineError> {
    let path = dir.join("tokenizer.model");
    let mut entries = read(&path, false)?;
    let mut added: Vec<(usize, String, bool)> = Vec::new();
    let json = |name: &str| read_json(&dir.join(name)).map_err(EngineError::Tokenizer);
    if let Some(Value::Object(tokens)) = json("added_tokens.json")? {
        added.extend(tokens.iter().filter_map(|(text, id)| Some((usize::try_from(id.as_u64()?).ok()?, text.clone(), false))));
    }
    let config = json("tokenizer_config.json")?.unwrap_or_default();
    if let Value::Object(tokens) = &config["added_tokens_decoder"] {
        let token = |(id, token): (&String, &Value)| {
            Some((id.parse().ok()?, token["content"].as_str()?.to_owned(), token["special"].as_bool().unwrap_or(false)))
        };
        added.extend(tokens.iter().filter_map(token));
    }
    for key in ["add_bos_token", "add_eos_token"] {
        if let Some(flag) = config[key].as_bool() {
            entries.insert(format!("tokenizer.ggml.{key}"), MetadataValue::Bool(flag));
        }
    }
    let specials = special_texts(&json("special_tokens_map.json")?.unwrap_or_default());
    added.sort_by_key(|(id, _, is_special)| (*id, *is_special));
    for (id, text, is_special) in added {
        let is_special = is_special || specials.contains(&text);
        add_token(&mut entries, id, text, is_special)
            .map_err(|why| EngineError::Tokenizer(format!("{}: {why}", dir.display())))?;
    }
    Ok(entries)
}

/// The texts of a map of special tokens: each a text, an object around one, or a list of these.
fn special_texts(map: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    let all = map.as_object().into_iter().flat_map(|map| map.values());
    all.flat_map(|value| value.as_array().map_or_else(|| vec![text(value)], |list| list.iter().map(text).collect()))
        .flatten()
        .collect()
}

fn add_token(entries: &mut Entries, id: usize, text: String, is_special: bool) -> Result<(), String> {
    let kind = if is_special { CONTROL } else { USER_DEFINED };
    let Some(MetadataValue::Strings(texts)) = entries.get_mut("tokenizer.ggml.tokens") else { return Ok(()) };
    let num_tokens = texts.len();
    match texts.get_mut(id) {
        Some(there) if *there == text => {}
        Some(there) => return Err(format!("added token {id} is {text:?}, which is {there:?} in tokenizer.model")),
        None if id == num_tokens => texts.push(text),
        None => return Err(format!("added token {id} ({text:?}) leaves a gap behind the {num_tokens} tokens before it")),
    }
    if let Some(MetadataValue::Floats(scores)) = entries.get_mut("tokenizer.ggml.scores") {
        scores.resize(scores.len().max(id + 1), 0.0);
    }
    if let Some(MetadataValue::Ints(types)) = entries.get_mut("tokenizer.ggml.token_type") {
        types.resize(types.len().max(id + 1), kind);
        // What is unknown stays so, and bytes stay bytes; special is more than added.
        if types[id] == NORMAL || types[id] == USER_DEFINED {
            types[id] = kind;
        }
    }
    Ok(())
}

/// Entries of a tokenizer, by their keys behind `tokenizer.ggml.`.
pub(super) fn named<const N: usize>(entries: [(&str, MetadataValue); N]) -> Entries {
    entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).into()
}

fn sentencepiece(bytes: &[u8]) -> Result<Entries, String> {
    let model = ModelProto::decode(bytes)
        .map_err(|why| format!("it is neither a model of SentencePiece ({why}) nor the ranks of tiktoken"))?;
    if !(1..=MAX_TOKENS).contains(&model.pieces.len()) {
        return Err(format!("the model of SentencePiece has {} pieces; 1 to {MAX_TOKENS} are read", model.pieces.len()));
    }
    let (trainer, normalizer) = (model.trainer.unwrap_or_default(), model.normalizer.unwrap_or_default());
    let advice = "convert it to a tokenizer.json";
    if trainer.model_type() != BPE {
        return Err(format!(
            "it is a model of kind {} of SentencePiece; BPE ({BPE}) is computed: {advice}",
            trainer.model_type()
        ));
    }
    if !normalizer.precompiled_charsmap().is_empty() {
        return Err(format!("it normalises characters by a table, which is not done: {advice}"));
    }
    if normalizer.remove_extra_whitespaces() {
        return Err(format!("it removes extra white space, which is not done: {advice}"));
    }
    let texts = model.pieces.iter().map(|piece| piece.text().to_owned()).collect();
    let scores = model.pieces.iter().map(Piece::score).collect();
    let types = model.pieces.iter().map(|piece| i64::from(piece.kind())).collect();
    let mut entries = named([
        ("model", MetadataValue::String("llama".into())),
        ("tokens", MetadataValue::Strings(texts)),
        ("scores", MetadataValue::Floats(scores)),
        ("token_type", MetadataValue::Ints(types)),
        ("add_space_prefix", MetadataValue::Bool(normalizer.add_dummy_prefix())),
    ]);
    let ids = [
        ("unknown_token_id", trainer.unk_id()),
        ("bos_token_id", trainer.bos_id()),
        ("eos_token_id", trainer.eos_id()),
        ("padding_token_id", trainer.pad_id()),
    ];
    // Those that a model does not have are negative.
    entries
        .extend(ids.into_iter().filter(|(_, id)| *id >= 0).flat_map(|(key, id)| named([(key, MetadataValue::Int(id.into()))])));
    Ok(entries)
}

/// Whether the file begins with a line of tiktoken: a token in base 64, and its rank.
fn is_tiktoken(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    rank_of(line).is_ok_and(|(_, rank)| rank == 0)
}

fn rank_of(line: &[u8]) -> Result<(Vec<u8>, usize), String> {
    let line = std::str::from_utf8(line).map_err(|_| "a line is not text")?;
    let (token, rank) = line.trim_end().split_once(' ').ok_or_else(|| format!("{line:?} is not a token and its rank"))?;
    let token = BASE64_STANDARD.decode(token).map_err(|why| format!("{token:?} is not in base 64: {why}"))?;
    Ok((token, rank.parse().map_err(|_| format!("{rank:?} is not a rank"))?))
}

/// The special tokens of Llama 3, in the order of their ids; those of 3.1 and later if `is_later`.
fn special_tokens(is_later: bool) -> Vec<String> {
    let first: &[&str] = if is_later {
        &[
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
            "<|reserved_special_token_1|>",
            "<|finetune_right_pad_id|>",
            "<|reserved_special_token_2|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ]
    } else {
        &[
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
            "<|reserved_special_token_1|>",
            "<|reserved_special_token_2|>",
            "<|reserved_special_token_3|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|reserved_special_token_4|>",
            "<|eot_id|>",
        ]
    };
    let num_reserved = first.iter().filter(|text| text.starts_with("<|reserved")).count();
    let rest = (num_reserved..).map(|number| format!("<|reserved_special_token_{number}|>"));
    first.iter().map(ToString::to_string).chain(rest).take(NUM_SPECIAL).collect()
}

fn tiktoken(bytes: &[u8], is_later: bool) -> Result<Entries, String> {
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let mut tokens = Vec::new();
    for (number, line) in lines.enumerate() {
        let (token, rank) = rank_of(line)?;
        if rank != number {
            return Err(format!("rank {rank} stands in the place of {number}"));
        }
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(format!("token {rank} has {} bytes; 1 to {MAX_TOKEN_BYTES} are read", token.len()));
        }
        if number == MAX_TOKENS {
            return Err(format!("it has more than {MAX_TOKENS} tokens"));
        }
        tokens.push(token);
    }
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    if ranks.len() < tokens.len() {
        return Err("a token is there twice".into());
    }
    let chars = byte_chars();
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| chars[usize::from(*byte)]).collect::<String>();
    let merges = tokens.iter().enumerate().filter_map(|(rank, token)| {
        let (left, right) = token.split_at(merged_at(token, rank, &ranks)?);
        Some(format!("{} {}", spelled(left), spelled(right)))
    });
    let merges = merges.collect();
    let num_ranks = tokens.len();
    let mut texts: Vec<_> = tokens.iter().map(|token| spelled(token)).collect();
    let mut types = vec![NORMAL; num_ranks];
    texts.extend(special_tokens(is_later));
    types.resize(texts.len(), CONTROL);
    let id_of = |text: &str| texts[num_ranks..].iter().position(|special| special == text).map(|at| (num_ranks + at) as i128);
    let ids = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"].map(id_of);
    let mut entries = named([
        ("model", MetadataValue::String("gpt2".into())),
        ("pre", MetadataValue::String("llama-bpe".into())),
        ("merges", MetadataValue::Strings(merges)),
        ("token_type", MetadataValue::Ints(types)),
        ("tokens", MetadataValue::Strings(texts)),
    ]);
    for (key, id) in ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"].into_iter().zip(ids) {
        entries.extend(id.map(|id| (format!("tokenizer.ggml.{key}"), MetadataValue::Int(id))));
    }
    Ok(entries)
}

/// Where the two tokens meet that a token is merged of, last of all: by the merges of lower ranks. `None` where these leave more
/// than two, or for a single byte.
pub(super) fn merged_at(token: &[u8], rank: usize, ranks: &HashMap<&[u8], usize>) -> Option<usize> {
    // The ends of the parts, and the rank of each with the next.
    let mut ends: Vec<usize> = (1..=token.len()).collect();
    let pair_rank = |ends: &[usize], at: usize| {
        let start = if at == 0 { 0 } else { ends[at - 1] };
        let end = ends.get(at + 1)?;
        ranks.get(&token[start..*end]).copied().filter(|pair| *pair < rank)
    };
    let mut pairs: Vec<Option<usize>> = (0..ends.len()).map(|at| pair_rank(&ends, at)).collect();
    while let Some(at) = (0..pairs.len()).filter(|at| pairs[*at].is_some()).min_by_key(|at| pairs[*at]) {
        ends.remove(at);
        pairs.remove(at);
        for changed in at.saturating_sub(1)..=at {
            if changed < pairs.len() {
                pairs[changed] = pair_rank(&ends, changed);
            }
        }
    }
    if let [first, _] = ends[..] { Some(first) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_from_ranks() {
        let tokens: [&[u8]; 7] = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"cab"];
        let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (*token, rank)).collect();
        let met = |token: &[u8]| merged_at(token, ranks[token], &ranks);
        assert_eq!(tokens.map(met), [None, None, None, Some(1), Some(1), Some(2), Some(1)]);
        assert_eq!(merged_at(b"ccc", 9, &ranks), None, "three parts are left");
    }

    #[test]
    fn special_tokens_have_their_places() {
        let (first, later) = (special_tokens(false), special_tokens(true));
        assert_eq!((first.len(), later.len()), (256, 256));
        assert_eq!((first[9].as_str(), later[9].as_str()), ("<|eot_id|>", "<|eot_id|>"));
        assert_eq!(
            (first[255].as_str(), later[255].as_str()),
            ("<|reserved_special_token_250|>", "<|reserved_special_token_247|>")
        );
        let distinct: std::collections::HashSet<_> = later.iter().collect();
        assert_eq!(distinct.len(), 256);
    }

    fn model(change: impl FnOnce(&mut ModelProto)) -> Result<Entries, String> {
        let piece = |text: &str, score, kind| Piece { text: Some(text.into()), score: Some(score), kind: Some(kind) };
        let mut model = ModelProto {
            pieces: vec![piece("<unk>", 0.0, 2), piece("<s>", 0.0, 3), piece("</s>", 0.0, 3), piece("\u{2581}a", -1.0, 1)],
            trainer: Some(Trainer { model_type: Some(BPE), ..Trainer::default() }),
            normalizer: Some(Normalizer { remove_extra_whitespaces: Some(false), ..Normalizer::default() }),
        };
        change(&mut model);
        sentencepiece(&model.encode_to_vec())
    }

    #[test]
    fn pieces_are_read_with_their_kinds() {
        let entries = model(|_| {}).unwrap();
        assert_eq!(entries["tokenizer.ggml.token_type"], MetadataValue::Ints(vec![2, 3, 3, 1]));
        assert_eq!(entries["tokenizer.ggml.bos_token_id"], MetadataValue::Int(1));
        assert!(!entries.contains_key("tokenizer.ggml.padding_token_id"));
        assert_eq!(entries["tokenizer.ggml.add_space_prefix"], MetadataValue::Bool(true));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let normalizer = |model: &mut ModelProto| model.normalizer.clone().unwrap_or_default();
        for (entries, why) in [
            (model(|model| model.trainer = None), "of kind 1"),
            (model(|model| model.pieces.clear()), "has 0 pieces"),
            (tiktoken(b"YQ== 0\nYQ== 1\n", false), "twice"),
            (
                model(|model| {
                    model.normalizer = Some(Normalizer { precompiled_charsmap: Some(vec![1]), ..normalizer(model) });
                }),
                "by a table",
            ),
            (model(|model| model.normalizer = None), "extra white space"),
            (sentencepiece(b"\xff\xff"), "neither a model"),
            (tiktoken(b"YQ== 0\nYg== 2\n", false), "rank 2"),
            (tiktoken(b"YQ== 0\n?? 1\n", false), "base 64"),
        ] {
            let error = entries.err().unwrap();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn added_tokens_go_behind_the_others() {
        let mut entries = model(|_| {}).unwrap();
        add_token(&mut entries, 4, "<pad>".into(), true).unwrap();
        add_token(&mut entries, 1, "<s>".into(), true).unwrap();
        assert_eq!(entries["tokenizer.ggml.token_type"], MetadataValue::Ints(vec![2, 3, 3, 1, 3]));
        assert_eq!(entries["tokenizer.ggml.scores"], MetadataValue::Floats(vec![0.0, 0.0, 0.0, -1.0, 0.0]));
        add_token(&mut entries, 5, "<|im_start|>".into(), false).unwrap();
        add_token(&mut entries, 5, "<|im_start|>".into(), true).unwrap();
        assert_eq!(entries["tokenizer.ggml.token_type"], MetadataValue::Ints(vec![2, 3, 3, 1, 3, 3]));
        assert!(add_token(&mut entries, 7, "x".into(), false).unwrap_err().contains("gap"));
        assert!(add_token(&mut entries, 3, "x".into(), false).unwrap_err().contains("tokenizer.model"));
    }
}
