//! Tokenizers from the metadata of GGUF files. Everything in it is untrusted.

use std::collections::HashMap;

use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior,
    models::{
        bpe::{BPE, Merges, Vocab},
        wordpiece::WordPiece,
    },
    normalizers::{BertNormalizer, NFC, Replace},
    pre_tokenizers::{
        bert::BertPreTokenizer,
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
    processors::bert::BertProcessing,
};

use super::{
    Encoder, Tokenizer,
    pieces::{PieceRules, Pieces, VISIBLE_SPACE, fallback_byte},
    pre_tokenizer::{known_names, pre_tokenizer},
    spm::{ByteTokens, SpecialMatcher, Spm},
    unigram::unigram,
};
use crate::{EngineError, weights::metadata::Metadata};

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_int(value: i64) -> Self {
        match value {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    pub fn is_special(self) -> bool {
        matches!(self, Self::Unknown | Self::Control)
    }

    /// Recognised wherever its text stands.
    fn is_matched_whole(self) -> bool {
        self.is_special() || self == Self::UserDefined
    }
}

const ADVICE: &str = "pass the model's tokenizer.json (tokenizer_json, or tok_model_id for its folder) instead";

pub(super) fn malformed(what: impl std::fmt::Display) -> EngineError {
    EngineError::Tokenizer(format!("the GGUF file's tokenizer is malformed: {what}; {ADVICE}"))
}

/// The metadata that every kind of tokenizer has.
pub(super) struct Vocabulary<'a> {
    pub metadata: &'a Metadata,
    pub tokens: &'a [String],
    types: Vec<TokenType>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, EngineError> {
        let tokens = metadata.strings("tokenizer.ggml.tokens").ok_or_else(|| malformed("it has no tokenizer.ggml.tokens"))?;
        if tokens.is_empty() {
            return Err(malformed("tokenizer.ggml.tokens is empty"));
        }
        let types = match metadata.ints("tokenizer.ggml.token_type") {
            None => vec![TokenType::Normal; tokens.len()],
            Some(types) if types.len() == tokens.len() => types.iter().map(|t| TokenType::from_int(*t)).collect(),
            Some(types) => {
                return Err(malformed(format!("{} tokens but {} entries of token_type", tokens.len(), types.len())));
            }
        };
        Ok(Self { metadata, tokens, types })
    }

    /// A token id by key, checked.
    pub fn id(&self, name: &str) -> Result<Option<u32>, EngineError> {
        let key = format!("tokenizer.ggml.{name}");
        match self.metadata.usize(&key) {
            None => Ok(None),
            Some(id) if id < self.tokens.len() => Ok(Some(id as u32)),
            Some(id) => Err(malformed(format!("{key} is {id}, and there are {} tokens", self.tokens.len()))),
        }
    }

    pub fn flag(&self, name: &str, default: bool) -> bool {
        self.metadata.bool(&format!("tokenizer.ggml.{name}")).unwrap_or(default)
    }

    /// Of each token, how likely it is.
    pub fn scores(&self) -> Result<&'a [f32], EngineError> {
        let num_tokens = self.tokens.len();
        let scores = self.metadata.floats("tokenizer.ggml.scores");
        let scores = scores.ok_or_else(|| malformed("a SentencePiece tokenizer without tokenizer.ggml.scores"))?;
        if scores.len() != num_tokens {
            return Err(malformed(format!("{num_tokens} tokens but {} scores", scores.len())));
        }
        Ok(scores)
    }

    fn merges(&self) -> Result<Merges, EngineError> {
        let lines = self.metadata.strings("tokenizer.ggml.merges");
        let lines = lines.ok_or_else(|| malformed("it has no tokenizer.ggml.merges"))?;
        let pair = |line: &String| {
            // The first part may itself begin with a space.
            let at = line.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
            at.map(|at| (line[..at].to_owned(), line[at + 1..].to_owned()))
                .ok_or_else(|| malformed(format!("merge {line:?} is not two tokens with a space between")))
        };
        lines.iter().map(pair).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &'a str, TokenType)> {
        (0..).zip(self.tokens.iter().zip(&self.types)).map(|(id, (text, kind))| (id, text.as_str(), *kind))
    }
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes: byte-level BPE (`gpt2`), `SentencePiece` BPE (`llama`, `gemma`), that
    /// with merges in place of scores (`gemma4`, and `gpt2` with the pre-tokenizer `sarvam-moe`), its unigram models (`t5`), or
    /// `WordPiece` (`bert`).
    ///
    /// BOS is added to texts as `add_bos_token` says, else as llama.cpp does for the file's kind of tokenizer.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, EngineError> {
        let Some(model) = metadata.str("tokenizer.ggml.model") else {
            return Err(EngineError::Tokenizer(format!("the GGUF file has no tokenizer (tokenizer.ggml.model); {ADVICE}")));
        };
        let vocabulary = Vocabulary::read(metadata)?;
        let mut tokenizer = match model {
            // Which is no byte-level BPE, whatever it is called.
            "gpt2" if metadata.str("tokenizer.ggml.pre") == Some("sarvam-moe") => merged_sentencepiece(&vocabulary, false)?,
            "gpt2" => byte_level_bpe(&vocabulary)?,
            "llama" | "gemma" => sentencepiece(&vocabulary)?,
            "gemma4" => merged_sentencepiece(&vocabulary, true)?,
            "t5" => unigram(&vocabulary)?,
            "bert" => word_piece(&vocabulary)?,
            other => {
                return Err(EngineError::Tokenizer(format!(
                    "GGUF tokenizer model {other:?} is not supported; gpt2, llama, gemma, gemma4, t5 and bert are; {ADVICE}"
                )));
            }
        };
        tokenizer.add_special_tokens(&vocabulary)?;
        tokenizer.add_end_of_turn_tokens();
        Ok(tokenizer)
    }

    /// Fills in the special tokens that a GGUF file names, where this tokenizer, which came from a tokenizer.json, has none.
    /// Does nothing for a file without a tokenizer.
    pub fn add_gguf_special_tokens(&mut self, metadata: &Metadata) -> Result<(), EngineError> {
        if metadata.get("tokenizer.ggml.tokens").is_none() {
            return Ok(());
        }
        self.add_special_tokens(&Vocabulary::read(metadata)?)
    }

    fn add_special_tokens(&mut self, vocabulary: &Vocabulary<'_>) -> Result<(), EngineError> {
        let text = |name| -> Result<Option<String>, EngineError> {
            Ok(vocabulary.id(name)?.map(|id| vocabulary.tokens[id as usize].clone()))
        };
        let special = &mut self.special_tokens;
        for (token, name) in [
            (&mut special.bos_token, "bos_token_id"),
            (&mut special.eos_token, "eos_token_id"),
            (&mut special.unk_token, "unknown_token_id"),
            (&mut special.pad_token, "padding_token_id"),
        ] {
            if token.is_none() {
                *token = text(name)?;
            }
        }
        for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            self.add_eos_ids(vocabulary.id(name)?);
        }
        Ok(())
    }
}

