//! Unigram models of `SentencePiece` in GGUF files, whose tokenizer is called `t5`: those of `XLM-RoBERTa`, as llama.cpp's
//! converter writes them. They cut texts as a tokenizer.json of the same model does.

use tokenizers::{
    AddedToken, PreTokenizerWrapper,
    models::unigram::Unigram,
    normalizers::Precompiled,
    pre_tokenizers::{
        metaspace::{Metaspace, PrependScheme},
        sequence::Sequence,
        whitespace::WhitespaceSplit,
    },
    processors::template::{SpecialToken, Template, TemplateProcessing},
};

use super::{
    Encoder, Tokenizer, charsmap,
    gguf::{TokenType, Vocabulary, malformed},
    pieces::{Pieces, VISIBLE_SPACE, fallback_byte},
};
use crate::{EngineError, error::caught_quietly};

/// The tokenizer that a file describes. Texts are between BOS and EOS unless it says otherwise, as all models have them that are
/// converted so.
pub(super) fn unigram(vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, EngineError> {
    let num_tokens = vocabulary.tokens.len();
    let scores = vocabulary.scores()?;
    // Also of what is no piece of texts: such an entry must not be the least of all, which decides what unknown characters cost.
    let least = vocabulary.iter().zip(scores).filter(|((_, _, kind), _)| *kind == TokenType::Normal).map(|(_, score)| *score);
    let least = least.fold(f32::INFINITY, f32::min);
    if !least.is_finite() {
        return Err(malformed("no token of it has a finite score"));
    }
    let (mut vocab, mut added) = (Vec::with_capacity(num_tokens), Vec::new());
    let mut pieces = Pieces::with_capacity(num_tokens);
    let (mut unknown, mut has_bytes) = (vocabulary.id("unknown_token_id")?, false);
    for ((id, text, kind), score) in vocabulary.iter().zip(scores) {
        if !score.is_finite() {
            return Err(malformed(format!("the score of token {id} is {score}")));
        }
        let score = f64::from(score.max(least));
        match kind {
            TokenType::Unused => {
                // No word has a visible space but at its beginning.
                vocab.push((format!("{id}{VISIBLE_SPACE}"), score));
                pieces.push_absent();
                continue;
            }
            TokenType::Byte => {
                let byte = fallback_byte(text);
                let byte = byte.ok_or_else(|| malformed(format!("byte token {id} is {text:?}, not like <0x0A>")))?;
                has_bytes = true;
                pieces.push(&[byte], false);
            }
            TokenType::Normal => pieces.push(text.replace(VISIBLE_SPACE, " ").as_bytes(), false),
            TokenType::Unknown | TokenType::Control | TokenType::UserDefined => {
                if kind == TokenType::Unknown {
                    unknown = unknown.or(Some(id));
                }
                pieces.push(text.as_bytes(), kind.is_special());
                added.push(AddedToken::from(text, kind.is_special()).normalized(false));
            }
        }
        vocab.push((text.to_owned(), score));
    }
    let unknown = unknown.ok_or_else(|| malformed("it has no unknown token"))?;
    let model = Unigram::from(vocab, Some(unknown as usize), has_bytes).map_err(malformed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(charsmap(vocabulary)?).map_err(malformed)?;
    let add_space_prefix = vocabulary.flag("add_space_prefix", true);
    inner.with_pre_tokenizer(Some(words(vocabulary, add_space_prefix)?));
    inner.with_post_processor(Some(ends(vocabulary)?));
    inner.add_tokens(added).map_err(malformed)?;
    let tokenizer = Tokenizer::new(Encoder::pipeline(inner), pieces, add_space_prefix);
    // What is wrong within a map shows only then.
    tokenizer.try_out()?;
    Ok(tokenizer)
}

/// The map of characters, if there is one.
fn charsmap(vocabulary: &Vocabulary<'_>) -> Result<Option<Precompiled>, EngineError> {
    let map = vocabulary.metadata.ints("tokenizer.ggml.precompiled_charsmap").unwrap_or_default();
    if map.is_empty() {
        return Ok(None);
    }
    let bytes = map.iter().map(|byte| u8::try_from(*byte)).collect::<Result<Vec<_>, _>>();
    let bytes = bytes.map_err(|_| malformed("its precompiled_charsmap is not of bytes"))?;
    charsmap::check_bytes(&bytes).map_err(malformed)?;
    let map = caught_quietly(|| Precompiled::from(&bytes).map_err(|error| error.to_string()));
    map.and_then(|map| map).map(Some).map_err(malformed)
}

/// Words begin with a visible space, and all white space is between words where more than one space is removed.
fn words(vocabulary: &Vocabulary<'_>, add_space_prefix: bool) -> Result<PreTokenizerWrapper, EngineError> {
    let scheme = if add_space_prefix { PrependScheme::Always } else { PrependScheme::Never };
    let words = PreTokenizerWrapper::Metaspace(Metaspace::new(VISIBLE_SPACE, scheme, true));
    match (vocabulary.flag("remove_extra_whitespaces", true), add_space_prefix) {
        (false, _) => Ok(words),
        (true, true) => {
            Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![PreTokenizerWrapper::WhitespaceSplit(WhitespaceSplit), words])))
        }
        (true, false) => Err(malformed(
            "tokenizer.ggml.remove_extra_whitespaces is true and add_space_prefix is false, which together are not implemented",
        )),
    }
}

/// What stands around a text, and between two: `<s> A </s></s> B </s>`.
fn ends(vocabulary: &Vocabulary<'_>) -> Result<TemplateProcessing, EngineError> {
    let token = |flag: &str, name: &str| if vocabulary.flag(flag, true) { vocabulary.id(name) } else { Ok(None) };
    let (first, last) = (token("add_bos_token", "bos_token_id")?, token("add_eos_token", "eos_token_id")?);
    let between = match vocabulary.id("separator_token_id")? {
        None => vocabulary.id("seperator_token_id")?,
        id => id,
    };
    let between = between.or(last);
    let ends = [("first", first), ("last", last), ("between", between)];
    let special = |(name, id): (&str, Option<u32>)| {
        let id = id?;
        Some(SpecialToken::new(name.to_owned(), vec![id], vec![vocabulary.tokens[id as usize].clone()]))
    };
    let tokens = ends.into_iter().filter_map(special).collect::<Result<Vec<_>, _>>().map_err(malformed)?;
    let template = |names: &[&str]| {
        let is_there = |name: &&str| !ends.iter().any(|(end, id)| end == name && id.is_none());
        Template::try_from(names.iter().copied().filter(is_there).collect::<Vec<_>>()).map_err(malformed)
    };
    let (single, pair) = (template(&["first", "$A", "last"])?, template(&["first", "$A", "last", "between", "$B", "last"])?);
    TemplateProcessing::builder().single(single).pair(pair).special_tokens(tokens).build().map_err(malformed)
}
