//! Arguments one by one: vLLM's `test_qwen3coder_tool_parser.py`, `test_glm4_moe_tool_parser.py` and
//! `test_format_conformance.py`, SGLang's `test_qwen3_coder_detector.py`, `test_glm4_moe_detector.py` and
//! `test_glm47_moe_detector.py`, llama.cpp's `test-chat.cpp`.

use super::{Case, case};

const fn qwen(answer: &'static str) -> Case {
    case("qwen3-coder", answer)
}

const fn glm(answer: &'static str) -> Case {
    case("glm4.5", answer)
}

const fn seed(answer: &'static str) -> Case {
    case("seed-oss", answer)
}

pub const QWEN: &[Case] = &[
    qwen("No call here").text("No call here"),
    qwen("Well! I look.<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=zip>\n0150\n</parameter>\n</function>\n</tool_call>")
        .text("Well! I look.")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"0150\"}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=shape>\n{\"w\": 10, \n \"h\": 20}\n</parameter>\n<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"shape\": {\"w\": 10, \n \"h\": 20}, \"count\": 2}")]),
    qwen("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\"}"), ("weather", "{\"city\": \"Bonn\"}")]),
    // Line breaks between markers are not needed.
    qwen("I look.<tool_call><function=now></function></tool_call> <tool_call>\n\n<function=weather><parameter=city>Oslo</parameter></function> </tool_call>")
        .text("I look.")
        .calls(&[("now", "{}"), ("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<tool_call>\nno call</tool_call>").text("<tool_call>\nno call</tool_call>"),
    qwen("<tool_call>\n<func").text("<tool_call>\n<func"),
    // By the schema: numbers, words and objects are JSON, texts are not.
    qwen("<tool_call>\n<function=typed>\n<parameter=count>\n42\n</parameter>\n<parameter=ratio>\n3.14\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n<parameter=text>\nhello you\n</parameter>\n<parameter=shape>\n{\"k\": \"v\"}\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"count\": 42, \"ratio\": 3.14, \"on\": true, \"text\": \"hello you\", \"shape\": {\"k\": \"v\"}}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=text>42</parameter>\n<parameter=maybe_count>5</parameter>\n<parameter=maybe_text>hello</parameter>\n<parameter=maybe_list>[\"a\", \"b\"]</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"text\": \"42\", \"maybe_count\": 5, \"maybe_text\": \"hello\", \"maybe_list\": [\"a\", \"b\"]}")]),
    // A text or nothing: what is neither in JSON is a text.
    qwen("<tool_call>\n<function=typed><parameter=maybe_text>null</parameter><parameter=text_or_null>42</parameter></function>\n</tool_call>")
        .calls(&[("typed", "{\"maybe_text\": null, \"text_or_null\": \"42\"}")]),
    qwen("<tool_call>\n<function=typed><parameter=maybe_text>\"quoted\"</parameter><parameter=text>\"quoted\"</parameter></function>\n</tool_call>")
        .calls(&[("typed", "{\"maybe_text\": \"quoted\", \"text\": \"\\\"quoted\\\"\"}")]),
    qwen("<tool_call>\n<function=typed><parameter=any>some text</parameter><parameter=union>{\"a\": 1}</parameter></function>\n</tool_call>")
        .calls(&[("typed", "{\"any\": \"some text\", \"union\": {\"a\": 1}}")]),
    qwen("<tool_call>\n<function=typed><parameter=union>{no JSON</parameter><parameter=count>2 or 3</parameter></function>\n</tool_call>")
        .calls(&[("typed", "{\"union\": \"{no JSON\", \"count\": \"2 or 3\"}")]),
    // The values of an `enum` tell what it is of.
    qwen("<tool_call>\n<function=typed><parameter=unit>C</parameter><parameter=size>1</parameter></function>\n</tool_call>")
        .calls(&[("typed", "{\"unit\": \"C\", \"size\": \"1\"}")]),
    qwen("<tool_call>\n<function=typed><parameter=referred>7</parameter></function>\n</tool_call>").calls(&[("typed", "{\"referred\": \"7\"}")]),
    // No JSON; the grammar lets no such word come, and vLLM would make one of JSON's of it.
    qwen("<tool_call>\n<function=typed><parameter=on>True</parameter></function>\n</tool_call>").calls(&[("typed", "{\"on\": \"True\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\ndef f():\n    print(\"Hey\")\n\nf()\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"def f():\\n    print(\\\"Hey\\\")\\n\\nf()\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\n格\t\u{1}\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"格\\t\\u0001\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\n<html>\n <b>Hey!</b>\n</html>\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"<html>\\n <b>Hey!</b>\\n</html>\"}")]),
    // What only looks like the end of a value is some of it.
    qwen("<tool_call>\n<function=python><parameter=code>\na </parameterList>\n</parameters>\n</parameter></function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"a </parameterList>\\n</parameters>\"}")]),
    qwen("<tool_call>\n<function=python><parameter=code>\n\n\n\n</parameter></function>\n</tool_call>").calls(&[("python", "{\"code\": \"\\n\\n\"}")]),
    qwen("<tool_call>\n<function=python><parameter=code>\n</parameter></function>\n</tool_call>").calls(&[("python", "{\"code\": \"\"}")]),
    qwen("<tool_call>\n<function=python><parameter=code></parameter></function>\n</tool_call>").calls(&[("python", "{\"code\": \"\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>SELECT * FROM t WHERE name = 'J \"D\"'</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"SELECT * FROM t WHERE name = 'J \\\"D\\\"'\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\n\"f(\\\"a\\\");\"\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"\\\"f(\\\\\\\"a\\\\\\\");\\\"\"}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=maybe_list>\n[\n  {\"do\": \"tea\"},\n  [true, null]\n]\n</parameter>\n<parameter=count>\n-14\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"maybe_list\": [\n  {\"do\": \"tea\"},\n  [true, null]\n], \"count\": -14}")]),
    // The schema is put together of parts.
    qwen("<tool_call><function=parts><parameter=kind>sent</parameter><parameter=payload>{\"value\": \"hello\"}</parameter><parameter=zip>10</parameter><parameter=to>7</parameter></function></tool_call>")
        .calls(&[("parts", "{\"kind\": \"sent\", \"payload\": {\"value\": \"hello\"}, \"zip\": \"10\", \"to\": \"7\"}")]),
    // By its type, not by what else the schema says of it; SGLang makes a text of an object that lacks a property.
    qwen("<tool_call><function=parts><parameter=kind>other</parameter><parameter=payload>{\"x\": 1}</parameter></function></tool_call>")
        .calls(&[("parts", "{\"kind\": \"other\", \"payload\": {\"x\": 1}}")]),
    qwen("<tool_call><function=parts><parameter=payload>{no JSON</parameter><parameter=else>5</parameter></function></tool_call>")
        .calls(&[("parts", "{\"payload\": \"{no JSON\", \"else\": 5}")]),
    // In the order in which they come.
    qwen("<tool_call>\n<function=weather><parameter=zip>1</parameter><parameter=city>Oslo</parameter></function>\n</tool_call>")
        .calls(&[("weather", "{\"zip\": \"1\", \"city\": \"Oslo\"}")]),
    // A value ends where it is closed and something follows that can, so that it may have any other marker in it; vLLM and SGLang
    // end it before the next parameter as well, or before a closing marker that is spelled otherwise. The grammar lets no value
    // go on unclosed.
    qwen("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=zip>\n1\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\\n<parameter=zip>\\n1\"}")]),
    qwen("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter1>\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\\n</parameter1>\"}")]),
    // A text streams, so what there is of it when an answer is cut off is there.
    qwen("I do.<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\nprint(2").text("I do.").calls(&[("python", "{\"code\": \"print(1)\\nprint(2")]).cut(),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nx\n</par").calls(&[("python", "{\"code\": \"x\\n</par")]).cut(),
    // The end of a name may be missing before an argument. What is no name calls nothing.
    qwen("<tool_call>\n<function=weather\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<tool_call>\n<function=bad\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>")
        .text("<tool_call>\n<function=bad\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
];

