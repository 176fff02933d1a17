//! The tokenizer of a folder, tokenizer.json, as GGUF metadata. What is written is tried out: it must tokenize as the original.

use std::{collections::HashMap, path::Path};

use serde_json::Value as Json;

use super::entries::{Entries, Value};
use crate::{EngineError, json::read_json, tokenizer::Tokenizer, tokenizer::pre_tokenizer_name};

// `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// What `SentencePiece` gives pieces that nothing is merged to.
const LEAST_SCORE: f32 = -1e6;

/// Words, code, digits, runs of white space, and scripts: what tokenizers cut in different ways.
const TRIALS: [&str; 6] = [
    "Hello world! It's 2024, and we'll see 3.14159 of 1234567 things; don't THEY'RE  two  spaces\tand a tab.",
    "def f(x):\n    return [x ** 2 for x in range(10)]  # comment\n\n\n\nif __name__ == '__main__':\r\n\tprint(f(7))",
    " a leading space, trailing ones   ",
    "Grüße, naïve café e\u{301}. Ελληνικά, русский текст, 中文字符 日本語テキスト 한국어, العربية, हिन्दी ไทย",
    "\u{1f600}\u{1f680} emoji \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}, \u{a0}no-break, \u{3000}wide, \u{fb01} ligature …—“quotes”",
    "http://example.org/a_b?c=d&e=%20 <b>&amp;</b> {\"key\": [1, 2.5e-3, null]} $100.00 50% C++ #include <x>",
];

fn refused(dir: &Path, why: impl std::fmt::Display) -> EngineError {
    EngineError::NotSupported(format!("the tokenizer of {} cannot be written to a GGUF file: {why}", dir.display()))
}

/// Adds the tokenizer of a folder, or the one given. There are as many tokens as the token embedding has rows.
pub(super) fn write(
    dir: &Path,
    tokenizer_json: Option<&Path>,
    num_rows: usize,
    entries: &mut Entries,
) -> Result<(), EngineError> {
    // Reads, checks and bounds the file.
    let original = Tokenizer::from_hf_dir(dir, tokenizer_json)?;
    let own = dir.join("tokenizer.json");
    let json = read_json(tokenizer_json.unwrap_or(&own)).map_err(EngineError::Tokenizer)?.unwrap_or_default();
    let model = &json["model"];
    if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["merges"].is_array() {
        return Err(refused(dir, format!("its model is {}; BPE is implemented", model["type"])));
    }
    let is_sentencepiece = model["byte_fallback"].as_bool() == Some(true);
    let tokens = Tokens::read(&json, num_rows, is_sentencepiece).map_err(|why| refused(dir, why))?;
    let special = special_ids(dir, &original)?;
    if is_sentencepiece {
        // Whether a space is put before a text shows only in what comes out.
        let tried = [true, false].map(|add_space_prefix| {
            let mut tried = entries.clone();
            tried.text("tokenizer.ggml.model", "llama");
            tried.text("tokenizer.ggml.pre", "default");
            tried.push("tokenizer.ggml.add_space_prefix", Value::Bool(add_space_prefix));
            tried.push("tokenizer.ggml.scores", Value::F32s(scores(&tokens.texts, &tokens.types, model)));
            finished(tried, &tokens, &special, &original).map_err(|why| refused(dir, why))
        });
        let [with, without] = tried;
        *entries = with.or(without)?;
    } else {
        let name = pre_tokenizer_name(&json).ok_or_else(|| refused(dir, "GGUF has no name for the way it cuts text"))?;
        let mut tried = entries.clone();
        tried.text("tokenizer.ggml.model", "gpt2");
        tried.text("tokenizer.ggml.pre", name);
        tried.push("tokenizer.ggml.merges", Value::Texts(merges(model).map_err(|why| refused(dir, why))?));
        *entries = finished(tried, &tokens, &special, &original).map_err(|why| refused(dir, why))?;
    }
    Ok(())
}

/// Texts and kinds by id.
struct Tokens {
    texts: Vec<String>,
    types: Vec<i32>,
}

impl Tokens {
    /// Ids without a token are padded as llama.cpp's converter does.
    fn read(json: &Json, num_rows: usize, is_sentencepiece: bool) -> Result<Self, String> {
        let texts = (0..num_rows).map(|id| format!("[PAD{id}]")).collect();
        let mut tokens = Self { texts, types: vec![UNUSED; num_rows] };
        let vocab = json["model"]["vocab"].as_object().ok_or("it has no vocabulary")?;
        let unknown = json["model"]["unk_token"].as_str();
        for (text, id) in vocab {
            let kind = match text {
                text if is_sentencepiece && unknown == Some(text) => UNKNOWN,
                text if is_sentencepiece && is_byte(text) => BYTE,
                _ => NORMAL,
            };
            tokens.set(id, text, kind)?;
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let text = token["content"].as_str().ok_or("an added token has no text")?;
            let kind = match token["special"].as_bool() {
                Some(true) if is_sentencepiece && unknown == Some(text) => UNKNOWN,
                Some(true) => CONTROL,
                _ => USER_DEFINED,
            };
            tokens.set(&token["id"], text, kind)?;
        }
        Ok(tokens)
    }

