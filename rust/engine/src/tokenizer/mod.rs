//! Tokenizers: from tokenizer.json, and from GGUF metadata.

mod charsmap;
mod fill_in_middle;
mod gguf;
mod incremental;
pub(crate) mod model_file;
mod pair;
mod pieces;
mod pre_tokenizer;
mod spm;
pub(crate) mod tekken;
mod unigram;
mod vocab_txt;

use std::{ops::Range, path::Path, sync::OnceLock};

pub use incremental::IncrementalDecoder;
pub(crate) use pre_tokenizer::pre_tokenizer_name;

use crate::{
    EngineError,
    error::caught_quietly,
    generation_config::GenerationConfig,
    json::{read_bounded, read_json},
    weights::Metadata,
};
pub(crate) use pair::FirstOfPair;
use pair::PairRules;
use pieces::Pieces;

/// A tokenizer.json is read up to this size; those of large multilingual vocabularies have some 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// Tokens that end a turn in one family of models or another; generation stops at those that a vocabulary has as special tokens.
const END_OF_TURN: [&str; 15] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    // What a called function gives is not the model's to say.
    "<|tool_response>",
    "<start_function_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",
];

/// The texts of special tokens that chat templates refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of a sequence.
    pub bos_token: Option<String>,
    /// End of a sequence.
    pub eos_token: Option<String>,
    /// Stands for what has no token.
    pub unk_token: Option<String>,
    /// Fills batches up.
    pub pad_token: Option<String>,
}

/// Text to token ids and back. Shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    pieces: Pieces,
    strip_leading_space: bool,
    pairs: PairRules,
    special_tokens: SpecialTokens,
    eos_ids: Vec<u32>,
    /// Texts of the special tokens; made when first asked for.
    specials: OnceLock<spm::SpecialMatcher>,
    /// The pipeline with special tokens as plain text; made when a text first needs it.
    plain: OnceLock<Box<tokenizers::Tokenizer>>,
}

#[derive(Debug)]
enum Encoder {
    /// A tokenizer.json, or byte-level BPE from GGUF metadata; the latter's BOS and EOS stand beside it.
    Pipeline { inner: Box<tokenizers::Tokenizer>, bos: Option<u32>, eos: Option<u32> },
    /// `SentencePiece` from GGUF metadata.
    Spm(Box<spm::Spm>),
}

impl Encoder {
    /// One with nothing beside it.
    fn pipeline(inner: tokenizers::Tokenizer) -> Self {
        Self::Pipeline { inner: Box::new(inner), bos: None, eos: None }
    }
}

/// Bytes of a hash table: a power of two of places, of which seven in eight may be taken, and a byte of each beside the entry.
fn table_bytes(num_entries: usize, entry_bytes: usize) -> usize {
    (num_entries * 8 / 7 + 1).next_power_of_two() * (entry_bytes + 1)
}

/// What the allocator takes for the text of a token, which is seldom longer than 24 bytes.
const TEXT_BYTES: usize = 32;

