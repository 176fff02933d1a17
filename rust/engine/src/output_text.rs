//! Text of a continuation as it is given out: whole characters, and nothing that may still turn out to be a stop string.

use crate::{EngineError, IncrementalDecoder, Tokenizer};

/// Finds stop strings in a text that comes in parts.
///
/// The stop string that is complete first ends the text (of those that end at the same place, the one that began first). What has
/// been given out never has to be taken back: the end of the text that may be the beginning of a stop string is held.
#[derive(Clone, Debug)]
pub struct StopChecker {
    stops: Vec<StopString>,
    /// Text that has not been given out.
    held: String,
    found: Option<usize>,
}

/// A stop string with the automaton of Knuth, Morris and Pratt.
#[derive(Clone, Debug)]
struct StopString {
    text: String,
    /// For each prefix by its length, the length of its longest proper prefix that is also its suffix.
    borders: Vec<usize>,
    /// Bytes of the stop string that the text ends with.
    matched: usize,
}

impl StopString {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len() + 1];
        let mut border = 0;
        for i in 1..bytes.len() {
            while border > 0 && bytes[border] != bytes[i] {
                border = borders[border];
            }
            border += usize::from(bytes[border] == bytes[i]);
            borders[i + 1] = border;
        }
        Self { text: text.to_owned(), borders, matched: 0 }
    }

    /// Takes the next byte of the text; true when the stop string is complete.
    fn advance(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

impl StopChecker {
    /// For these stop strings; an empty one is an [`EngineError::InvalidArgument`].
    pub fn new(stops: &[String]) -> Result<Self, EngineError> {
        if let Some(i) = stops.iter().position(String::is_empty) {
            return Err(EngineError::InvalidArgument(format!("stop string {i} is empty; a stop string has a character or more")));
        }
        Ok(Self { stops: stops.iter().map(|s| StopString::new(s)).collect(), held: String::new(), found: None })
    }

    /// Takes the next part of the text and appends to `output` what is safe to give out. After a stop string nothing is taken any
    /// more; one that is complete where the text may not end yet is text.
    pub fn push(&mut self, part: &str, may_end: bool, output: &mut String) {
        if self.found.is_some() {
            return;
        }
        if self.stops.is_empty() {
            return output.push_str(part);
        }
        let before = self.held.len();
        self.held.push_str(part);
        for (i, byte) in part.bytes().enumerate() {
            let mut complete: Option<usize> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && !may_end {
                    stop.matched = stop.borders[stop.matched];
                } else if stop.matched == stop.text.len() {
                    let longest = complete.is_none_or(|c: usize| stop.text.len() > c);
                    if longest {
                        complete = Some(stop.text.len());
                        self.found = Some(index);
                    }
                }
            }
            if let Some(len) = complete {
                // All of the stop string is held: its beginning never was safe.
                let start = before + i + 1 - len;
                output.push_str(&self.held[..start]);
                self.held.clear();
                return;
            }
        }
        // A stop string begins with a whole character, so this is a boundary of characters.
        let waiting = self.stops.iter().map(|s| s.matched).max().unwrap_or(0);
        let safe = self.held.len() - waiting;
        output.push_str(&self.held[..safe]);
        self.held.drain(..safe);
    }

    /// The text has ended: what is held was no stop string, and is appended to `output`.
    pub fn finish(&mut self, output: &mut String) {
        output.push_str(&self.held);
        self.held.clear();
        for stop in &mut self.stops {
            stop.matched = 0;
        }
    }

    /// The stop string that ended the text.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.stops[index].text.as_str())
    }
}

/// Tokens in, text out, of one continuation.
#[derive(Clone, Debug)]
pub struct OutputText {
    decoder: IncrementalDecoder,
    stops: StopChecker,
    decoded: String,
}

impl OutputText {
    /// With the decoder of the continuation and its stop strings; an empty one is an [`EngineError::InvalidArgument`].
    pub fn new(decoder: IncrementalDecoder, stops: &[String]) -> Result<Self, EngineError> {
        Ok(Self { decoder, stops: StopChecker::new(stops)?, decoded: String::new() })
    }