/// The first marker of a call is missing, as vLLM, SGLang and llama.cpp know it of some models: the name has a line of its own.
pub const ALONE: &[Case] = &[
    qwen("<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>").calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>").calls(&[("typed", "{\"count\": 1}")]),
    qwen("So I call it.\n<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>")
        .text("So I call it.")
        .calls(&[("typed", "{\"count\": 1}")]),
    qwen("I look.\n\n  <function=weather>  \n\n <parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\nThere.")
        .text("I look.\nThere.")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    // The first alone does without; then none does.
    qwen("<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=zip>\n2\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"count\": 1}"), ("weather", "{\"city\": \"Oslo\", \"zip\": \"2\"}")]),
    qwen("<function=typed>\n</function>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n")
        .calls(&[("typed", "{}"), ("weather", "{\"city\": \"Oslo\"}")]),
    // Two between one pair of markers.
    qwen("<tool_call>\n<function=typed>\n</function>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{}"), ("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<think>Now.</think>\n<function=typed>\n</function>").reasoning("Now.").calls(&[("typed", "{}")]),
    qwen("<function=weather>\n<parameter=city>\nOs").calls(&[("weather", "{\"city\": \"Os")]).cut(),
    // Text that only says how a call is written.
    qwen("Calls begin with `<function=` and a name.").text("Calls begin with `<function=` and a name."),
    qwen("<function=").text("<function="),
    qwen("Thus:\n<function=weather>\n<param").text("Thus:\n<function=weather>\n<param"),
    qwen("Thus:\n<function=weather>").text("Thus:\n<function=weather>"),
    qwen("<function=weather>\nis how it begins").text("<function=weather>\nis how it begins"),
    qwen("<function=weather> is how it begins,\n<parameter=city> how it goes on")
        .text("<function=weather> is how it begins,\n<parameter=city> how it goes on"),
    qwen("<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>")
        .text("<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>"),
    // Within a line; the peers call.
    qwen("As in `<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>`")
        .text("As in `<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>`"),
    qwen("As in <function=weather><parameter=city>Oslo</parameter></function>")
        .text("As in <function=weather><parameter=city>Oslo</parameter></function>"),
    // The name has no line of its own; the peers call.
    qwen("<function=weather><parameter=city>Oslo</parameter></function>")
        .text("<function=weather><parameter=city>Oslo</parameter></function>"),
    // Of a tool that is not there; the peers call it.
    qwen("<function=unheard_of>\n</function>").text("<function=unheard_of>\n</function>"),
    seed("<function=weather>\n<parameter=city>Oslo</parameter>\n</function>")
        .text("<function=weather>\n<parameter=city>Oslo</parameter>\n</function>"),
];

