//! Calls as JSON between `<tool_call>` and `</tool_call>`: vLLM's `test_hermes_tool_parser.py`, `test_granite4_tool_parser.py`
//! and `test_format_conformance.py`, SGLang's `test_hermes_detector.py`, `test_qwen25_detector.py`,
//! `test_zero_argument_tool_call.py` and `test_malformed_tool_call_payloads.py`, llama.cpp's `test-chat.cpp`.

use super::{Case, case};

const fn hermes(answer: &'static str) -> Case {
    case("hermes", answer)
}

pub const CASES: &[Case] = &[
    hermes("There is nothing to be called here.").text("There is nothing to be called here."),
    hermes("<tool_call>\n{\"name\": \"submit\", \"arguments\": {\"done\": true}}\n</tool_call>").calls(&[("submit", "{\"done\": true}")]),
    hermes("<tool_call>{\"name\": \"temperature\",\"arguments\": {\"place\":\"Bergen, Norway\", \"unit\": \"celsius\"}}</tool_call>")
        .calls(&[("temperature", "{\"place\":\"Bergen, Norway\", \"unit\": \"celsius\"}")]),
    hermes("Sure, I look it up.<tool_call>{\"name\": \"temperature\", \"arguments\": {\"place\": \"Bonn\"}}</tool_call>")
        .text("Sure, I look it up.")
        .calls(&[("temperature", "{\"place\": \"Bonn\"}")]),
    // The spaces before a call are no text; SGLang leaves them out too, vLLM does not.
    hermes("I look it up. \n\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>").text("I look it up.").calls(&[("f", "{}")]),
    hermes("<tool_call>{\"name\": \"find\", \"arguments\": {\"q\": \"owls\"}}</tool_call><tool_call>{\"name\": \"find\", \"arguments\": {\"q\": \"elks\"}}</tool_call>")
        .calls(&[("find", "{\"q\": \"owls\"}"), ("find", "{\"q\": \"elks\"}")]),
    // The end of the answer closes a call.
    hermes("<tool_call>\n{\"name\": \"submit\", \"arguments\": {\"done\": true}}").calls(&[("submit", "{\"done\": true}")]),
    // A brace is missing: vLLM gives the text, and here the call is one that was cut off.
    hermes("<tool_call>\n{\"name\": \"submit\", \"arguments\": {\"done\": true}").calls(&[("submit", "{\"done\": true}")]).cut(),
    hermes("<tool_call>\n{\"name\": \"submit\", \"arguments\": {\"done\":").calls(&[("submit", "{\"done\":")]).cut(),
    hermes("<tool_call>\n  {\"name\": \"f\", \"arguments\": {\"x\": 2}}  \n</tool_call>").calls(&[("f", "{\"x\": 2}")]),
    // Without arguments, and another call behind it.
    hermes("<tool_call>\n{\"name\": \"clock\"}\n</tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 2}}\n</tool_call>")
        .calls(&[("clock", "{}"), ("f", "{\"x\": 2}")]),
    // Arguments that the model has put into a text come out of it once.
    hermes("<tool_call>\n{\"name\": \"setting\", \"arguments\": \"{\\\"key\\\": \\\"max_size\\\"}\"}\n</tool_call>")
        .calls(&[("setting", "{\"key\": \"max_size\"}")]),
    hermes("<tool_call>{\"arguments\": \"{\\\"s\\\": \\\"a \\\\\\\"b\\\\\\\" \\\\u00e9\\\"}\", \"name\": \"f\"}</tool_call>")
        .calls(&[("f", "{\"s\": \"a \\\"b\\\" \\u00e9\"}")]),
    // Only an object does; any other text is one, which is JSON at least.
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": \"go\"}</tool_call>").calls(&[("f", "\"go\"")]),
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": \"{no object}\"}</tool_call>").calls(&[("f", "\"{no object}\"")]),
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": \"[1\"}</tool_call>").calls(&[("f", "\"[1\"")]),
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1} and more\"}</tool_call>")
        .calls(&[("f", "\"{\\\"x\\\": 1} and more\"")]),
    hermes("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x").calls(&[("f", "\"{\\\"x")]).cut(),
    // What is between the markers and no call is text; SGLang drops it.
    hermes("<tool_call>no object</tool_call>").text("<tool_call>no object</tool_call>"),
    hermes("<tool_call>\n{no: JSON}\n</tool_call>").text("<tool_call>\n{no: JSON}\n</tool_call>"),
    hermes("<tool_call>[1, 2]</tool_call>").text("<tool_call>[1, 2]</tool_call>"),
    hermes("<tool_call>[null]</tool_call>").text("<tool_call>[null]</tool_call>"),
    // A list of calls between the markers is Granite 3.1's form, not this one; SGLang takes it as well.
    hermes("<tool_call>[{\"name\": \"f\", \"arguments\": {}}]</tool_call>")
        .text("<tool_call>[{\"name\": \"f\", \"arguments\": {}}]</tool_call>"),
    hermes("<tool_call>{\"name\": 7, \"arguments\": {}}</tool_call>").text("<tool_call>{\"name\": 7, \"arguments\": {}}</tool_call>"),
    // Text before, between and behind three calls, without the spaces before each.
    hermes("First the map: \n<tool_call> {\"name\": \"map\", \"arguments\": \"{\\\"at\\\": [[4.5, -1], [2, 3]]}\"} </tool_call> Now the price: \n <tool_call> {\"name\": \"price\", \"arguments\": {\"of\": \"tea\"}} </tool_call> Once more: <tool_call> {\"name\": \"map\", \"arguments\": {}} </tool_call> Well?")
        .text("First the map: Now the price: Once more: Well?")
        .calls(&[("map", "{\"at\": [[4.5, -1], [2, 3]]}"), ("price", "{\"of\": \"tea\"}"), ("map", "{}")]),
    hermes("<tool_call> {\"name\": \"a\", \"arguments\": {}} </tool_call>why so <tool_call> {\"name\": \"b\", \"arguments\": {}} </tool_call>")
        .text("why so")
        .calls(&[("a", "{}"), ("b", "{}")]),
    hermes("<tool_call>\n{\"name\": \"sky\", \"arguments\": {\"at\": \"Oslo\", \"in\": \"K\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"sky\", \"arguments\": {\"at\": \"Bonn\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"sky\", \"arguments\": {\"at\": \"杭州\"}}\n</tool_call>")
        .calls(&[("sky", "{\"at\": \"Oslo\", \"in\": \"K\"}"), ("sky", "{\"at\": \"Bonn\"}"), ("sky", "{\"at\": \"杭州\"}")]),
    hermes("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call><tool_call>\n{\"name\": \"g\", \"arguments\": {\"x\": 1, \"y\": 2}}</tool_call>")
        .calls(&[("f", "{\"x\": 1}"), ("g", "{\"x\": 1, \"y\": 2}")]),
    hermes("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"ar").calls(&[("f", "{\"ar")]).cut(),
    hermes("<think>I see</think>\n\nSo I ask.<tool_call>\n{\"name\": \"f\", \"arguments\": {}}</tool_call>")
        .reasoning("I see")
        .text("So I ask.")
        .calls(&[("f", "{}")]),
    // A name that no tool has; SGLang drops the call.
    hermes("<tool_call>{\"name\": \"unheard_of\", \"arguments\": {}}</tool_call>").calls(&[("unheard_of", "{}")]),
    // SGLang's `test_unknown_tool_name.py` and `test_streaming_unknown_tool_name.py`: it loses none of the calls around it.
    hermes("<tool_call>\n{\"name\": \"sky\", \"arguments\": {\"at\": \"Oslo\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"unheard_of\", \"arguments\": {\"path\": \"/\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"in\": \"UTC\"}}\n</tool_call>\n")
        .calls(&[("sky", "{\"at\": \"Oslo\"}"), ("unheard_of", "{\"path\": \"/\"}"), ("clock", "{\"in\": \"UTC\"}")]),
    hermes("<tool_call>{\"name\": \"unheard_of\", \"arguments\": {}}</tool_call>good day")
        .text("good day")
        .calls(&[("unheard_of", "{}")]),
    // SGLang's `test_hermes_detector_finish.py`: there the text of a call that is cut off.
    hermes("so <tool_call>{\"name\": \"sky\", \"arguments\": {\"at\": \"O").text("so").calls(&[("sky", "{\"at\": \"O")]).cut(),
    // What begins like a marker, and is none.
    hermes("</answer").text("</answer"),
    hermes("<this is text").text("<this is text"),
    hermes("</random>").text("</random>"),
    hermes("<think>why so</").reasoning("why so</"),
    hermes("<think>why </thin so</think>yes").reasoning("why </thin so").text("yes"),
    // A call within reasoning is a thought.
    hermes("<think>As <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 2}}</tool_call> hm\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>")
        .reasoning("As <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 2}}</tool_call> hm\n")
        .calls(&[("f", "{\"x\": 1}")]),
];
