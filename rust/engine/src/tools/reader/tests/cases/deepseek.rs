//! vLLM's `test_deepseekv3_tool_parser.py` and `test_deepseekv31_tool_parser.py`, SGLang's `test_deepseekv3_detector.py` and
//! `test_deepseekv31_detector.py`, llama.cpp's `test-chat.cpp`.

use super::{Case, case};

const fn v3(answer: &'static str) -> Case {
    case("deepseek-v3", answer)
}

const fn v31(answer: &'static str) -> Case {
    case("deepseek-v3.1", answer)
}

pub const CASES: &[Case] = &[
    v3("What can I do? I know the weather.").text("What can I do? I know the weather."),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"Oslo\", \"unit\": \"C\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("weather", "{\"place\": \"Oslo\", \"unit\": \"C\"}")]),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"Oslo\"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>hotels\n```json\n{\"from\": \"2025-01-15\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("weather", "{\"place\": \"Oslo\"}"), ("hotels", "{\"from\": \"2025-01-15\"}")]),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": \"a\", \"i\": 42, \"x\": 3.14, \"b\": true, \"n\": null, \"l\": [\"a\"], \"o\": {\"k\": \"v\"}, \"e\": [], \"m\": {}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("f", "{\"s\": \"a\", \"i\": 42, \"x\": 3.14, \"b\": true, \"n\": null, \"l\": [\"a\"], \"o\": {\"k\": \"v\"}, \"e\": [], \"m\": {}}")]),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>").calls(&[("clock", "{}")]),
    v3("I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>send\n```json\n{\"text\": \"She said \\\"hi\\\"\", \"at\": \"C:\\\\Temp\\\\f\", \"n\": \"1\\n2\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .text("I look.")
        .calls(&[("send", "{\"text\": \"She said \\\"hi\\\"\", \"at\": \"C:\\\\Temp\\\\f\", \"n\": \"1\\n2\"}")]),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("f", "{\"x\": 1}")]),
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"at\": \"Oslo\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>sights\n```json\n{\"at\": \"Bonn\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("weather", "{\"at\": \"Oslo\"}"), ("sights", "{\"at\": \"Bonn\"}")]),
    // An object that is not closed takes all that follows.
    v3("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .calls(&[("f", "{\"x\": 1\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")])
        .cut(),
    // The marker of the call is missing.
    v3("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁calls▁end｜>")
        .text("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁calls▁end｜>"),
    v31("some words<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\":1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .text("some words")
        .calls(&[("f", "{\"x\":1}")]),
    // Text behind the calls is text; vLLM drops it.
    v31("before<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\":1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"y\":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜> behind")
        .text("before behind")
        .calls(&[("f", "{\"x\":1}"), ("g", "{\"y\":2}")]),
    v31("I look.<｜tool▁calls▁begin｜>weather").text("I look.<｜tool▁calls▁begin｜>weather"),
    v31("<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{\"x\":1}<｜tool▁calls▁end｜>").text("<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{\"x\":1}<｜tool▁calls▁end｜>"),
    v31("As I said.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": \"Oslo\"}<｜tool▁call▁end｜>")
        .text("As I said.")
        .calls(&[("weather", "{\"place\": \"Oslo\"}")]),
    // Calls begin with the marker of all of them; SGLang does without.
    v31("As I said.\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>")
        .text("As I said.\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    v31("<think>So.</think>Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{\"at\": \"Rome\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"at\": \"Rome\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        .reasoning("So.")
        .text("Yes.")
        .calls(&[("time", "{\"at\": \"Rome\"}"), ("weather", "{\"at\": \"Rome\"}")]),
];