/// llama.cpp's Qwen 3.5 and Nemotron 3, which think first; behind some prompts they are within it.
pub const THINKING: &[Case] = &[
    qwen("As I\nsee it\n</think>\n\nGood day!\nAnd you?").opened().reasoning("As I\nsee it\n").text("Good day!\nAnd you?"),
    qwen("As I\nsee it\n</think>\n\n<tool_call>\n<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>")
        .opened()
        .reasoning("As I\nsee it\n")
        .calls(&[("typed", "{\"count\": 1}")]),
    qwen("I look there.\n</think>\n\nNow I look.\n<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</function>\n</tool_call>\n")
        .opened()
        .reasoning("I look there.\n")
        .text("Now I look.")
        .calls(&[("python", "{\"code\": \"ls\"}")]),
    qwen("</think>\n\nNow I look.\n<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</function>\n</tool_call>")
        .opened()
        .text("Now I look.")
        .calls(&[("python", "{\"code\": \"ls\"}")]),
    qwen("</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>").opened().calls(&[("now", "{}")]),
    // Opened twice; llama.cpp takes the second for a thought.
    qwen("<think>\n\n</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>")
        .opened()
        .reasoning("\n\n")
        .calls(&[("now", "{}")]),
    qwen("All of it as JSON\n</think>\n\n{\"price\": 12.5, \"on\": \"2025-12-03\"}")
        .opened()
        .reasoning("All of it as JSON\n")
        .text("{\"price\": 12.5, \"on\": \"2025-12-03\"}"),
    // A call within reasoning is a thought; llama.cpp ends the reasoning before it.
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</function>\n</tool_call>")
        .opened()
        .reasoning("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</function>\n</tool_call>"),
    qwen("I look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>")
        .opened()
        .reasoning("I look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    qwen("I look.\n<function=typed>\n</function>\n</think>\n\n<function=typed>\n</function>")
        .opened()
        .reasoning("I look.\n<function=typed>\n</function>\n")
        .calls(&[("typed", "{}")]),
    qwen("As I\nsee it\n</think>\n<tool_call>\n<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>\n")
        .opened()
        .reasoning("As I\nsee it\n")
        .calls(&[("typed", "{\"count\": 1}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=typed>\n<parameter=count>\n1\n</parameter>\n<parameter=maybe_count>\n2\n</parameter>\n</function>\n</tool_call>\n")
        .calls(&[("typed", "{\"count\": 1}"), ("typed", "{\"count\": 1, \"maybe_count\": 2}")]),
    // Three texts, of which the last ends with a line break.
    qwen("<tool_call>\n<function=weather>\n<parameter=city>\n#iclude\n</parameter>\n<parameter=zip>\n#include\n\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"#iclude\", \"zip\": \"#include\\n\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\n    print(\"Hey, you!\")\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"    print(\\\"Hey, you!\\\")\"}")]),
];

/// Of texts with markers in them, and of what else vLLM's parsers of Qwen3-Coder are tried with.
pub const WITHIN: &[Case] = &[
    // What closes a value closes it where an argument or the end of the call follows.
    qwen("<tool_call>\n<function=weather>\n<parameter=city>\na.py\n</parameter>\n<parameter=zip>\nparts = [\n    \"<tool_call>\\n\",\n    \"<parameter=q>\\n\",\n    \"\\n</parameter>\\n\",\n    \"</function>\\n\",\n]\n</parameter>\n</function>\n</tool_call>\n")
        .calls(&[("weather", "{\"city\": \"a.py\", \"zip\": \"parts = [\\n    \\\"<tool_call>\\\\n\\\",\\n    \\\"<parameter=q>\\\\n\\\",\\n    \\\"\\\\n</parameter>\\\\n\\\",\\n    \\\"</function>\\\\n\\\",\\n]\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\ns = '''\n<parameter=code>\nx\n</parameter>\n'''\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"s = '''\\n<parameter=code>\\nx\\n</parameter>\\n'''\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\n</parameter> </parameter>\n</parameter>\n\n</function></tool_call>")
        .calls(&[("python", "{\"code\": \"</parameter> </parameter>\"}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=shape>\n{\"k\": \"</parameter>\"}\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"shape\": {\"k\": \"</parameter>\"}}")]),
    glm("<tool_call>python<arg_key>code</arg_key><arg_value>s = '</arg_value>'</arg_value></tool_call>")
        .calls(&[("python", "{\"code\": \"s = '</arg_value>'\"}")]),
    seed("<seed:tool_call>\n<function=python>\n<parameter=code>s = '</parameter>'</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("python", "{\"code\": \"s = '</parameter>'\"}")]),
    // Where it does, a value that goes on is cut; vLLM counts pairs of markers.
    qwen("<tool_call>\n<function=python>\n<parameter=code>\ns = '''\n<parameter=code>\nx\n</parameter>\n</function>\n</tool_call>\n'''\n</parameter>\n</function>\n</tool_call>")
        .text("'''\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"s = '''\\n<parameter=code>\\nx\"}")]),
    // What closes the function, or all of it, may be missing.
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</function>").calls(&[("python", "{\"code\": \"ls\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</tool_call>").calls(&[("python", "{\"code\": \"ls\"}")]),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n").calls(&[("python", "{\"code\": \"ls\"")]).cut(),
    qwen("<tool_call>\n<function=python>\n<parameter=code>\nls\n</parameter>\n</func").calls(&[("python", "{\"code\": \"ls\"")]).cut(),
    // A template that was not filled in.
    qwen("<tool_call>\n<function={{ tool.name }}>\n<parameter={{ key }}>\n{{ value }}\n</parameter>\n</function>\n</tool_call>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>")
        .text("<tool_call>\n<function={{ tool.name }}>\n<parameter={{ key }}>\n{{ value }}\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    qwen("As in <tool_call>this</tool_call>. And now:\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>")
        .text("As in <tool_call>this</tool_call>. And now:")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>\nDone!")
        .text("Done!")
        .calls(&[("now", "{}"), ("weather", "{\"city\": \"Oslo\"}")]),
    qwen("<tool_call>\n<function=typed>\n<parameter=maybe_list>\n[\"a\", 1, true]\n</parameter>\n<parameter=maybe_text>None</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"maybe_list\": [\"a\", 1, true], \"maybe_text\": \"None\"}")]),
    // An object in quotes is a text; vLLM takes it out of them.
    qwen("<tool_call>\n<function=typed>\n<parameter=shape>\n\"{'k': 1}\"\n</parameter>\n</function>\n</tool_call>")
        .calls(&[("typed", "{\"shape\": \"\\\"{'k': 1}\\\"\"}")]),
    qwen("<tool_call><function=></function></tool_call>").text("<tool_call><function=></function></tool_call>"),
    qwen("<tool_call><function=func>").calls(&[("func", "")]).cut(),
];

pub const GLM: &[Case] = &[
    glm("A test").text("A test"),
    glm("a < b and c > d. done").text("a < b and c > d. done"),
    glm("<tool_call>forecast\n    <arg_key>city</arg_key>\n    <arg_value>Dallas</arg_value>\n    <arg_key>state</arg_key>\n    <arg_value>TX</arg_value>\n    </tool_call>")
        .calls(&[("forecast", "{\"city\": \"Dallas\", \"state\": \"TX\"}")]),
    glm("I see. <tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>")
        .text("I see.")
        .calls(&[("forecast", "{\"city\": \"Oslo\"}"), ("forecast", "{\"city\": \"Bonn\"}")]),
    glm("<think>I want it.</think>\n\nI get it.\n<tool_call>forecast\n<arg_key>day</arg_key>\n<arg_value>2025-08-01</arg_value>\n</tool_call>")
        .reasoning("I want it.")
        .text("I get it.")
        .calls(&[("forecast", "{\"day\": \"2025-08-01\"}")]),
    // Text between two calls is text; vLLM drops it when it does not stream.
    glm("First.\n\n<tool_call>now\n</tool_call>\n\nThen Bonn.\n\n<tool_call>now\n</tool_call>")
        .text("First.\n\nThen Bonn.")
        .calls(&[("now", "{}"), ("now", "{}")]),
    // All on one line, as GLM 4.7 writes it, without arguments too; SGLang wants a line break from GLM 4.5.
    glm("<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>zip</arg_key><arg_value>0150</arg_value></tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"0150\"}")]),
    glm("So.<tool_call>diff</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>")
        .text("So.")
        .calls(&[("diff", "{}"), ("weather", "{\"city\": \"Oslo\"}")]),
    glm("<tool_call>sum\n<arg_key>how</arg_key>\n<arg_value>add</arg_value>\n<arg_key>a</arg_key>\n<arg_value>42</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3.14</arg_value>\n<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n</tool_call>")
        .calls(&[("sum", "{\"how\": \"add\", \"a\": 42, \"b\": 3.14, \"on\": true}")]),
    glm("<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>    indented    </arg_value>\n</tool_call>").calls(&[("python", "{\"code\": \"    indented    \"}")]),
    glm("<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>C:\\Users\\t, say \"hi\"\nok</arg_value>\n</tool_call>")
        .calls(&[("python", "{\"code\": \"C:\\\\Users\\\\t, say \\\"hi\\\"\\nok\"}")]),
    glm("<tool_call>say\n<arg_key>it</arg_key>\n<arg_value>你好</arg_value>\n<arg_key>face</arg_key>\n<arg_value>🎉</arg_value>\n</tool_call>")
        .calls(&[("say", "{\"it\": \"你好\", \"face\": \"🎉\"}")]),
    glm("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>123</arg_value>\n</tool_call>").calls(&[("weather", "{\"city\": \"123\"}")]),
    glm("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a<b & </think> <tool_call></arg_value>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"a<b & </think> <tool_call>\"}")]),
    glm("<tool_call>typed<arg_key>maybe_text</arg_key><arg_value>123 Main St</arg_value><arg_key>shape</arg_key><arg_value>{\"a\": {\"b\": true}}</arg_value></tool_call>")
        .calls(&[("typed", "{\"maybe_text\": \"123 Main St\", \"shape\": {\"a\": {\"b\": true}}}")]),
    glm("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>1</arg_value>\n</tool_call><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"1\"}"), ("weather", "{\"city\": \"Bonn\"}")]),
    glm("<tool_call>todo<arg_key>all</arg_key><arg_value>[{\"id\": \"1\", \"do\": \"see C:\\\\Temp\\\\f and \\\\n\"}]</arg_value></tool_call>")
        .calls(&[("todo", "{\"all\": [{\"id\": \"1\", \"do\": \"see C:\\\\Temp\\\\f and \\\\n\"}]}")]),
    // Of a text, quotes are some, and digits with underscores. SGLang drops such quotes, and reads what is no JSON as Python;
    // the grammar lets no such value come.
    glm("<tool_call>weather<arg_key>city</arg_key><arg_value>\"\\C|\\.\"</arg_value><arg_key>zip</arg_key><arg_value>123_456</arg_value></tool_call>")
        .calls(&[("weather", "{\"city\": \"\\\"\\\\C|\\\\.\\\"\", \"zip\": \"123_456\"}")]),
    glm("<tool_call>typed<arg_key>shape</arg_key><arg_value>{'p': '\\d+'}</arg_value><arg_key>other</arg_key><arg_value>1_000.5</arg_value></tool_call>")
        .calls(&[("typed", "{\"shape\": \"{'p': '\\\\d+'}\", \"other\": \"1_000.5\"}")]),
    glm("<tool_call>todo<arg_key>all</arg_key><arg_value>[{\\\"id\\\": 1}]</arg_value></tool_call>")
        .calls(&[("todo", "{\"all\": \"[{\\\\\\\"id\\\\\\\": 1}]\"}")]),
    glm("<tool_call>parts<arg_key>kind</arg_key><arg_value>sent</arg_value><arg_key>payload</arg_key><arg_value>{\"value\": \"hello\"}</arg_value></tool_call>")
        .calls(&[("parts", "{\"kind\": \"sent\", \"payload\": {\"value\": \"hello\"}}")]),
    glm("<think>I read it.</think><tool_call>read_diff</tool_call>").reasoning("I read it.").calls(&[("read_diff", "{}")]),
    glm("I do.<tool_call>nested<arg_key>tags</arg_key><arg_value>[\"alpha\", \"测试\"]</arg_value><arg_key>rows</arg_key><arg_value>[{\"id\": 1, \"o\": {\"on\": true}}]</arg_value></tool_call><tool_call>empty</tool_call>\nIt is done.")
        .text("I do.\nIt is done.")
        .calls(&[("nested", "{\"tags\": [\"alpha\", \"测试\"], \"rows\": [{\"id\": 1, \"o\": {\"on\": true}}]}"), ("empty", "{}")]),
    // A key that is not closed goes on to where its value begins.
    glm("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>zip\n<arg_value>1</arg_value>\n</tool_call>")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"1\"}")]),
    // A call without its end is one that was cut off; vLLM gives the text.
    glm("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>0150</arg_value>")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"0150\"")])
        .cut(),
    glm("<tool_call>wea").text("<tool_call>wea"),
    glm("<tool_call>   ").text("<tool_call>   "),
    glm("<tool_call></tool_call>").text("<tool_call></tool_call>"),
    glm("I help.<tool_call>").text("I help.<tool_call>"),
];

pub const SEED: &[Case] = &[
    seed("Hello, world!").text("Hello, world!"),
    seed("<seed:tool_call>\n<function=special>\n<parameter=arg>\n42\n</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("special", "{\"arg\": 42}")]),
    seed("<seed:tool_call>\n<function=process>\n<parameter=input>test</parameter>\n<parameter=format>json</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("process", "{\"input\": \"test\", \"format\": \"json\"}")]),
    seed("<seed:tool_call>\n<function=typed>\n<parameter=count>1</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=typed>\n<parameter=count>1</parameter>\n<parameter=maybe_count>2</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("typed", "{\"count\": 1}"), ("typed", "{\"count\": 1, \"maybe_count\": 2}")]),
    seed("<seed:tool_call>\n<function=todo>\n<parameter=all>[{\"do\": \"tea\", \"done\": false}, {\"do\": \"nap\", \"done\": true}]</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("todo", "{\"all\": [{\"do\": \"tea\", \"done\": false}, {\"do\": \"nap\", \"done\": true}]}")]),
    // A line break at the end of a text is none of it; llama.cpp keeps it.
    seed("<seed:tool_call>\n<function=python>\n<parameter=code>def f(a = \"14\"):\n    return a + \"b\"\n</parameter>\n</function>\n</seed:tool_call>")
        .calls(&[("python", "{\"code\": \"def f(a = \\\"14\\\"):\\n    return a + \\\"b\\\"\"}")]),
    // vLLM's `test_seed_oss_tool_parser.py`, whose parser leaves reasoning to another.
    seed("<seed:think>\n</seed:cot_budget_reflect>\nThere are no tokens left to think with.\n</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo, Norway</parameter>\n</function>\n</seed:tool_call>")
        .reasoning("\n</seed:cot_budget_reflect>\nThere are no tokens left to think with.\n")
        .calls(&[("weather", "{\"city\": \"Oslo, Norway\"}")]),
    seed("<seed:think>Some.\n<seed:cot_budget_reflect>131 tokens used, 381 left.</seed:cot_budget_reflect>\n More.</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>")
        .reasoning("Some.\n<seed:cot_budget_reflect>131 tokens used, 381 left.</seed:cot_budget_reflect>\n More.")
        .calls(&[("weather", "{\"city\": \"Oslo\"}")]),
    seed("<seed:think>\nIt is <seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>. Yes?</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=zip>1</parameter>\n</function>\n</seed:tool_call>")
        .reasoning("\nIt is <seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>. Yes?")
        .calls(&[("weather", "{\"city\": \"Oslo\", \"zip\": \"1\"}")]),
    // llama.cpp's.
    seed("<seed:think>I think of it</seed:think>\nGood day!").reasoning("I think of it").text("Good day!"),
];