    fn set(&mut self, id: &Json, text: &str, kind: i32) -> Result<(), String> {
        let at = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < self.texts.len());
        let at = at.ok_or_else(|| format!("token {text:?} has the id {id}, and the embedding has {} rows", self.texts.len()))?;
        text.clone_into(&mut self.texts[at]);
        self.types[at] = kind;
        Ok(())
    }
}

fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// The two parts of a merge, which is a list, or text with a space between them.
fn merge_parts(merge: &Json) -> Result<(&str, &str), String> {
    match merge {
        Json::String(text) => text.split_once(' '),
        Json::Array(parts) => match &parts[..] {
            [Json::String(left), Json::String(right)] => Some((&left[..], &right[..])),
            _ => None,
        },
        _ => None,
    }
    .ok_or_else(|| format!("the merge {merge} is not two tokens"))
}

fn merges(model: &Json) -> Result<Vec<String>, String> {
    let join = |merge| {
        let (left, right) = merge_parts(merge)?;
        if left.contains(' ') || right.contains(' ') {
            return Err(format!("the merge of {left:?} and {right:?} has a space, which stands between the two in a file"));
        }
        Ok(format!("{left} {right}"))
    };
    model["merges"].as_array().into_iter().flatten().map(join).collect()
}

/// `SentencePiece` merges the pair with the highest score first: minus the place of the first merge that gives the piece.
fn scores(texts: &[String], types: &[i32], model: &Json) -> Vec<f32> {
    let mut places: HashMap<String, usize> = HashMap::new();
    for (place, merge) in model["merges"].as_array().into_iter().flatten().enumerate() {
        if let Ok((left, right)) = merge_parts(merge) {
            places.entry(format!("{left}{right}")).or_insert(place);
        }
    }
    let score = |(text, kind): (&String, &i32)| match places.get(text) {
        Some(place) if *kind == NORMAL => -(*place as f32),
        _ if *kind == NORMAL => LEAST_SCORE,
        _ => 0.0,
    };
    texts.iter().zip(types).map(score).collect()
}

/// Ids by the key of the file.
type SpecialIds = Vec<(&'static str, u32)>;

/// Those of tokenizer_config.json, else of config.json.
fn special_ids(dir: &Path, original: &Tokenizer) -> Result<SpecialIds, EngineError> {
    let config = read_json(&dir.join("config.json")).map_err(EngineError::Load)?.unwrap_or_default();
    let texts = original.special_tokens();
    let known = [
        ("bos_token_id", &texts.bos_token),
        ("eos_token_id", &texts.eos_token),
        ("unknown_token_id", &texts.unk_token),
        ("padding_token_id", &texts.pad_token),
    ];
    let mut ids = Vec::new();
    for (key, text) in known {
        let of_text = text.as_deref().and_then(|text| original.token_to_id(text));
        let value = match &config[key] {
            Json::Array(list) => list.first().and_then(Json::as_u64),
            value => value.as_u64(),
        };
        if let Some(id) = of_text.or_else(|| u32::try_from(value?).ok()) {
            ids.push((key, id));
        }
    }
    Ok(ids)
}

/// With what both kinds have, once it tokenizes as the original does.
fn finished(mut entries: Entries, tokens: &Tokens, special: &SpecialIds, original: &Tokenizer) -> Result<Entries, String> {
    entries.push("tokenizer.ggml.tokens", Value::Texts(tokens.texts.clone()));
    entries.push("tokenizer.ggml.token_type", Value::I32s(tokens.types.clone()));
    for (key, id) in special {
        entries.push(format!("tokenizer.ggml.{key}"), Value::U32(*id));
    }
    let id_of = |key: &str| special.iter().find(|(known, _)| *known == key).map(|(_, id)| *id);
    let added = original.encode("", true).map_err(|e| e.to_string())?;
    let (bos, eos) = (id_of("bos_token_id"), id_of("eos_token_id"));
    let adds_bos = bos.is_some() && added.first() == bos.as_ref();
    let adds_eos = eos.is_some() && added.len() == usize::from(adds_bos) + 1 && added.last() == eos.as_ref();
    entries.push("tokenizer.ggml.add_bos_token", Value::Bool(adds_bos));
    entries.push("tokenizer.ggml.add_eos_token", Value::Bool(adds_eos));
    let written = |entries: &Entries| Tokenizer::from_gguf(&entries.metadata()).map_err(|e| e.to_string());
    let known = written(&entries)?.eos_ids().to_vec();
    let mut left = original.eos_ids().iter().filter(|id| !known.contains(id));
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        if let Some(id) = left.next() {
            entries.push(key, Value::U32(*id));
        }
    }
    if let Some(id) = left.next() {
        return Err(format!("token {id} ends a text as well, and a GGUF file names three that do"));
    }
    let written = written(&entries)?;
    for text in TRIALS {
        let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, true).map_err(|e| e.to_string());
        let (expected, got) = (ids(original)?, ids(&written)?);
        if expected != got {
            let at = expected.iter().zip(&got).take_while(|(a, b)| a == b).count();
            return Err(format!("it would tokenize {text:?} otherwise from token {at} on"));
        }
        if original.decode(&expected, false) != written.decode(&expected, false) {
            return Err(format!("it would decode {text:?} otherwise"));
        }
    }
    Ok(entries)
}
