//! Whatever an answer is, and however it is cut, it is read alike.

use proptest::prelude::*;

use super::*;

/// The format and the text of every answer here.
fn answers() -> Vec<(&'static str, &'static str)> {
    let own = CASES.iter().map(|(format, answer, ..)| (*format, *answer));
    own.chain(cases::all().map(|case| (case.format, case.answer))).collect()
}

/// Parts of answers, from which text is made that is none.
const PIECES: [&str; 48] = [
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "commentary",
    "final",
    " to=functions.f",
    "<|constrain|>",
    "json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    "f",
    "x",
    "=",
    ":",
    ",",
    " ",
    "\n",
    "'",
    "\"",
    "\\",
    "u",
    "d83d",
    "\\ud83d",
    "\\x4",
    "\\7",
    "1",
    "-",
    ".",
    "e9",
    "True",
    "null",
    "<|\"|>",
    "<escape>",
    "<|tool_call>call:",
    "<tool_call|>",
    "<start_function_call>call:",
    "functools[",
    "\u{FDD1}",
    "\u{1F600}",
];

/// The same of calls whose arguments stand between markers.
const BETWEEN_MARKERS: [&str; 14] = [
    "<tool_call>",
    "</tool_call>",
    "<function=typed>",
    "<function=",
    "typed",
    "</function>",
    "<parameter=text>",
    "<parameter=count>",
    "</parameter>",
    "</",
    ">",
    "7",
    " ",
    "\n",
];

proptest! {
    #[test]
    fn text_between_markers_is_read_alike_however_it_is_cut(
        pieces in proptest::collection::vec(0..BETWEEN_MARKERS.len(), 0..40),
        head in 0..3_usize,
    ) {
        let head = ["", "<function=typed>\n<parameter=text>", "<tool_call><function=typed><parameter=count>"][head];
        let text: String = [head].into_iter().chain(pieces.iter().map(|piece| BETWEEN_MARKERS[*piece])).collect();
        for reading in [reading("qwen3-coder"), with_tokens("qwen3-coder")] {
            let text = reading.marked(&text);
            let whole = read(&reading, [&*text]);
            prop_assert_eq!(read(&reading, random_parts(&text, 0)), whole.clone());
            let characters: Vec<String> = text.chars().map(String::from).collect();
            prop_assert_eq!(read(&reading, characters.iter().map(String::as_str)), whole);
        }
    }

    #[test]
    fn text_that_is_no_answer_is_read_alike_however_it_is_cut(
        pieces in proptest::collection::vec(0..PIECES.len(), 0..40),
        format in 0..FORMATS.len(),
    ) {
        let text: String = pieces.iter().map(|piece| PIECES[*piece]).collect();
        let characters: Vec<String> = text.chars().map(String::from).collect();
        for reading in [reading(FORMATS[format].name), with_tokens(FORMATS[format].name)] {
            let whole = read(&reading, [&*text]);
            prop_assert_eq!(read(&reading, characters.iter().map(String::as_str)), whole.clone());
            prop_assert!(!whole.0.contains(MARK) && !whole.1.contains(MARK));
        }
    }

    #[test]
    fn parts_give_what_the_whole_answer_gives(
        case in 0..answers().len(),
        other in 0..FORMATS.len(),
        cuts in proptest::collection::vec(0.0..1.0, 0..12),
        end in 0.0..1.2,
    ) {
        let (format, answer) = answers()[case];
        let at = |share: f64| {
            let count = answer.chars().count() as f64;
            answer.char_indices().map(|(at, _)| at).nth((share * count) as usize).unwrap_or(answer.len())
        };
        let answer = &answer[..at(end)];
        let mut places: Vec<usize> = cuts.into_iter().map(at).filter(|place| *place <= answer.len()).collect();
        places.extend([0, answer.len()]);
        places.sort_unstable();
        // An answer of another format is an answer as well.
        for name in [format, FORMATS[other].name] {
            let parts = places.windows(2).map(|pair| &answer[pair[0]..pair[1]]);
            prop_assert_eq!(read(&reading(name), parts), read(&reading(name), [answer]));
        }
    }
}