    /// Takes a token and appends to `output` the text that it makes final. True when a stop string is complete and the
    /// continuation may end: it does.
    pub fn push(&mut self, tokenizer: &Tokenizer, token_id: u32, may_end: bool, output: &mut String) -> bool {
        self.decoded.clear();
        self.decoder.push(tokenizer, token_id, &mut self.decoded);
        self.stops.push(&self.decoded, may_end, output);
        self.stops.found().is_some()
    }

    /// The continuation has ended: appends what was held back, unless a stop string ended it.
    pub fn finish(&mut self, output: &mut String) {
        self.decoded.clear();
        self.decoder.finish(&mut self.decoded);
        self.stops.push(&self.decoded, true, output);
        self.stops.finish(output);
    }

    /// The stop string that ended the continuation.
    pub fn stop_sequence(&self) -> Option<&str> {
        self.stops.found()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The whole text at once: the stop string that ends first, of these the one that begins first.
    fn oracle(text: &str, stops: &[String]) -> (String, Option<String>) {
        let first = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at, s))).min();
        first.map_or((text.to_owned(), None), |(_, at, stop)| (text[..at].to_owned(), Some(stop.clone())))
    }

    fn run(parts: &[String], stops: &[String]) -> (String, Option<String>) {
        let mut checker = StopChecker::new(stops).unwrap();
        let mut output = String::new();
        for part in parts {
            checker.push(part, true, &mut output);
        }
        checker.finish(&mut output);
        (output, checker.found().map(str::to_owned))
    }

    #[test]
    fn a_stop_string_across_parts_is_cut_out() {
        let mut checker = StopChecker::new(&["\n\nUser:".into()]).unwrap();
        let mut output = String::new();
        for (part, so_far) in
            [("Hi\n", "Hi"), ("\n", "Hi"), ("x\n", "Hi\n\nx"), ("\nUs", "Hi\n\nx"), ("er: no", "Hi\n\nx"), ("more", "Hi\n\nx")]
        {
            checker.push(part, true, &mut output);
            assert_eq!(output, so_far);
        }
        checker.finish(&mut output);
        assert_eq!((output.as_str(), checker.found()), ("Hi\n\nx", Some("\n\nUser:")));
    }

    #[test]
    fn a_beginning_that_stays_one_is_given_out_at_the_end() {
        assert_eq!(run(&["ab".into(), "c\n".into()], &["\n\n".into()]), ("abc\n".into(), None));
    }

    #[test]
    fn a_stop_string_where_the_text_may_not_end_is_text() {
        let mut checker = StopChecker::new(&["aba".into()]).unwrap();
        let mut output = String::new();
        checker.push("xaba", false, &mut output);
        assert_eq!(output, "xab");
        // Its end begins another.
        checker.push("ba!", true, &mut output);
        assert_eq!((output.as_str(), checker.found()), ("xab", Some("aba")));
    }

    #[test]
    fn empty_stop_strings_are_refused() {
        let error = StopChecker::new(&["a".into(), String::new()]).unwrap_err();
        assert!(matches!(&error, EngineError::InvalidArgument(m) if m.contains("stop string 1")), "{error}");
    }

    fn few_letters(len: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        proptest::collection::vec(proptest::sample::select(vec!['a', 'b', 'é', 'è', '🦀']), len).prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn parts_give_what_the_whole_text_gives(
            parts in proptest::collection::vec(few_letters(0..6), 0..12),
            stops in proptest::collection::vec(few_letters(1..5), 0..4),
        ) {
            let text = parts.concat();
            let expected = oracle(&text, &stops);
            prop_assert_eq!(run(&parts, &stops), expected.clone());
            let characters: Vec<String> = text.chars().map(String::from).collect();
            prop_assert_eq!(run(&characters, &stops), expected);
        }

        #[test]
        fn no_more_is_held_than_may_begin_a_stop_string(parts in proptest::collection::vec(few_letters(0..4), 0..12), stop in few_letters(1..5)) {
            let mut checker = StopChecker::new(std::slice::from_ref(&stop)).unwrap();
            let (mut output, mut text) = (String::new(), String::new());
            for part in &parts {
                checker.push(part, true, &mut output);
                text.push_str(part);
                if checker.found().is_some() {
                    break;
                }
                let longest = (0..stop.len()).rev().find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n])).unwrap();
                // A part of a character's bytes cannot be shared with the text's end: both are whole characters.
                prop_assert_eq!(&output, &text[..text.len() - longest]);
            }
        }
    }
}