fn byte_level_bpe(vocabulary: &Vocabulary) -> Result<Tokenizer, EngineError> {
    let name = vocabulary.metadata.str("tokenizer.ggml.pre").unwrap_or("default");
    let pre = pre_tokenizer(name).ok_or_else(|| {
        EngineError::Tokenizer(format!("GGUF pre-tokenizer {name:?} is not supported; known are {}; {ADVICE}", known_names()))
    })?;
    let merges = vocabulary.merges()?;
    let mut vocab = Vocab::default();
    let mut added = Vec::new();
    let rules = PieceRules::byte_level();
    let mut pieces = Pieces::with_capacity(vocabulary.tokens.len());
    for (id, text, kind) in vocabulary.iter() {
        vocab.entry(text.to_owned()).or_insert(id);
        if kind.is_matched_whole() {
            pieces.push(text.as_bytes(), kind.is_special());
            added.push(AddedToken::from(text, kind.is_special()).normalized(false));
        } else if kind == TokenType::Unused {
            pieces.push_absent();
        } else {
            pieces.push(&rules.bytes(text), false);
        }
    }
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges).build().map_err(malformed)?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    if pre.compose {
        inner.with_normalizer(Some(NFC)).map_err(malformed)?;
    }
    inner.with_pre_tokenizer(Some(cut(pre.expressions)?));
    inner.add_tokens(added).map_err(malformed)?;
    around(vocabulary, inner, pieces, pre.add_bos)
}

/// A tokenizer around one of the tokenizers library, which adds BOS unless the file says otherwise, or only if it does.
fn around(
    vocabulary: &Vocabulary,
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
    add_bos: bool,
) -> Result<Tokenizer, EngineError> {
    let bos = if vocabulary.flag("add_bos_token", add_bos) { vocabulary.id("bos_token_id")? } else { None };
    let eos = if vocabulary.flag("add_eos_token", false) { vocabulary.id("eos_token_id")? } else { None };
    Ok(Tokenizer::new(Encoder::Pipeline { inner: Box::new(inner), bos, eos }, pieces, false))
}

