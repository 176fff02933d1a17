//! `vocab.txt`, the `WordPiece` tokens of BERT, one a line. It becomes what a GGUF file of the same model would say. Everything
//! in it is untrusted.

use std::path::Path;

use super::{
    model_file::{CONTROL, Entries, MAX_TOKEN_BYTES, MAX_TOKENS, NORMAL, named},
    pieces::VISIBLE_SPACE,
};
use crate::{
    EngineError,
    json::{read_bounded, read_json},
    weights::MetadataValue,
};

/// Its name in a folder.
pub(super) const FILE: &str = "vocab.txt";
/// Such a file at most; those in use have a MB.
const MAX_BYTES: u64 = 16 << 20;
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// What a GGUF file would say of the tokenizer in a folder.
///
/// # Errors
/// [`EngineError::Tokenizer`] for a file that is none.
pub(super) fn read_dir(dir: &Path) -> Result<Entries, EngineError> {
    let path = dir.join(FILE);
    let error = |why: String| EngineError::Tokenizer(format!("{}: {why}", path.display()));
    let bytes = read_bounded(&path, MAX_BYTES).map_err(|why| error(why.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|why| error(why.to_string()))?;
    let config = read_json(&dir.join("tokenizer_config.json")).map_err(EngineError::Tokenizer)?;
    let config = config.unwrap_or_default();
    if config["never_split"].as_array().is_some_and(|tokens| !tokens.is_empty()) {
        return Err(error("`never_split` of tokenizer_config.json is not supported: convert it to a tokenizer.json".into()));
    }
    let mut entries = entries(&text).map_err(error)?;
    let flags = [
        ("normalizer.lowercase", config["do_lower_case"].as_bool().or(Some(true))),
        ("normalizer.strip_accents", config["strip_accents"].as_bool()),
        ("normalizer.handle_chinese_chars", config["tokenize_chinese_chars"].as_bool()),
    ];
    for (key, flag) in flags {
        entries.extend(flag.into_iter().flat_map(|flag| named([(key, MetadataValue::Bool(flag))])));
    }
    Ok(entries)
}

fn entries(text: &str) -> Result<Entries, String> {
    let (mut texts, mut types) = (Vec::new(), Vec::new());
    for token in text.lines() {
        if texts.len() == MAX_TOKENS || token.len() > MAX_TOKEN_BYTES {
            return Err(format!("line {} is too long, or one too many", texts.len() + 1));
        }
        let is_special = SPECIAL.contains(&token);
        types.push(if is_special { CONTROL } else { NORMAL });
        texts.push(match token.strip_prefix("##") {
            _ if is_special => token.to_owned(),
            Some(within) => within.to_owned(),
            None => format!("{VISIBLE_SPACE}{token}"),
        });
    }
    Ok(named([
        ("model", MetadataValue::String("bert".into())),
        ("token_type", MetadataValue::Ints(types)),
        ("tokens", MetadataValue::Strings(texts)),
    ]))
}
