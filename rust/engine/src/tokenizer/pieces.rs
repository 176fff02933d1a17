//! The bytes of every token, so that decoding is concatenation.

use std::collections::HashMap;

use serde_json::Value;

use crate::EngineError;

/// `SentencePiece`'s visible space, U+2581.
pub(super) const VISIBLE_SPACE: char = '\u{2581}';

const PRESENT: u8 = 1;
const SPECIAL: u8 = 2;

/// Bytes and kind of each token id, in one allocation.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Start of each token's bytes, and the end of the last: `[num_tokens + 1]`.
    starts: Vec<usize>,
    flags: Vec<u8>,
}

impl Pieces {
    /// Bytes of memory.
    pub fn memory_bytes(&self) -> usize {
        self.bytes.capacity() + self.starts.capacity() * size_of::<usize>() + self.flags.capacity()
    }

    pub fn with_capacity(num_tokens: usize) -> Self {
        let mut starts = Vec::with_capacity(num_tokens + 1);
        starts.push(0);
        Self { bytes: Vec::with_capacity(num_tokens * 8), starts, flags: Vec::with_capacity(num_tokens) }
    }

    /// Appends the next id.
    pub fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.starts.push(self.bytes.len());
        self.flags.push(PRESENT | if special { SPECIAL } else { 0 });
    }

    /// Appends an id that no token has.
    pub fn push_absent(&mut self) {
        self.starts.push(self.bytes.len());
        self.flags.push(0);
    }

    pub fn len(&self) -> usize {
        self.flags.len()
    }

    /// `None` for an id without a token.
    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let i = id as usize;
        (self.flags.get(i)? & PRESENT != 0).then(|| &self.bytes[self.starts[i]..self.starts[i + 1]])
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.flags.get(id as usize).is_some_and(|f| f & SPECIAL != 0)
    }
}

/// The 256 characters that byte-level BPE writes bytes as (GPT-2's `encoder.py`): printable Latin-1 stays, the rest goes to
/// U+0100 and up.
pub(super) fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|b| {
        let byte = b as u8;
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            char::from(byte)
        } else {
            let c = char::from_u32(next).expect("0x100 to 0x143 are characters");
            next += 1;
            c
        }
    })
}

/// What a `WordPiece` decoder makes of a token with a space before it, where it cleans up.
const CLEANUP: [(&str, &str); 9] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// The byte of a byte-fallback token such as `<0x0A>`.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()) { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// How token texts become bytes: what the decoder of a tokenizer.json says.
#[derive(Debug, Default)]
pub(super) struct PieceRules {
    byte_level: Option<HashMap<char, u8>>,
    byte_fallback: bool,
    replacements: Vec<(String, String)>,
    /// Words are pieces without this at their beginning, with a space before each (`WordPiece`).
    continuation: Option<String>,
    /// One space at the very start of a text is not part of it.
    pub strip_leading_space: bool,
}

impl PieceRules {
    pub fn byte_level() -> Self {
        let map = byte_chars().into_iter().enumerate().map(|(b, c)| (c, b as u8)).collect();
        Self { byte_level: Some(map), ..Self::default() }
    }

    /// Of `WordPiece`, whose tokens within words begin with `##`.
    pub fn word_piece() -> Self {
        let replacements = CLEANUP.map(|(text, clean)| (text.to_owned(), clean.to_owned())).into();
        Self { continuation: Some("##".to_owned()), replacements, strip_leading_space: true, ..Self::default() }
    }

    /// From the `decoder` of a tokenizer.json. The error is the part that is not supported.
    pub fn from_decoder(decoder: &Value) -> Result<Self, String> {
        let mut rules = Self::default();
        let mut fused = false;
        rules.add(decoder, &mut fused)?;
        Ok(rules)
    }