/// `WordPiece`, whose words begin with a visible space where a vocab.txt has none, and whose other pieces lack the `##`.
fn word_piece(vocabulary: &Vocabulary) -> Result<Tokenizer, EngineError> {
    let rules = PieceRules::word_piece();
    let mut vocab = Vocab::default();
    let mut added = Vec::new();
    let mut pieces = Pieces::with_capacity(vocabulary.tokens.len());
    let mut has_capitals = false;
    for (id, text, kind) in vocabulary.iter() {
        let token = match text.strip_prefix(VISIBLE_SPACE) {
            _ if kind.is_matched_whole() => text.to_owned(),
            Some(word) => word.to_owned(),
            None => format!("##{text}"),
        };
        if kind.is_matched_whole() {
            pieces.push(text.as_bytes(), kind.is_special());
            added.push(AddedToken::from(text, kind.is_special()).normalized(false));
        } else {
            // Not [unused1], nor what has no small letter, such as the sign of real numbers.
            has_capitals |= !token.starts_with('[') && token.to_lowercase() != token;
            pieces.push(&rules.bytes(&token), false);
        }
        vocab.entry(token).or_insert(id);
    }
    // The names of keys, of which the third is how older files spell it, and what the token is called where none is there.
    let id = |keys: &[&str], text: &str| {
        let named = keys.iter().find_map(|key| vocabulary.id(key).transpose()).transpose()?;
        let id = named.or_else(|| vocab.get(text).copied());
        let token = id.and_then(|id| Some((vocabulary.tokens.get(id as usize)?.clone(), id)));
        token.ok_or_else(|| malformed(format!("it has no token {text}")))
    };
    let first = id(&["cls_token_id", "bos_token_id"], "[CLS]")?;
    let last = id(&["separator_token_id", "seperator_token_id"], "[SEP]")?;
    let (unknown, _) = id(&["unknown_token_id"], "[UNK]")?;
    let model = WordPiece::builder().vocab(vocab).unk_token(unknown).build().map_err(malformed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    // Where no key says whether case counts: a vocabulary without capitals has no use for them, nor for accents.
    let lower_case = vocabulary.flag("normalizer.lowercase", !has_capitals);
    let strip_accents = vocabulary.metadata.bool("tokenizer.ggml.normalizer.strip_accents");
    let parts_chinese = vocabulary.flag("normalizer.handle_chinese_chars", true);
    let normalizer = BertNormalizer::new(true, parts_chinese, strip_accents, lower_case);
    inner.with_normalizer(Some(normalizer)).map_err(malformed)?;
    inner.with_pre_tokenizer(Some(BertPreTokenizer));
    inner.with_post_processor(Some(BertProcessing::new(last, first)));
    inner.add_tokens(added).map_err(malformed)?;
    Ok(Tokenizer::new(Encoder::pipeline(inner), pieces, true))
}

/// Cuts by each expression in turn, then writes bytes as characters.
fn cut(expressions: &[&str]) -> Result<PreTokenizerWrapper, EngineError> {
    let mut steps = Vec::with_capacity(expressions.len() + 1);
    for expression in expressions {
        let split = Split::new(SplitPattern::Regex((*expression).to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| EngineError::Internal(format!("the pre-tokenizer's expression {expression:?} does not compile: {e}")))?;
        steps.push(PreTokenizerWrapper::Split(split));
    }
    steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
    Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
}

fn sentencepiece(vocabulary: &Vocabulary) -> Result<Tokenizer, EngineError> {
    let (num_tokens, scores) = (vocabulary.tokens.len(), vocabulary.scores()?);
    let add_space_prefix = vocabulary.flag("add_space_prefix", true);

    let mut normal: HashMap<Box<str>, u32> = HashMap::new();
    let mut byte_ids = [None; 256];
    let mut pieces = Pieces::with_capacity(num_tokens);
    for (id, text, kind) in vocabulary.iter() {
        match kind {
            TokenType::Unknown | TokenType::Control | TokenType::UserDefined => pieces.push(text.as_bytes(), kind.is_special()),
            TokenType::Byte => {
                let byte =
                    fallback_byte(text).ok_or_else(|| malformed(format!("byte token {id} is {text:?}, not like <0x0A>")))?;
                byte_ids[byte as usize].get_or_insert(id);
                pieces.push(&[byte], false);
            }
            TokenType::Unused => pieces.push_absent(),
            TokenType::Normal => {
                pieces.push(text.replace(VISIBLE_SPACE, " ").as_bytes(), false);
                normal.entry(text.into()).or_insert(id);
            }
        }
        if kind == TokenType::UserDefined {
            normal.entry(text.into()).or_insert(id);
        }
    }
    let unknown = vocabulary.id("unknown_token_id")?;
    let mut byte_tokens: ByteTokens = [0; 256];
    for (byte, (slot, id)) in byte_tokens.iter_mut().zip(byte_ids).enumerate() {
        *slot = id.or(unknown).ok_or_else(|| malformed(format!("it has neither a token <0x{byte:02X}> nor an unknown token")))?;
    }
    let special =
        SpecialMatcher::new(vocabulary.iter().filter(|(_, _, kind)| kind.is_matched_whole()).map(|(id, text, _)| (text, id)));
    let spm = Spm {
        pieces: normal,
        scores: scores.to_vec(),
        byte_tokens,
        special,
        add_space_prefix,
        strip_after_special: vocabulary.metadata.str("general.architecture") == Some("phi3"),
        bos: if vocabulary.flag("add_bos_token", true) { vocabulary.id("bos_token_id")? } else { None },
        eos: if vocabulary.flag("add_eos_token", false) { vocabulary.id("eos_token_id")? } else { None },
    };
    Ok(Tokenizer::new(Encoder::Spm(Box::new(spm)), pieces, add_space_prefix))
}

/// Merges of pairs, in the order that they were learned in, of a text whose spaces are visible; characters without a token become
/// bytes.
fn merged_sentencepiece(vocabulary: &Vocabulary, add_bos: bool) -> Result<Tokenizer, EngineError> {
    if vocabulary.flag("add_space_prefix", false) {
        return Err(malformed("tokenizer.ggml.add_space_prefix is true, which is not implemented beside merges"));
    }
    let mut vocab = Vocab::default();
    let mut added = Vec::new();
    let mut pieces = Pieces::with_capacity(vocabulary.tokens.len());
    for (id, text, kind) in vocabulary.iter() {
        vocab.entry(text.to_owned()).or_insert(id);
        if kind.is_matched_whole() {
            pieces.push(text.as_bytes(), kind.is_special());
            added.push(AddedToken::from(text, kind.is_special()).normalized(false));
            continue;
        }
        match (kind, fallback_byte(text)) {
            (TokenType::Unused, _) => pieces.push_absent(),
            (TokenType::Byte, None) => return Err(malformed(format!("byte token {id} is {text:?}, not like <0x0A>"))),
            (TokenType::Byte, Some(byte)) => pieces.push(&[byte], false),
            _ => pieces.push(text.replace(VISIBLE_SPACE, " ").as_bytes(), false),
        }
    }
    let unknown = vocabulary.id("unknown_token_id")?.map(|id| vocabulary.tokens[id as usize].clone());
    let mut bpe = BPE::builder().vocab_and_merges(vocab, vocabulary.merges()?).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = unknown {
        bpe = bpe.unk_token(unknown);
    }
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(malformed)?);
    let spaces = Replace::new(" ", VISIBLE_SPACE).map_err(malformed)?;
    inner.with_normalizer(Some(spaces)).map_err(malformed)?;
    inner.add_tokens(added).map_err(malformed)?;
    around(vocabulary, inner, pieces, add_bos)
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::{cut, pre_tokenizer};

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut cuts = PreTokenizedString::from(text);
        cut(pre_tokenizer(name).unwrap().expressions).unwrap().pre_tokenize(&mut cuts).unwrap();
        let splits = cuts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    /// As llama.cpp cuts them.
    #[test]
    fn pre_tokenizers_cut_where_their_models_do() {
        for (name, text, wanted) in [
            ("afmoe", "a 1234567 12", &["a", " ", "1", "234", "567", " ", "12"][..]),
            ("superbpe", "a 1234567b", &["a ", "1", "234", "567", "b"]),
            ("jais-2", "a     b", &["a", "    ", " b"]),
            ("exaone-moe", "one two 3", &["one two", " ", "3"]),
            ("kimi-k2", "汉字abc", &["汉字", "abc"]),
            ("viking", "ab12, c", &["ab", "1", "2", ",", " c"]),
            ("youtu", "한글abc 12", &["한글", "abc", " ", "1", "2"]),
            ("laguna", "a\n\nb", &["a", "\n\n", "b"]),
            ("minicpm5", "12345 it's", &["123", "45", " it", "'s"]),
            ("chameleon", "a    b!", &["a", "    ", "b", "!"]),
            ("tiny_aya", "1234567", &["1", "234", "567"]),
            ("spark2_5", "a!\n\nb", &["a", "!", "\n", "\n", "b"]),
            ("ufakzeka", "Ankara'da", &["Ankara", "'da"]),
            ("k2-horizon", "a\u{200d}b 1234", &["a\u{200d}b", " ", "123", "4"]),
        ] {
            assert_eq!(words(name, text), wanted, "{name}");
        }
    }
}
