//! `SentencePiece` BPE as GGUF files describe it: pieces with scores, byte fallback.

use std::{
    collections::{BinaryHeap, HashMap},
    ops::Range,
};

use super::pieces::VISIBLE_SPACE;

/// Texts that are one token wherever they stand; the leftmost, then the longest wins.
#[derive(Debug)]
pub(super) struct SpecialMatcher {
    ids: HashMap<Box<str>, u32>,
    /// By first byte, the lengths of such texts, longest first.
    lengths: Vec<Vec<usize>>,
}

impl SpecialMatcher {
    pub fn new<'a>(tokens: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut ids = HashMap::new();
        let mut lengths = vec![Vec::new(); 256];
        for (text, id) in tokens.filter(|(text, _)| !text.is_empty()) {
            ids.entry(text.into()).or_insert(id);
            lengths[text.as_bytes()[0] as usize].push(text.len());
        }
        for list in &mut lengths {
            list.sort_unstable_by(|a, b| b.cmp(a));
            list.dedup();
        }
        Self { ids, lengths }
    }

    /// The id of a text that is matched whole.
    pub fn get(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The first match at or after `from`.
    pub fn find(&self, text: &str, from: usize) -> Option<(Range<usize>, u32)> {
        (from..text.len()).find_map(|start| {
            self.lengths[text.as_bytes()[start] as usize].iter().find_map(|len| {
                let id = self.ids.get(text.get(start..start + len)?)?;
                Some((start..start + len, *id))
            })
        })
    }
}

/// What a byte without a token of its own becomes.
pub(super) type ByteTokens = [u32; 256];

/// Encoder of `SentencePiece` models. Pieces are merged in the order of their scores, as llama.cpp and `SentencePiece`'s BPE do.
#[derive(Debug)]
pub(super) struct Spm {
    /// Normal pieces, with visible spaces.
    pub pieces: HashMap<Box<str>, u32>,
    /// By token id.
    pub scores: Vec<f32>,
    /// By byte.
    pub byte_tokens: ByteTokens,
    /// Control and user-defined tokens.
    pub special: SpecialMatcher,
    /// A space goes before the text, and before text that follows a special token.
    pub add_space_prefix: bool,
    /// White space after a control token belongs to it (phi3).
    pub strip_after_special: bool,
    /// Put before every text that is encoded with special tokens.
    pub bos: Option<u32>,
    /// Put after it.
    pub eos: Option<u32>,
}

struct Symbol {
    range: Range<usize>,
    prev: usize,
    next: usize,
}

/// No neighbour.
const NONE: usize = usize::MAX;

struct Merge {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the merged text: tells entries that are out of date.
    len: usize,
}

impl Ord for Merge {
    /// The best score is greatest; of equal ones the leftmost.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Merge {}

impl Spm {
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.special.get(token).or_else(|| self.pieces.get(token).copied())
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_special_tokens {
            ids.extend(self.bos);
        }
        let mut at = 0;
        while at < text.len() {
            let (plain, special) = match self.special.find(text, at) {
                Some((range, id)) => (at..range.start, Some((range.end, id))),
                None => (at..text.len(), None),
            };
            // A fragment always follows a special token or the start.
            self.encode_fragment(&text[plain.clone()], &mut ids);
            at = plain.end;
            if let Some((end, id)) = special {
                ids.push(id);
                at = end;
                if self.strip_after_special {
                    at += text[at..].len() - text[at..].trim_start().len();
                }
            }
        }
        if add_special_tokens {
            ids.extend(self.eos);
        }
        ids
    }

    /// Appends the ids of a text in which no token is matched whole.
    pub fn encode_fragment(&self, fragment: &str, ids: &mut Vec<u32>) {
        if fragment.is_empty() {
            return;
        }
        let mut text = String::with_capacity(fragment.len() * 2 + 3);
        if self.add_space_prefix {
            text.push(VISIBLE_SPACE);
        }
        text.extend(fragment.chars().map(|c| if c == ' ' { VISIBLE_SPACE } else { c }));

        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol { range: start..start + c.len_utf8(), prev: i.wrapping_sub(1), next: i + 1 })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let mut merges = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.consider(&text, &symbols, (right - 1, right), &mut merges);
        }
        while let Some(Merge { left, right, len, .. }) = merges.pop() {
            // Either side may have been merged since.
            if symbols[left].range.is_empty() || symbols[right].range.is_empty() {
                continue;
            }
            let merged = symbols[left].range.start..symbols[right].range.end;
            if merged.len() != len {
                continue;
            }
            symbols[left].range = merged;
            symbols[right].range = 0..0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if next != NONE {
                symbols[next].prev = left;
                self.consider(&text, &symbols, (left, next), &mut merges);
            }
            let prev = symbols[left].prev;
            if prev != NONE {
                self.consider(&text, &symbols, (prev, left), &mut merges);
            }
        }
        for symbol in symbols.iter().filter(|s| !s.range.is_empty()) {
            let piece = &text[symbol.range.clone()];
            match self.pieces.get(piece) {
                Some(&id) => ids.push(id),
                None => ids.extend(piece.bytes().map(|b| self.byte_tokens[b as usize])),
            }
        }
    }

    fn consider(&self, text: &str, symbols: &[Symbol], (left, right): (usize, usize), merges: &mut BinaryHeap<Merge>) {
        let range = symbols[left].range.start..symbols[right].range.end;
        let len = range.len();
        if let Some(&id) = self.pieces.get(&text[range]) {
            let score = self.scores.get(id as usize).copied().unwrap_or(0.0);
            merges.push(Merge { score, left, right, len });
        }
    }
}
