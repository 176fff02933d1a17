//! Prompts of models that were trained to write what goes between two texts (fill in the middle, arXiv:2207.14255): both texts,
//! with tokens that say which is which.

use super::Tokenizer;
use crate::EngineError;

/// Tokens of one family of models.
struct Markers {
    /// Before the text that goes before the gap.
    before: &'static str,
    /// Before the text that goes behind it.
    after: &'static str,
    /// Where the gap is written; none: right behind the text before it.
    middle: Option<&'static str>,
    /// Whether the text behind the gap comes first.
    after_first: bool,
}

const fn markers(before: &'static str, after: &'static str, middle: &'static str) -> Markers {
    Markers { before, after, middle: Some(middle), after_first: false }
}

/// As the models' cards have them: `Qwen2.5-Coder` and `CodeGemma`; `StarCoder` and Granite; `DeepSeek-Coder`; Code Llama;
/// `Seed-Coder`; Codestral.
const MARKERS: [Markers; 6] = [
    markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    markers("▁<PRE>", "▁<SUF>", "▁<MID>"),
    Markers { after_first: true, ..markers("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>") },
    Markers { before: "[PREFIX]", after: "[SUFFIX]", middle: None, after_first: true },
];

/// What else ends a gap: where the next file or repository begins, and Code Llama's end of the middle.
const ENDS: [&str; 9] = [
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "<repo_name>",
    "<reponame>",
    "▁<EOT>",
];

/// Text before a text that is not at the beginning of anything: no space is put before what follows it.
const IN_THE_MIDDLE: &str = "\u{263a}";

/// Those of a vocabulary.
struct Gap {
    before: u32,
    after: u32,
    middle: Option<u32>,
    after_first: bool,
}

impl Tokenizer {
    /// The prompt for what goes between two texts. What looks like a special token in them is text.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] where the vocabulary has no tokens for it.
    pub(crate) fn encode_gap(&self, before: &str, after: &str) -> Result<Vec<u32>, EngineError> {
        let gap = self.gap()?;
        let mut ids = self.begin_of_text()?;
        let before = [vec![gap.before], self.encode_plain(before)?].concat();
        let after = [vec![gap.after], self.encode_continuing(after)?].concat();
        ids.extend(if gap.after_first { [after, before].concat() } else { [before, after].concat() });
        ids.extend(gap.middle);
        Ok(ids)
    }

    /// What is put before a text; what is put behind one would end it.
    fn begin_of_text(&self) -> Result<Vec<u32>, EngineError> {
        let (mut whole, plain) = (self.encode("a", true)?, self.encode_plain("a")?);
        whole.truncate(whole.windows(plain.len().max(1)).position(|ids| ids == plain).unwrap_or(0));
        Ok(whole)
    }

    /// What ends it, besides what ends a text.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn gap_ends(&self) -> Result<Vec<u32>, EngineError> {
        let Gap { before, after, middle, .. } = self.gap()?;
        let ends = ENDS.iter().filter_map(|text| self.token_to_id(text));
        Ok(ends.chain([before, after]).chain(middle).collect())
    }

    fn gap(&self) -> Result<Gap, EngineError> {
        let of = |markers: &Markers| {
            let middle = match markers.middle {
                Some(text) => Some(self.token_to_id(text)?),
                None => None,
            };
            let (before, after) = (self.token_to_id(markers.before)?, self.token_to_id(markers.after)?);
            Some(Gap { before, after, middle, after_first: markers.after_first })
        };
        MARKERS.iter().find_map(of).ok_or_else(|| {
            EngineError::InvalidArgument(
                "this model's vocabulary has no tokens for what goes between two texts, such as <|fim_prefix|>: leave `suffix` out, \
                 or use a model that was trained to fill in the middle"
                    .into(),
            )
        })
    }

    /// Token ids of a text that goes on from another.
    fn encode_continuing(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        if !self.strips_leading_space() {
            return self.encode_plain(text);
        }
        let begin = self.encode_plain(IN_THE_MIDDLE)?;
        let ids = self.encode_plain(&format!("{IN_THE_MIDDLE}{text}"))?;
        // A vocabulary whose tokens join the two has no better answer than that with a space.
        ids.strip_prefix(&begin[..]).map_or_else(|| self.encode_plain(text), |ids| Ok(ids.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A vocabulary of characters, and of such special tokens.
    fn tokenizer(specials: &[&str]) -> Tokenizer {
        with_template(specials, &json!(null))
    }

    fn with_template(specials: &[&str], post_processor: &serde_json::Value) -> Tokenizer {
        let letters = ["?", "a", "b", "c", "<", ">"];
        let vocab: serde_json::Map<_, _> = letters.iter().enumerate().map(|(id, text)| ((*text).to_owned(), json!(id))).collect();
        let added: Vec<_> = specials
            .iter()
            .enumerate()
            .map(|(i, text)| {
                json!({"id": letters.len() + i, "content": text, "special": true, "single_word": false, "lstrip": false,
                       "rstrip": false, "normalized": false})
            })
            .collect();
        let json = json!({"version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": null,
                          "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
                          "post_processor": post_processor, "truncation": null, "padding": null,
                          "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "?"}});
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        Tokenizer::from_file(&path).unwrap()
    }

    #[test]
    fn texts_have_the_order_of_their_family() {
        let gap = |specials: &[&str]| tokenizer(specials).encode_gap("ab", "c").unwrap();
        assert_eq!(gap(&["<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>"]), [7, 1, 2, 8, 3, 6]);
        assert_eq!(gap(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]), [6, 1, 2, 8, 3, 7]);
        assert_eq!(gap(&["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]), [7, 1, 2, 6, 3, 8]);
        assert_eq!(gap(&["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"]), [6, 3, 7, 1, 2, 8]);
        assert_eq!(gap(&["[SUFFIX]", "[PREFIX]"]), [6, 3, 7, 1, 2]);
    }

    #[test]
    fn what_is_put_around_texts_is_put_before_a_gap_alone() {
        let json = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {
                              "<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [7], "tokens": ["</s>"]}},
                          "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                                     {"SpecialToken": {"id": "</s>", "type_id": 0}}]});
        let tokenizer = with_template(&["<s>", "</s>", "[SUFFIX]", "[PREFIX]"], &json);
        assert_eq!(tokenizer.encode("a", true).unwrap(), [6, 1, 7]);
        assert_eq!(tokenizer.encode_gap("b", "c").unwrap(), [6, 8, 3, 9, 2]);
    }

    #[test]
    fn a_gap_ends_where_a_file_ends() {
        let specials = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"];
        let mut ends = tokenizer(&specials).gap_ends().unwrap();
        ends.sort_unstable();
        assert_eq!(ends, [6, 7, 8, 9]);
    }

    #[test]
    fn what_looks_like_a_token_is_text() {
        let ids = tokenizer(&["<a>", "[SUFFIX]", "[PREFIX]"]).encode_gap("<a>", "").unwrap();
        assert_eq!(ids, [7, 8, 4, 1, 5]);
    }

    #[test]
    fn a_vocabulary_without_such_tokens_is_refused() {
        for specials in [&[][..], &["<|fim_prefix|>", "<|fim_suffix|>"]] {
            let error = tokenizer(specials).encode_gap("a", "b").unwrap_err().to_string();
            assert!(error.contains("<|fim_prefix|>") && error.contains("suffix"), "{error}");
        }
    }
}
