//! Reasoning: vLLM's `test_deepseekr1_reasoning_parser.py`, `test_qwen3_reasoning_parser.py`,
//! `test_mistral_reasoning_parser.py` and `test_seedoss_reasoning_parser.py`, SGLang's `test_reasoning_parser.py`, llama.cpp's
//! `test-chat-parser.cpp` and `test-chat.cpp`. All of them mark it alike: by what opens it, and what closes it.

/// An answer with `<` and `>` in place of what opens and closes reasoning.
#[derive(Clone, Copy, Debug)]
pub struct Thought {
    /// The prompt ends within reasoning.
    pub thinks: bool,
    pub answer: &'static str,
    pub reasoning: &'static str,
    pub text: &'static str,
}

/// Behind a prompt that has opened it.
const fn opened(answer: &'static str, reasoning: &'static str, text: &'static str) -> Thought {
    Thought { thinks: true, answer, reasoning, text }
}

/// Behind a prompt that says nothing of it.
const fn open(answer: &'static str, reasoning: &'static str, text: &'static str) -> Thought {
    Thought { thinks: false, answer, reasoning, text }
}

pub const CASES: &[Thought] = &[
    opened("why this>and so", "why this", "and so"),
    opened("why this>", "why this", ""),
    // Cut off while it thinks, it has said nothing.
    opened("why this", "why this", ""),
    opened("", "", ""),
    opened("one\ntwo>three\nfour", "one\ntwo", "three\nfour"),
    opened(">at once", "", "at once"),
    // What opens it comes a second time: it is no thought.
    opened("<why this>and so", "why this", "and so"),
    opened("\n <why this>and so", "why this", "and so"),
    opened("<why this", "why this", ""),
    // Later on it is one.
    opened("why < this>and so", "why < this", "and so"),
    opened("<<why>so", "why", "so"),
    open("<<why>so", "why", "so"),
    open("<\n< \n why>so", " \n why", "so"),
    open("<why <>so", "why <", "so"),
    open("<", "", ""),
    open("<>", "", ""),
    open("<\nwhy\n>\n\nand so.\n", "\nwhy\n", "and so.\n"),
    opened("one = 2, two = 3>so it is 3.", "one = 2, two = 3", "so it is 3."),
    open("<why this>and so", "why this", "and so"),
    open("<why this>", "why this", ""),
    open("<why this", "why this", ""),
    open("<one\ntwo>three\nfour", "one\ntwo", "three\nfour"),
    open("<>so", "", "so"),
    // Spaces before an answer are none of it, which vLLM keeps; those within reasoning are, which llama.cpp does not keep.
    open("\n<why this>\n\nand so", "why this", "and so"),
    open("<\nwhy\n>so", "\nwhy\n", "so"),
    open("at once", "", "at once"),
    open("", "", ""),
    // What is not opened is not closed, and behind other text nothing is opened.
    open("so>and so", "", "so>and so"),
    open("so <why>", "", "so <why>"),
    open("<why>so<why>", "why", "so<why>"),
];