    fn add(&mut self, decoder: &Value, fused: &mut bool) -> Result<(), String> {
        let kind = decoder["type"].as_str().unwrap_or("null");
        match kind {
            "Sequence" => {
                for part in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(part, fused)?;
                }
            }
            "ByteLevel" => self.byte_level = Self::byte_level().byte_level,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Metaspace" => {
                let replacement = decoder["replacement"].as_str().unwrap_or("\u{2581}");
                self.replacements.push((replacement.to_owned(), " ".to_owned()));
                self.strip_leading_space |= decoder["prepend_scheme"].as_str() != Some("never");
            }
            "WordPiece" => {
                self.continuation = Some(decoder["prefix"].as_str().unwrap_or("##").to_owned());
                if decoder["cleanup"].as_bool().unwrap_or(true) {
                    self.replacements.extend(CLEANUP.map(|(text, clean)| (text.to_owned(), clean.to_owned())));
                }
                self.strip_leading_space = true;
            }
            "Replace" => match (decoder["pattern"]["String"].as_str(), decoder["content"].as_str()) {
                (Some(pattern), Some(content)) if !pattern.is_empty() => {
                    self.replacements.push((pattern.to_owned(), content.to_owned()));
                }
                _ => return Err(format!("Replace of {}", decoder["pattern"])),
            },
            "Strip" if *fused && decoder["content"] == " " && decoder["start"] == 1 && decoder["stop"] == 0 => {
                self.strip_leading_space = true;
            }
            _ => return Err(if kind == "Strip" { decoder.to_string() } else { kind.to_owned() }),
        }
        Ok(())
    }

    /// The bytes of a token's text.
    pub fn bytes(&self, token: &str) -> Vec<u8> {
        if let Some(map) = &self.byte_level {
            // Added tokens are written as they are: characters outside the alphabet give them away.
            return token.chars().map(|c| map.get(&c).copied()).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into());
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(token)
        {
            return vec![byte];
        }
        let mut text = match &self.continuation {
            None => token.to_owned(),
            Some(prefix) => token.strip_prefix(prefix.as_str()).map_or_else(|| format!(" {token}"), str::to_owned),
        };
        for (pattern, content) in &self.replacements {
            if text.contains(pattern.as_str()) {
                text = text.replace(pattern.as_str(), content);
            }
        }
        text.into_bytes()
    }
}

/// The pieces of a tokenizer.json.
pub(super) fn pieces_of(inner: &tokenizers::Tokenizer, file: &str) -> Result<(Pieces, bool), EngineError> {
    // Ids beyond this are typing errors or attacks; the table is indexed by id.
    const MAX_ID: usize = 1 << 24;
    let decoder = serde_json::to_value(inner.get_decoder())
        .map_err(|e| EngineError::Tokenizer(format!("{file}: its decoder cannot be read: {e}")))?;
    let rules = PieceRules::from_decoder(&decoder).map_err(|part| {
        EngineError::Tokenizer(format!(
            "{file}: decoder {part} is not supported; ByteLevel, Metaspace, WordPiece, and sequences of Replace, ByteFallback, Fuse and a leading Strip are"
        ))
    })?;
    let mut texts: Vec<Option<(String, bool)>> = Vec::new();
    let mut put = |id: u32, text: String, special: bool| {
        let id = id as usize;
        if id >= MAX_ID {
            return Err(EngineError::Tokenizer(format!("{file}: token {text:?} has the id {id}; ids are below {MAX_ID}")));
        }
        if id >= texts.len() {
            texts.resize(id + 1, None);
        }
        texts[id] = Some((text, special));
        Ok(())
    };
    for (text, id) in inner.get_vocab(false) {
        put(id, text, false)?;
    }
    for (&id, token) in inner.get_added_vocabulary().get_added_tokens_decoder() {
        put(id, token.content.clone(), token.special)?;
    }
    let mut pieces = Pieces::with_capacity(texts.len());
    for text in texts {
        match text {
            Some((text, special)) => pieces.push(&rules.bytes(&text), special),
            None => pieces.push_absent(),
        }
    }
    Ok((pieces, rules.strip_leading_space))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let chars = byte_chars();
        assert_eq!(chars.iter().collect::<std::collections::HashSet<_>>().len(), 256);
        assert_eq!((chars[b'A' as usize], chars[b' ' as usize], chars[b'\n' as usize], chars[0xAD]), ('A', 'Ġ', 'Ċ', 'Ń'));
    }

    #[test]
    fn fallback_bytes_are_two_hexadecimal_digits() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        for text in ["<0xA>", "<0x0A", "<0x+A>", "<0x00A>", "0x0A", "<0xé>"] {
            assert_eq!(fallback_byte(text), None, "{text}");
        }
    }

    #[test]
    fn unsupported_decoders_are_named() {
        let error = PieceRules::from_decoder(&serde_json::json!({"type": "CTC"})).unwrap_err();
        assert_eq!(error, "CTC");
        let strip = serde_json::json!({"type": "Strip", "content": " ", "start": 0, "stop": 3});
        assert!(PieceRules::from_decoder(&strip).unwrap_err().contains("Strip"));
    }
}
