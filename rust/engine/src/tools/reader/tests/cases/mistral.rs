//! vLLM's `test_mistral_tool_parser.py`, SGLang's `test_mistral_detector.py`, llama.cpp's `test-chat.cpp`.

use super::{Case, case};

const fn list(answer: &'static str) -> Case {
    case("mistral", answer)
}

const fn named(answer: &'static str) -> Case {
    case("mistral-args", answer)
}

pub const CASES: &[Case] = &[
    list("No call at all").text("No call at all"),
    list("[TOOL_CALLS][{\"name\": \"sum\", \"arguments\":{\"a\": 2.5, \"b\": 7}}]").calls(&[("sum", "{\"a\": 2.5, \"b\": 7}")]),
    list("[TOOL_CALLS]  [ {\"name\":\"sum\" , \"arguments\" : {\"a\": 2, \"b\": 7} } ]").calls(&[("sum", "{\"a\": 2, \"b\": 7}")]),
    list("[TOOL_CALLS] [{\"arguments\":{\"place\": \"Oslo\"}, \"name\": \"weather\"}]").calls(&[("weather", "{\"place\": \"Oslo\"}")]),
    list("[TOOL_CALLS] [{\"arguments\":{\"name\": \"Kim\"}, \"name\": \"age\"}]").calls(&[("age", "{\"name\": \"Kim\"}")]),
    list("[TOOL_CALLS] [{\"name\": \"sum\", \"arguments\": {\"a\": 2.5}}, {\"name\": \"weather\", \"arguments\":{\"place\": \"Oslo\"}}]")
        .calls(&[("sum", "{\"a\": 2.5}"), ("weather", "{\"place\": \"Oslo\"}")]),
    list("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"o\": {\"deep\": true}, \"l\": [\"a\", \"b\"]}}]")
        .calls(&[("f", "{\"o\": {\"deep\": true}, \"l\": [\"a\", \"b\"]}")]),
    list("Hm[TOOL_CALLS] [{\"name\": \"sum\", \"arguments\":{\"a\": 1}}]").text("Hm").calls(&[("sum", "{\"a\": 1}")]),
    // What follows the list is text; vLLM drops it when it does not stream.
    list("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\":{}}]\nand more").text("and more").calls(&[("f", "{}")]),
    // vLLM refuses a second list.
    list("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\":{}}][TOOL_CALLS] [{\"name\": \"g\", \"arguments\":{}}]")
        .calls(&[("f", "{}"), ("g", "{}")]),
    // The list follows the marker; vLLM looks for one further on as well.
    list("[TOOL_CALLS]  well [{\"name\": \"f\", \"arguments\":{}}] so")
        .text("[TOOL_CALLS]  well [{\"name\": \"f\", \"arguments\":{}}] so"),
    // vLLM and SGLang drop the marker, SGLang all of it.
    list("[TOOL_CALLS] no JSON at all").text("[TOOL_CALLS] no JSON at all"),
    list("[TOOL_CALLS] [no JSON]").text("[TOOL_CALLS] [no JSON]"),
    list("[TOOL_CALLS][1, 2]").text("[TOOL_CALLS][1, 2]"),
    // A call that is none behind one that is.
    list("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, \"junk\"]").text("\"junk\"]").calls(&[("f", "{}")]),
    list("Sure. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"find\", \"arguments\": {\"q\": \"北京\"}}, {\"name\": \"f\", \"arguments\": {\"days\": 3}}]")
        .text("Sure.")
        .calls(&[("f", "{}"), ("find", "{\"q\": \"北京\"}"), ("f", "{\"days\": 3}")]),
    list("[TOOL_CALLS] [{\"arguments\": {\"a\": 2.5}, \"name\": \"sum\"}, {\"arguments\":{\"place\": \"Oslo\"}, \"name\": \"weather\"}]")
        .calls(&[("sum", "{\"a\": 2.5}"), ("weather", "{\"place\": \"Oslo\"}")]),
    list("[TOOL_CALLS] [{\"name\":\"decide\", \"arguments\":{\"what\":\"\",\"why\":\"```\\nSee: [City] - [Sky]\\n```\"}}]")
        .calls(&[("decide", "{\"what\":\"\",\"why\":\"```\\nSee: [City] - [Sky]\\n```\"}")]),
    // With the id that templates write; `ids` tests what becomes of it.
    list("[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}, \"id\": \"123456789\"}]").calls(&[("f", "{\"x\": 1}")]),
    list("[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}, \"id\": \"12345").calls(&[("f", "{\"x\": 1}")]).cut(),
    // SGLang's `test_mistral_detector_finish.py`, and a name that no tool has first.
    list("so [TOOL_CALLS] [{\"name\": \"sky\", \"arguments\": {\"at\": \"O").text("so").calls(&[("sky", "{\"at\": \"O")]).cut(),
    list("[TOOL_CALLS] [{\"name\": \"unheard_of\", \"arguments\": {}},{\"name\": \"sky\", \"arguments\": {\"at\": \"Oslo\"}}]")
        .calls(&[("unheard_of", "{}"), ("sky", "{\"at\": \"Oslo\"}")]),
    named("No call at all").text("No call at all"),
    named("[TOOL_CALLS]weather[ARGS]{\"place\": \"Oslo\"}").calls(&[("weather", "{\"place\": \"Oslo\"}")]),
    named("Let me see. [TOOL_CALLS]weather[ARGS]{\"place\": \"Oslo\"}").text("Let me see.").calls(&[("weather", "{\"place\": \"Oslo\"}")]),
    // Where special tokens are dropped, nothing is left of what stands between.
    named("[TOOL_CALLS]sum_of_all{\"a\": 2.5, \"b\": 7}").calls(&[("sum_of_all", "{\"a\": 2.5, \"b\": 7}")]),
    named("[TOOL_CALLS]sum{\"a\": 2.5}[TOOL_CALLS]product{\"a\": 3, \"b\": {}}")
        .calls(&[("sum", "{\"a\": 2.5}"), ("product", "{\"a\": 3, \"b\": {}}")]),
    named("bla[TOOL_CALLS]sum{\"a\": 2.5}").text("bla").calls(&[("sum", "{\"a\": 2.5}")]),
    named("so{so[TOOL_CALLS]shell{\"run\": \"echo(\\\"hey\\\")\\nre(r'{}')\"}")
        .text("so{so")
        .calls(&[("shell", "{\"run\": \"echo(\\\"hey\\\")\\nre(r'{}')\"}")]),
    named("so{so[TOOL_CALLS]shell{\"run\": \"echo(\\\"hey\\\")\\nre(r'{}')")
        .text("so{so")
        .calls(&[("shell", "{\"run\": \"echo(\\\"hey\\\")\\nre(r'{}')")])
        .cut(),
    named("[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"x\": 1}").calls(&[("f", "{\"x\": 1}")]),
    named("Yes.\n[TOOL_CALLS]f[CALL_ID]000000001[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]000000002[ARGS]{\"x\": 1, \"y\": 2}")
        .text("Yes.")
        .calls(&[("f", "{\"x\": 1}"), ("g", "{\"x\": 1, \"y\": 2}")]),
    named("[TOOL_CALLS]f[CALL_ID]no id[ARGS]{}").calls(&[("f", "{}")]),
    named("[TOOL_CALLS]f[CALL_ID]123456789{\"x\": 1}").calls(&[("f", "{\"x\": 1}")]),
    named("[TOOL_CALLS]f[CALL_ID]1234").text("[TOOL_CALLS]f[CALL_ID]1234"),
    named("[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"s\": \"[CALL_ID] [ARGS]").calls(&[("f", "{\"s\": \"[CALL_ID] [ARGS]")]).cut(),
    named("[THINK]So.[/THINK]Yes.[TOOL_CALLS]f[ARGS]{}").reasoning("So.").text("Yes.").calls(&[("f", "{}")]),
    // A name alone is no call; vLLM drops it.
    named("[TOOL_CALLS]a_name_alone").text("[TOOL_CALLS]a_name_alone"),
    // The older form in a vocabulary of the newer is text; SGLang takes both.
    named("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]").text("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]"),
    // llama.cpp's Ministral 3.
    named("[THINK]As I\nsee it[/THINK]Good day!\nAnd you?").reasoning("As I\nsee it").text("Good day!\nAnd you?"),
    named("[THINK]As I\nsee it[/THINK][TOOL_CALLS]f[ARGS]{\"x\":1}").reasoning("As I\nsee it").calls(&[("f", "{\"x\":1}")]),
    named("[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{\"x\": 1, \"y\": 2}")
        .calls(&[("f", "{\"x\": 1}"), ("g", "{\"x\": 1, \"y\": 2}")]),
    named("[THINK]As in [TOOL_CALLS]f[ARGS]{\"x\":1} and so on[/THINK][TOOL_CALLS]f[ARGS]{\"x\": 1}")
        .reasoning("As in [TOOL_CALLS]f[ARGS]{\"x\":1} and so on")
        .calls(&[("f", "{\"x\": 1}")]),
    // JSON in a fence is the model's text; llama.cpp takes it out where JSON was asked for, and here no fence can come then.
    named("[THINK]As JSON[/THINK]```json\n{\"price\": 12.5}\n```").reasoning("As JSON").text("```json\n{\"price\": 12.5}\n```"),
];
