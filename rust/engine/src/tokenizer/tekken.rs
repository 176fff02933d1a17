//! `tekken.json`, the tokenizer of Mistral's own files: ranks of tokens as tiktoken has them, behind special tokens. It becomes
//! what a GGUF file of the same model would say. Everything in it is untrusted.

use std::{collections::HashMap, path::Path};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::Deserialize;

use super::{
    model_file::{CONTROL, Entries, MAX_TOKEN_BYTES, MAX_TOKENS, NORMAL, USER_DEFINED, merged_at, named},
    pieces::byte_chars,
    pre_tokenizer::TEKKEN,
};
use crate::{EngineError, json::read_bounded, weights::MetadataValue};

/// Its name in a folder.
pub(crate) const FILE: &str = "tekken.json";
/// Such a file at most; those in use have 20 MB.
const MAX_BYTES: u64 = 64 << 20;
/// The token before a sound.
const BEGIN_AUDIO: &str = "[BEGIN_AUDIO]";

#[derive(Deserialize)]
struct File {
    config: Config,
    vocab: Vec<Token>,
    special_tokens: Option<Vec<Special>>,
}

#[derive(Deserialize)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct Token {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct Special {
    rank: usize,
    token_str: String,
    #[serde(default)]
    is_control: bool,
}

/// What a GGUF file would say of the tokenizer in a folder.
///
/// # Errors
/// [`EngineError::Tokenizer`] for a file that is none, or that needs what is not done here.
pub(super) fn read_dir(dir: &Path) -> Result<Entries, EngineError> {
    let path = dir.join(FILE);
    let error = |why: String| EngineError::Tokenizer(format!("{}: {why}", path.display()));
    let bytes = read_bounded(&path, MAX_BYTES).map_err(|why| error(why.to_string()))?;
    let file: File = serde_json::from_slice(&bytes).map_err(|why| error(why.to_string()))?;
    entries(&file).map_err(error)
}

fn entries(file: &File) -> Result<Entries, String> {
    let Config { pattern, default_vocab_size, default_num_special_tokens: num_special } = &file.config;
    if pattern != TEKKEN {
        return Err(format!("config.pattern is {pattern:?}, which is not the one of Tekken that is implemented"));
    }
    if *default_vocab_size > MAX_TOKENS || num_special >= default_vocab_size {
        return Err(format!("config.default_vocab_size is {default_vocab_size}, of which {num_special} are special"));
    }
    let num_ranks = default_vocab_size - num_special;
    let (mut texts, mut types) = special_texts(file)?;
    if file.vocab.len() < num_ranks {
        return Err(format!("vocab has {} tokens, and config.default_vocab_size needs {num_ranks}", file.vocab.len()));
    }
    let tokens = file.vocab[..num_ranks].iter().enumerate().map(token_bytes).collect::<Result<Vec<_>, _>>()?;
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    if ranks.len() < tokens.len() {
        return Err("a token of vocab is there twice".into());
    }
    let chars = byte_chars();
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| chars[usize::from(*byte)]).collect::<String>();
    let merge = |(rank, token): (usize, &Vec<u8>)| {
        let (left, right) = token.split_at(merged_at(token, rank, &ranks)?);
        Some(format!("{} {}", spelled(left), spelled(right)))
    };
    let merges = tokens.iter().enumerate().filter_map(merge).collect();
    texts.extend(tokens.iter().map(|token| spelled(token)));
    types.resize(texts.len(), NORMAL);
    let ids = [("unknown_token_id", "<unk>"), ("bos_token_id", "<s>"), ("eos_token_id", "</s>"), ("padding_token_id", "<pad>")]
        .map(|(key, text)| (key, texts[..*num_special].iter().position(|special| special == text)));
    let mut entries = named([
        ("model", MetadataValue::String("gpt2".into())),
        ("pre", MetadataValue::String("tekken".into())),
        ("merges", MetadataValue::Strings(merges)),
        ("token_type", MetadataValue::Ints(types)),
        ("tokens", MetadataValue::Strings(texts)),
    ]);
    let with_id = |(key, id): (&'static str, Option<usize>)| Some(named([(key, MetadataValue::Int(id? as i128))]));
    entries.extend(ids.into_iter().filter_map(with_id).flatten());
    Ok(entries)
}