/// Token ids of a text. Some normalizers make the library panic at some texts.
fn ids_of(pipeline: &tokenizers::Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EngineError> {
    caught_quietly(|| pipeline.encode_fast(text, add_special_tokens).map_err(|e| e.to_string()))
        .and_then(|result| result)
        .map(|encoding| encoding.get_ids().to_vec())
        .map_err(|e| EngineError::Tokenizer(format!("the text of {} bytes cannot be tokenized: {e}", text.len())))
}

impl Tokenizer {
    /// About how many bytes of memory it takes, from the number of tokens: what `tokenizers` and [`spm::Spm`] keep for each.
    pub(crate) fn estimated_bytes(&self) -> u64 {
        let num_tokens = self.pieces.len();
        let encoder = match &self.encoder {
            // Texts to ids, ids to texts, and about as many merges, pairs of ids to pairs.
            Encoder::Pipeline { .. } => 2 * (table_bytes(num_tokens, 32) + num_tokens * TEXT_BYTES) + table_bytes(num_tokens, 16),
            Encoder::Spm(_) => table_bytes(num_tokens, 24) + num_tokens * (TEXT_BYTES + size_of::<f32>()),
        };
        (encoder + self.pieces.memory_bytes()) as u64
    }

    /// Reads a tokenizer.json (the format of Hugging Face's `tokenizers`). What ends a turn is then known by the usual names
    /// only.
    pub fn from_file(path: &Path) -> Result<Self, EngineError> {
        let file = path.display().to_string();
        let bytes = read_bounded(path, MAX_TOKENIZER_BYTES).map_err(|e| {
            EngineError::Tokenizer(format!(
                "tokenizer {file} cannot be read: {e}; a tokenizer.json in the model's folder works, or its path as tokenizer_json"
            ))
        })?;
        charsmap::check(&bytes).map_err(|why| EngineError::Tokenizer(format!("{file} is not a tokenizer.json: {why}")))?;
        // The crate panics on some files, such as one whose decoder has a part that is no object.
        let mut inner = caught_quietly(|| tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| e.to_string()))
            .and_then(|result| result)
            .map_err(|e| EngineError::Tokenizer(format!("{file} is not a tokenizer.json: {e}")))?;
        // Prompts are neither cut nor padded behind the caller's back.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| EngineError::Tokenizer(format!("{file}: its truncation cannot be turned off: {e}")))?;
        let (pieces, strip_leading_space) = pieces::pieces_of(&inner, &file)?;
        let mut tokenizer = Self::new(Encoder::pipeline(inner), pieces, strip_leading_space);
        tokenizer.add_end_of_turn_tokens();
        tokenizer.try_out().map_err(|e| EngineError::Tokenizer(format!("{file} does not tokenize: {e}")))?;
        Ok(tokenizer)
    }

    /// One that knows nothing of what files say beside the vocabulary.
    fn new(encoder: Encoder, pieces: Pieces, strip_leading_space: bool) -> Self {
        Self {
            encoder,
            pieces,
            strip_leading_space,
            pairs: PairRules::default(),
            special_tokens: SpecialTokens::default(),
            eos_ids: Vec::new(),
            specials: OnceLock::new(),
            plain: OnceLock::new(),
        }
    }

    /// Tokenizes a text or two: parts that contradict each other, such as a template with a token that is nowhere, show only
    /// then.
    fn try_out(&self) -> Result<(), EngineError> {
        ["", "a", " The 2nd text,\n\u{e9}\u{4e2d}\u{1f600}e\u{301}\u{2581}\u{3000}\u{fb01}"]
            .into_iter()
            .try_for_each(|text| [true, false].into_iter().try_for_each(|special| self.encode(text, special).map(drop)))
    }

    /// Reads a model folder in Hugging Face layout: tokenizer.json (or the one given, or tokenizer.model, tekken.json or
    /// vocab.txt), and, where they are there, `tokenizer_config.json` for the special tokens, `generation_config.json` and
    /// config.json for the ids that end a text.
    pub fn from_hf_dir(dir: &Path, tokenizer_json: Option<&Path>) -> Result<Self, EngineError> {
        let own = dir.join("tokenizer.json");
        let is_there = |name: &str| tokenizer_json.is_none() && !own.is_file() && dir.join(name).is_file();
        let mut tokenizer = if is_there("tokenizer.model") {
            Self::from_gguf(&Metadata::new(model_file::read_dir(dir)?))?
        } else if is_there(tekken::FILE) {
            Self::from_gguf(&Metadata::new(tekken::read_dir(dir)?))?
        } else if is_there(vocab_txt::FILE) {
            Self::from_gguf(&Metadata::new(vocab_txt::read_dir(dir)?))?
        } else {
            Self::from_file(tokenizer_json.unwrap_or(&own))?
        };
        if let Some(config) = read_json(&dir.join("tokenizer_config.json")).map_err(EngineError::Tokenizer)? {
            tokenizer.pairs = PairRules::of(&config);
            // Either the text itself or an object around it.
            let text = |key: &str| {
                let value = &config[key];
                value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
            };
            tokenizer.special_tokens = SpecialTokens {
                bos_token: text("bos_token"),
                eos_token: text("eos_token"),
                unk_token: text("unk_token"),
                pad_token: text("pad_token"),
            };
            if let Some(id) = tokenizer.special_tokens.eos_token.as_deref().and_then(|t| tokenizer.token_to_id(t)) {
                tokenizer.add_eos_ids([id]);
            }
        }
        tokenizer.add_eos_ids(GenerationConfig::from_dir(dir)?.eos_token_ids);
        if let Some(config) = read_json(&dir.join("config.json")).map_err(EngineError::Load)? {
            for value in [&config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
                tokenizer.add_eos_ids(crate::generation_config::token_ids(value).unwrap_or_default());
            }
        }
        Ok(tokenizer)
    }

    /// Token ids of a text in which special tokens are recognised; with `add_special_tokens` BOS and the like are added as the
    /// tokenizer prescribes.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EngineError> {
        match &self.encoder {
            Encoder::Spm(spm) => Ok(spm.encode(text, add_special_tokens)),
            Encoder::Pipeline { inner, bos, eos } => {
                let mut ids = ids_of(inner, text, add_special_tokens)?;
                if add_special_tokens {
                    if let Some(bos) = bos {
                        ids.insert(0, *bos);
                    }
                    ids.extend(eos);
                }
                Ok(ids)
            }
        }
    }

    /// Token ids of a text in which special tokens are plain text; nothing is added.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        match &self.encoder {
            Encoder::Spm(spm) => {
                let mut ids = Vec::new();
                spm.encode_fragment(text, &mut ids);
                Ok(ids)
            }
            Encoder::Pipeline { inner, .. } => {
                let plain = self.plain.get_or_init(|| {
                    let mut plain = inner.clone();
                    plain.set_encode_special_tokens(true);
                    plain
                });
                ids_of(plain, text, false)
            }
        }
    }

    /// The first special token in a text, by its spelling: where it stands, and its id.
    pub fn find_special(&self, text: &str) -> Option<(Range<usize>, u32)> {
        let specials = self.specials.get_or_init(|| {
            let ids = (0..self.vocab_size() as u32).filter(|id| self.is_special(*id));
            spm::SpecialMatcher::new(ids.filter_map(|id| Some((std::str::from_utf8(self.token_bytes(id)).ok()?, id))))
        });
        specials.find(text, 0)
    }

    /// The text with `mark` behind the first character of every special token in it; `None` if there is none.
    pub fn with_marked_specials(&self, text: &str, mark: char) -> Option<String> {
        let mut marked = String::new();
        let mut rest = text;
        while let Some((range, _)) = self.find_special(rest) {
            let behind_first = range.start + rest[range.start..].chars().next().map_or(0, char::len_utf8);
            marked.push_str(&rest[..behind_first]);
            marked.push(mark);
            rest = &rest[behind_first..];
        }
        (!marked.is_empty()).then(|| marked + rest)
    }

    /// Text of token ids; bytes that are not UTF-8 become U+FFFD, and ids without a token add nothing.
    pub fn decode(&self, token_ids: &[u32], skip_special_tokens: bool) -> String {
        let mut text = String::new();
        let mut decoder = IncrementalDecoder::new(skip_special_tokens);
        for &id in token_ids {
            decoder.push(self, id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    /// The bytes that a token adds to a text, in the middle of which it stands; empty for an id without a token.
    pub fn token_bytes(&self, token_id: u32) -> &[u8] {
        self.pieces.get(token_id).unwrap_or_default()
    }

    /// A token's bytes as text, with U+FFFD for those that are not UTF-8.
    pub fn token_text(&self, token_id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(token_id)).into_owned()
    }

    /// The id of the token with this text in the vocabulary's own spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.encoder {
            Encoder::Pipeline { inner, .. } => inner.token_to_id(token),
            Encoder::Spm(spm) => spm.token_to_id(token),
        }
    }

    /// Whether the token is control, not text: BOS, `<|im_end|>`, ...
    pub fn is_special(&self, token_id: u32) -> bool {
        self.pieces.is_special(token_id)
    }

    /// One more than the largest id; the model's output may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Ids that end a text, ascending.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Texts for chat templates.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Adds ids that end a text.
    pub fn add_eos_ids(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.eos_ids.extend(ids);
        self.eos_ids.sort_unstable();
        self.eos_ids.dedup();
    }

    pub(crate) fn strips_leading_space(&self) -> bool {
        self.strip_leading_space
    }

    fn add_end_of_turn_tokens(&mut self) {
        let id_of = |text: &str| self.token_to_id(text).filter(|id| self.is_special(*id));
        // In harmony's format <|end|> ends a message, not the turn.
        let harmony = id_of("<|return|>").is_some() && id_of("<|call|>").is_some();
        let ids: Vec<u32> = END_OF_TURN.iter().filter(|t| !(harmony && **t == "<|end|>")).filter_map(|t| id_of(t)).collect();
        self.add_eos_ids(ids);
    }
}