/// Texts and types of the special tokens; a place that none has is filled as `mistral-common` fills it.
fn special_texts(file: &File) -> Result<(Vec<String>, Vec<i64>), String> {
    let Some(special) = &file.special_tokens else {
        return Err("special_tokens is missing; files of older versions are not read: convert it to a tokenizer.json".into());
    };
    let num_special = file.config.default_num_special_tokens;
    let mut texts: Vec<_> = (0..num_special).map(|rank| format!("<SPECIAL_{rank}>")).collect();
    let mut types = vec![CONTROL; num_special];
    for Special { rank, token_str, is_control } in special {
        let text = texts.get_mut(*rank).ok_or_else(|| format!("special token {token_str:?} has the rank {rank}"))?;
        text.clone_from(token_str);
        types[*rank] = if *is_control { CONTROL } else { USER_DEFINED };
    }
    Ok((texts, types))
}

fn token_bytes((number, token): (usize, &Token)) -> Result<Vec<u8>, String> {
    let Token { rank, token_bytes } = token;
    if *rank != number {
        return Err(format!("rank {rank} stands in the place of {number}"));
    }
    let bytes = BASE64_STANDARD.decode(token_bytes).map_err(|why| format!("{token_bytes:?} is not in base 64: {why}"))?;
    if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES {
        return Err(format!("token {rank} has {} bytes; 1 to {MAX_TOKEN_BYTES} are read", bytes.len()));
    }
    Ok(bytes)
}

/// The chat template of a model that hears, whose folder has none: as `mistral-common` writes its prompts. Tools are not in it.
const HEARING: &str = r"<s>{% for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception('messages are of the roles system, user and assistant, and one is of ' ~ message['role']) -}}
{%- endif -%}
{{- {'system': '[SYSTEM_PROMPT]', 'user': '[INST]', 'assistant': ''}[message['role']] -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- {'system': '[/SYSTEM_PROMPT]', 'user': '[/INST]', 'assistant': '</s>'}[message['role']] -}}
{%- endfor -%}";

/// The template of a model of Mistral's that hears, whose files have none, if its vocabulary has the tokens for it.
pub(crate) fn template(tokenizer: &super::Tokenizer) -> Option<&'static str> {
    tokenizer.token_to_id(BEGIN_AUDIO).map(|_| HEARING)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tokenizer, weights::Metadata};

    fn file(change: impl FnOnce(&mut serde_json::Value)) -> Result<Entries, String> {
        let token =
            |(rank, bytes): (usize, &[u8])| serde_json::json!({ "rank": rank, "token_bytes": BASE64_STANDARD.encode(bytes) });
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        tokens.extend([b"ab".to_vec(), b" ab".to_vec(), "\u{e9}".as_bytes().to_vec(), b"unused".to_vec()]);
        let mut json = serde_json::json!({
            "config": { "pattern": TEKKEN, "default_vocab_size": 269, "default_num_special_tokens": 10 },
            "vocab": tokens.iter().map(|token| &token[..]).enumerate().map(token).collect::<Vec<_>>(),
            "special_tokens": [
                { "rank": 0, "token_str": "<unk>", "is_control": true },
                { "rank": 1, "token_str": "<s>", "is_control": true },
                { "rank": 2, "token_str": "</s>", "is_control": true },
                { "rank": 5, "token_str": "[BEGIN_AUDIO]", "is_control": true },
            ],
        });
        change(&mut json);
        entries(&serde_json::from_value(json).map_err(|why| why.to_string())?)
    }

    #[test]
    fn special_tokens_come_first_and_ranks_merge() {
        let tokenizer = Tokenizer::from_gguf(&Metadata::new(file(|_| {}).unwrap())).unwrap();
        assert_eq!(tokenizer.encode("ab ab\u{e9}", true).unwrap(), [1, 266, 267, 268]);
        assert_eq!(tokenizer.encode("</s>a[BEGIN_AUDIO]<SPECIAL_7>", false).unwrap(), [2, 107, 5, 7]);
        assert_eq!(tokenizer.decode(&[266, 267, 268], true), "ab ab\u{e9}");
        assert!(template(&tokenizer).is_some_and(|text| text.contains("[AUDIO]")));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for (entries, why) in [
            (file(|json| json["config"]["pattern"] = ".".into()), "config.pattern"),
            (file(|json| json["special_tokens"] = serde_json::Value::Null), "special_tokens is missing"),
            (file(|json| json["special_tokens"][3]["rank"] = 10.into()), "has the rank 10"),
            (file(|json| json["config"]["default_vocab_size"] = 10.into()), "default_vocab_size is 10"),
            (file(|json| json["config"]["default_vocab_size"] = 500.into()), "vocab has 260 tokens"),
            (file(|json| json["vocab"][3]["rank"] = 4.into()), "rank 4 stands in the place of 3"),
            (file(|json| json["vocab"][3]["token_bytes"] = "AA==".into()), "twice"),
            (file(|json| json["vocab"][3]["token_bytes"] = "?".into()), "base 64"),
        ] {
            let error = entries.err().unwrap();
            assert!(error.contains(why), "{error}");
        }
    }
}
