//! Answers that other engines' parsers are tried with, and what is in them; where we read another thing, it says so.

mod deepseek;
mod hermes;
mod mistral;
mod parameters;
pub mod reasoning;

/// An answer and its parts.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub format: &'static str,
    /// The prompt ends within reasoning.
    pub thinks: bool,
    pub answer: &'static str,
    pub reasoning: &'static str,
    pub text: &'static str,
    /// Names and arguments.
    pub calls: &'static [(&'static str, &'static str)],
    /// How many of the calls are not complete.
    pub num_cut: usize,
}

const fn case(format: &'static str, answer: &'static str) -> Case {
    Case { format, thinks: false, answer, reasoning: "", text: "", calls: &[], num_cut: 0 }
}

impl Case {
    /// Behind a prompt that has opened reasoning.
    const fn opened(self) -> Self {
        Self { thinks: true, ..self }
    }

    const fn reasoning(self, reasoning: &'static str) -> Self {
        Self { reasoning, ..self }
    }

    const fn text(self, text: &'static str) -> Self {
        Self { text, ..self }
    }

    const fn calls(self, calls: &'static [(&'static str, &'static str)]) -> Self {
        Self { calls, ..self }
    }

    /// Not all of the calls are complete.
    const fn cut(self) -> Self {
        Self { num_cut: 1, ..self }
    }
}

const fn harmony(answer: &'static str) -> Case {
    case("harmony", answer)
}

const fn pythonic(answer: &'static str) -> Case {
    case("pythonic", answer)
}

const fn gemma4(answer: &'static str) -> Case {
    case("gemma4", answer)
}

const fn functiongemma(answer: &'static str) -> Case {
    case("functiongemma", answer)
}

const fn functools(answer: &'static str) -> Case {
    case("phi4-mini-functools", answer)
}

const fn granite(answer: &'static str) -> Case {
    case("granite3.1", answer)
}

const fn llama3(answer: &'static str) -> Case {
    case("llama3-json", answer)
}

const fn llama4(answer: &'static str) -> Case {
    case("llama4-json", answer)
}

/// llama.cpp's `test-chat.cpp`, vLLM's `test_openai_tool_parser.py`, SGLang's detector of gpt-oss.
const HARMONY: &[Case] = &[
    harmony("<|channel|>analysis<|message|>I'm\nthink").reasoning("I'm\nthink"),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|>").reasoning("I'm\nthinking"),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>final<|message|>Hello, world!\nWhat's up?")
        .reasoning("I'm\nthinking")
        .text("Hello, world!\nWhat's up?"),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary to=functions.special_function <|constrain|>json<|message|>{\"arg1")
        .reasoning("I'm\nthinking")
        .calls(&[("special_function", "{\"arg1")])
        .cut(),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary to=functions.special_function<|message|>{\"arg1")
        .reasoning("I'm\nthinking")
        .calls(&[("special_function", "{\"arg1")])
        .cut(),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary to=functions.special_function <|constrain|>json<|message|>{\"arg1\": 1}")
        .reasoning("I'm\nthinking")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>analysis to=functions.special_function <|constrain|>json<|message|>{\"arg1\": 1}")
        .reasoning("I'm\nthinking")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary<|message|>Hello, world!\nWhat's up?")
        .reasoning("I'm\nthinking")
        .text("Hello, world!\nWhat's up?"),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>commentary<|message|>Hello, world!\nWhat's up?<|end|><|start|>assistant<|channel|>commentary to=functions.special_function <|constrain|>json<|message|>{\"arg1\": 1}<|call|>")
        .reasoning("I'm\nthinking")
        .text("Hello, world!\nWhat's up?")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony(" to=functions.special_function<|channel|>commentary <|constrain|>json<|message|>{\"arg1\": 1}")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony(" to=functions.special_function<|channel|>analysis <|constrain|>json<|message|>{\"arg1\": 1}<|call|>")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony("<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant to=functions.special_function<|channel|>analysis <|constrain|>json<|message|>{\"arg1\": 1}")
        .reasoning("I'm\nthinking")
        .calls(&[("special_function", "{\"arg1\": 1}")]),
    harmony("<|channel|>final<|message|>This is a test<|return|>").text("This is a test"),
    harmony("<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{\"location\": \"Tokyo\"}<|call|>")
        .calls(&[("get_weather", "{\"location\": \"Tokyo\"}")]),
    // vLLM writes the arguments anew; here they are the model's own.
    harmony("<|channel|>commentary to=functions.get_weather json<|message|>{\n\"location\": \"Tokyo\"\n}<|call|>")
        .calls(&[("get_weather", "{\n\"location\": \"Tokyo\"\n}")]),
    // Empty arguments are `{}`, where vLLM leaves them empty.
    harmony("<|channel|>commentary to=functions.empty_args json<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.no_args json<|message|><|call|>")
        .calls(&[("empty_args", "{}"), ("no_args", "{}")]),
    // What is no JSON is given out, as vLLM does, and makes no complete call.
    harmony("<|channel|>commentary to=functions.not_json<|message|>foo<|call|>").calls(&[("not_json", "foo")]).cut(),
    harmony("<|channel|>commentary to=functions.get_weather json<|message|>{\"location\": \"Tokyo\"}<|call|><|start|>assistant<|channel|>final<|message|>This tool call will get the weather.<|return|>")
        .text("This tool call will get the weather.")
        .calls(&[("get_weather", "{\"location\": \"Tokyo\"}")]),
    // A built-in tool that was not offered.
    harmony("<|channel|>commentary to=browser.search<|message|>{\"q\": 1}<|call|>").reasoning("{\"q\": 1}"),
    // The prefix is missing before the name of a tool that is offered.
    harmony("<|channel|>commentary to=weather<|message|>{}<|call|>").calls(&[("weather", "{}")]),
    harmony("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>").reasoning("One.\nTwo."),
    // The end of a message is missing.
    harmony("<|channel|>analysis<|message|>So.<|start|>assistant<|channel|>final<|message|>Yes").reasoning("So.").text("Yes"),
    harmony("Hello, no channel").text("Hello, no channel"),
    harmony("to be <|or").text("to be <|or"),
    harmony("<|channel|>final").text(""),
    // SGLang's `test_harmony_parser.py` and `test_gptoss_detector.py`: a word between two calls is text, which SGLang
    // drops. An answer goes on behind no call, so that there is no such word.
    harmony("<|channel|>analysis<|message|>I need it<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"x\":1}<|call|>commentary<|channel|>commentary to=functions.g<|message|>{\"x\":2}<|call|>comment<|channel|>analysis<|message|>No answer<|end|><|start|>assistant<|channel|>final<|message|>I cannot.<|return|>")
        .reasoning("I need it\nNo answer")
        .text("commentary\ncomment\nI cannot.")
        .calls(&[("f", "{\"x\":1}"), ("g", "{\"x\":2}")]),
    harmony("I look. <|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{\"x\":1}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|constrain|>json<|message|>{}<|call|>")
        .text("I look. ")
        .calls(&[("f", "{\"x\":1}"), ("g", "{}")]),
    // Text that is in no message is text too, with a line break before each further one.
    harmony("One <|channel|>analysis<|message|>why<|end|> two <|start|>assistant<|channel|>final<|message|>three<|return|>")
        .reasoning("why")
        .text("One \n two \nthree"),
    harmony("<|channel|>analysis<|message|>A long chain<|end|><|start|>assistant<|channel|>commentary<|message|>**Plan**: 1. A file 2. A server<|end|><|start|>assistant<|channel|>commentary to=functions.write<|message|>{\"form\": \"html\"}<|call|>")
        .reasoning("A long chain")
        .text("**Plan**: 1. A file 2. A server")
        .calls(&[("write", "{\"form\": \"html\"}")]),
    harmony("<|channel|>analysis<|message|>first<|end|><|channel|>analysis<|message|>second<|end|>").reasoning("first\nsecond"),
    harmony("<|channel|>analysis<|message|>  with spaces  <|end|>").reasoning("  with spaces  "),
    harmony("see <|weird|> more <|channel|>analysis<|message|>why<|end|>").reasoning("why").text("see <|weird|> more "),
    harmony("<|broken without an end").text("<|broken without an end"),
    harmony("<|end|><|start|><|channel|>final<|message|>yes<|end|>").text("yes"),
    harmony("<|start|><|channel|>analysis<|message|>why<|end|><|channel|>final<|message|>yes<|end|>").reasoning("why").text("yes"),
    // A channel that is not known is text; SGLang waits for another.
    harmony("<|channel|>unknown<|message|>some words<|end|>").text("some words"),
    // Text between the ends of messages is text, where SGLang takes it for a call.
    harmony("<|start|><|channel|>analysis<|message|>why<|end|><|call|>words<|return|><|channel|>final<|message|>yes<|end|>")
        .reasoning("why")
        .text("words\nyes"),
    harmony("<|channel|>analysis to=functions.f<|message|>{\"x\": 1}").calls(&[("f", "{\"x\": 1}")]),
    harmony("<|channel|>analysis<|message|>I edit.<|end|><|start|>assistant<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{\"old\": \"if (a < b - 1) {\", \"all\": false}")
        .reasoning("I edit.")
        .calls(&[("edit", "{\"old\": \"if (a < b - 1) {\", \"all\": false}")]),
    harmony("<|channel|>analysis<|message|>I write it.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{\"amount\": 123.45}")
        .reasoning("I write it.")
        .text("{\"amount\": 123.45}"),
    // Tools that were not offered; llama.cpp drops what is said to them.
    harmony("<|channel|>analysis<|message|>I run it.<|end|><|start|>assistant to=container.exec<|channel|>commentary<|message|>echo hey")
        .reasoning("I run it.\necho hey"),
    harmony("<|channel|>commentary to=browser <|constrain|>code<|message|>open(1)").reasoning("open(1)"),
    // A header that is begun twice is what its last channel says.
    harmony("<|channel|>commentary to=assistant<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>yes")
        .reasoning("why")
        .text("yes"),
    harmony("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=assistant<|channel|>final<|message|>yes")
        .reasoning("why")
        .text("yes"),
    harmony("<|channel|>final to=user<|message|>yes").text("yes"),
    // What the model takes for a result that it has got is its own thought; for SGLang it is text.
    harmony("<|start|>functions.weather to=assistant<|message|>{\"sunny\": true}<|end|>").reasoning("{\"sunny\": true}"),
    harmony("<|channel|>analysis<|message|><|end|>"),
    harmony("all is said <|ret").text("all is said <|ret"),
    // Without its tokens it is text; SGLang looks for the names of channels in it.
    harmony("analysisI think so.assistantfinalYes.").text("analysisI think so.assistantfinalYes."),
];

/// vLLM's `test_pythonic_tool_parser.py` and `test_llama4_pythonic_tool_parser.py`.
const PYTHONIC: &[Case] = &[
    pythonic("How can I help you today?").text("How can I help you today?"),
    pythonic("[get_weather(city='San Francisco', metric='celsius')]")
        .calls(&[("get_weather", "{\"city\": \"San Francisco\", \"metric\": \"celsius\"}")]),
    pythonic("[register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None, passed_test=True, aliases=['John', 'Johnny'])]")
        .calls(&[("register_user", "{\"name\": \"John Doe\", \"age\": 37, \"address\": {\"city\": \"San Francisco\", \"state\": \"CA\"}, \"role\": null, \"passed_test\": true, \"aliases\": [\"John\", \"Johnny\"]}")]),
    pythonic("[get_weather()]").calls(&[("get_weather", "{}")]),
    pythonic("[do_something_cool(additional_data={})]").calls(&[("do_something_cool", "{\"additional_data\": {}}")]),
    pythonic("[do_something_cool(steps=[])]").calls(&[("do_something_cool", "{\"steps\": []}")]),
    pythonic("[get_weather(city='Martha\\'s Vineyard', metric='\\\"cool units\\\"')]")
        .calls(&[("get_weather", "{\"city\": \"Martha's Vineyard\", \"metric\": \"\\\"cool units\\\"\"}")]),
    pythonic("[get_weather(city='LA',metric='C'),register_user(name='Doe',age=9)]")
        .calls(&[("get_weather", "{\"city\": \"LA\", \"metric\": \"C\"}"), ("register_user", "{\"name\": \"Doe\", \"age\": 9}")]),
    pythonic("<|python_start|>[get_weather(city='LA', metric='C')]<|python_end|>")
        .calls(&[("get_weather", "{\"city\": \"LA\", \"metric\": \"C\"}")]),
    pythonic("<|python_start|>[get_weather(city='LA', metric='C'), get_weather(), do_something_cool(steps=[])]")
        .calls(&[("get_weather", "{\"city\": \"LA\", \"metric\": \"C\"}"), ("get_weather", "{}"), ("do_something_cool", "{\"steps\": []}")]),
    // Where vLLM drops what it cannot read, a call that was streamed stays, and is not complete.
    pythonic("[bad(x=b'z'), get_weather()]").text(", get_weather()]").calls(&[("bad", "{\"x\": ")]).cut(),
    pythonic("[foo(x=1])]").text("]").calls(&[("foo", "{\"x\": ")]).cut(),
    // A number that is too large is JSON all the same.
    pythonic("[calc(x=1e999)]").calls(&[("calc", "{\"x\": 1e999}")]),
    pythonic("[calc(x=-.5, y=5., z=+1, big=1E+3)]").calls(&[("calc", "{\"x\": -0.5, \"y\": 5.0, \"z\": 1, \"big\": 1E+3}")]),
    pythonic("[f(a=\"tab\\tquote\\\"\", b='\\x41\\u00e9\\ud83d\\ude00\\101', c='no \\d escape', d='\\ud83d')]")
        .calls(&[("f", "{\"a\": \"tab\\tquote\\\"\", \"b\": \"A\u{e9}\u{1f600}A\", \"c\": \"no \\\\d escape\", \"d\": \"\u{fffd}\"}")]),
    pythonic("[f(a=[1, 2,], b={\"k\": [{'x': False}],},)]").calls(&[("f", "{\"a\": [1, 2], \"b\": {\"k\": [{\"x\": false}]}}")]),
    pythonic("[f(s='a)]}, b=1')]").calls(&[("f", "{\"s\": \"a)]}, b=1\"}")]),
    pythonic("[f(a='cut off").calls(&[("f", "{\"a\": \"cut off")]).cut(),
    pythonic("[1, 2] is a list").text("[1, 2] is a list"),
    pythonic("[a link](there)").text("[a link](there)"),
    pythonic("[]").text("[]"),
    pythonic("<|python_start|>print(1)").text("<|python_start|>print(1)"),
    // SGLang's `test_pythonic_detector_finish.py`.
    pythonic("so [f(x=").text("so [f(x="),
    pythonic("so much for text").text("so much for text"),
    // llama.cpp's LFM2, whose calls stand between markers of its own.
    pythonic("[Calendar.create_event(title=\"demo\", with=[\"Kim\", \"Lee\"], how={\"loud\": True})]")
        .calls(&[("Calendar.create_event", "{\"title\": \"demo\", \"with\": [\"Kim\", \"Lee\"], \"how\": {\"loud\": true}}")]),
    pythonic("[f(o={\"on\": true, \"note\": null})]").calls(&[("f", "{\"o\": {\"on\": true, \"note\": null}}")]),
    pythonic("Write it so: [a text](url). As in [a page](https://a.b).").text("Write it so: [a text](url). As in [a page](https://a.b)."),
    pythonic("[f(code=\"def f():\\n\\tprint(\\\"hi\\\")\")]").calls(&[("f", "{\"code\": \"def f():\\n\\tprint(\\\"hi\\\")\"}")]),
    pythonic("[f(arg=").calls(&[("f", "{\"arg\": ")]).cut(),
    pythonic("Then f(x=1)").text("Then f(x=1)"),
    // SGLang's `test_function_call_parser.py` and `test_pythonic_detector.py`: calls begin an answer, where SGLang takes lists of
    // them anywhere.
    pythonic("Here it is: [f(x='Oslo')]").text("Here it is: [f(x='Oslo')]"),
    pythonic("[f(x='Oslo')] Here is the sky:").text("Here is the sky:").calls(&[("f", "{\"x\": \"Oslo\"}")]),
    pythonic("[f(x='Oslo')] and [g(y='tea')]").text("and [g(y='tea')]").calls(&[("f", "{\"x\": \"Oslo\"}")]),
    pythonic("<|python_start|>[f(x='Mars', l=[1, 2, 3])]<|python_end|> So.").text("So.").calls(&[("f", "{\"x\": \"Mars\", \"l\": [1, 2, 3]}")]),
    pythonic("[f(x='Oslo', l=[10, 20]), g(q='t', o={'k': [1, 2], 'n': {'a': 'b'}})]")
        .calls(&[("f", "{\"x\": \"Oslo\", \"l\": [10, 20]}"), ("g", "{\"q\": \"t\", \"o\": {\"k\": [1, 2], \"n\": {\"a\": \"b\"}}}")]),
    pythonic("[f(q=\"\\d+\", from=1, n=+7)]").calls(&[("f", "{\"q\": \"\\\\d+\", \"from\": 1, \"n\": 7}")]),
    pythonic("[f(q='one\ntwo')]").calls(&[("f", "{\"q\": \"one\\ntwo\"}")]),
    pythonic("[f(q='what\\'s it?', p='a]b')]").calls(&[("f", "{\"q\": \"what's it?\", \"p\": \"a]b\"}")]),
    // Arguments without names and values without a text are no call that is complete.
    pythonic("[f('Oslo')]").text("]").calls(&[("f", "{")]).cut(),
    pythonic("[f(x=)]").text("]").calls(&[("f", "{\"x\": ")]).cut(),
];

/// vLLM's `test_gemma4_tool_parser.py`.
const GEMMA4: &[Case] = &[
    gemma4("Hello, how can I help you today?").text("Hello, how can I help you today?"),
    gemma4("<|tool_call>call:get_weather{location:<|\"|>London<|\"|>}<tool_call|>")
        .calls(&[("get_weather", "{\"location\": \"London\"}")]),
    gemma4("<|tool_call>call:get_weather{location:<|\"|>San Francisco<|\"|>,unit:<|\"|>celsius<|\"|>}<tool_call|>")
        .calls(&[("get_weather", "{\"location\": \"San Francisco\", \"unit\": \"celsius\"}")]),
    gemma4("Let me check the weather for you. <|tool_call>call:get_weather{location:<|\"|>Paris, France<|\"|>}<tool_call|>")
        .text("Let me check the weather for you.")
        .calls(&[("get_weather", "{\"location\": \"Paris, France\"}")]),
    gemma4("<|tool_call>call:get_weather{location:<|\"|>London<|\"|>}<tool_call|><|tool_call>call:get_time{location:<|\"|>London<|\"|>}<tool_call|>")
        .calls(&[("get_weather", "{\"location\": \"London\"}"), ("get_time", "{\"location\": \"London\"}")]),
    gemma4("<|tool_call>call:complex_function{nested:{inner:<|\"|>value<|\"|>},list:[<|\"|>a<|\"|>,<|\"|>b<|\"|>]}<tool_call|>")
        .calls(&[("complex_function", "{\"nested\": {\"inner\": \"value\"}, \"list\": [\"a\", \"b\"]}")]),
    gemma4("<|tool_call>call:set_status{is_active:true,count:42,score:3.14,param:null}<tool_call|>")
        .calls(&[("set_status", "{\"is_active\": true, \"count\": 42, \"score\": 3.14, \"param\": null}")]),
    // A call that is cut off is given out as far as it has come; vLLM gives it as text when it does not stream.
    gemma4("<|tool_call>call:get_weather{location:<|\"|>London").calls(&[("get_weather", "{\"location\": \"London")]).cut(),
    gemma4("<|tool_call>call:get-weather{location:<|\"|>London<|\"|>}<tool_call|>").calls(&[("get-weather", "{\"location\": \"London\"}")]),
    gemma4("<|tool_call>call:weather.get{location:<|\"|>London<|\"|>}<tool_call|>").calls(&[("weather.get", "{\"location\": \"London\"}")]),
    gemma4("<|tool_call>call:get_status{}<tool_call|>").calls(&[("get_status", "{}")]),
    gemma4("<|tool_call>call:f{record_map:{<|\"|>3<|\"|>:<|\"|>new text<|\"|>}}<tool_call|>")
        .calls(&[("f", "{\"record_map\": {\"3\": \"new text\"}}")]),
    gemma4("<|tool_call>call:f{key:}<tool_call|>").calls(&[("f", "{\"key\": \"\"}")]),
    gemma4("<|tool_call>call:f{left:108.,right:22.8}<tool_call|>").calls(&[("f", "{\"left\": 108.0, \"right\": 22.8}")]),
    gemma4("<|tool_call>call:f{city:New York, n:007}<tool_call|>").calls(&[("f", "{\"city\": \"New York\", \"n\": \"007\"}")]),
    gemma4("<|tool_call>call:f{list:[[<|\"|>a]b<|\"|>,<|\"|>c<|\"|>],<|\"|>tail<|\"|>]}<tool_call|>")
        .calls(&[("f", "{\"list\": [[\"a]b\", \"c\"], \"tail\"]}")]),
    gemma4("<|tool_call>call:todowrite{content:<|\"|>Buy <|milk \"now\"\n<|\"|>}<tool_call|>")
        .calls(&[("todowrite", "{\"content\": \"Buy <|milk \\\"now\\\"\\n\"}")]),
    gemma4("<|tool_call>call:get_weather{location:<|\"|>Paris<|\"|>}<tool_call|><div>")
        .text("<div>")
        .calls(&[("get_weather", "{\"location\": \"Paris\"}")]),
    gemma4("<|tool_call>call:Edit{file_path:<|\"|>src/env.py<|\"|>,replace_all:false}<tool_call|>")
        .calls(&[("Edit", "{\"file_path\": \"src/env.py\", \"replace_all\": false}")]),
    // llama.cpp's `test-chat.cpp`.
    gemma4("<|tool_call>call:f{a:-7,b:1.5e10,c:[],d:{},e:{t:<|\"|>dark<|\"|>,n:3}}<tool_call|>")
        .calls(&[("f", "{\"a\": -7, \"b\": 1.5e10, \"c\": [], \"d\": {}, \"e\": {\"t\": \"dark\", \"n\": 3}}")]),
    // Its line break is some of the marker, which llama.cpp does without.
    gemma4("<|channel>thought<channel|>At once.").text("<|channel>thought<channel|>At once."),
    gemma4("<|channel>thought\nWhy?<channel|><|tool_call>call:f{x:1}<tool_call|>").reasoning("Why?").calls(&[("f", "{\"x\": 1}")]),
    gemma4("<|tool_call>call:f{at:<|\"|>New York<|\"|>,l:[1, 2, {k:<|\"|>v<|\"|>}],url:<|\"|>http://a.b<|\"|>}<tool_call|>")
        .calls(&[("f", "{\"at\": \"New York\", \"l\": [1, 2, {\"k\": \"v\"}], \"url\": \"http://a.b\"}")]),
    // Text between two calls is text, which SGLang drops when it does not stream.
    gemma4("Hi! <|tool_call>call:f{x:<|\"|>a<|\"|>}<tool_call|> I see too <|tool_call>call:g{y:<|\"|>b<|\"|>}<tool_call|>")
        .text("Hi! I see too")
        .calls(&[("f", "{\"x\": \"a\"}"), ("g", "{\"y\": \"b\"}")]),
    gemma4("Some <|tool_call>call:f{x:<|\"|>Oslo<|\"|>}<tool_call|> after").text("Some after").calls(&[("f", "{\"x\": \"Oslo\"}")]),
    gemma4("<|tool_call>call:f{   }<tool_call|>").calls(&[("f", "{}")]),
    gemma4("<|channel>thought\nStill at it").reasoning("Still at it"),
    // A marker that is out of place is text, as it is spelled; llama.cpp drops it.
    gemma4("<|channel><|channel>thought\n<channel|>So.").text("<|channel><|channel>thought\n<channel|>So."),
    gemma4("<|channel>thought\n<channel|>So.<channel|>").text("So.<channel|>"),
    gemma4("<|channel>thought\n<channel|>So.<|channel>thought\n<channel|>").text("So.<|channel>thought\n<channel|>"),
    // SGLang's `test_gemma4_detector_string_delimiters.py`: the marker that opens a text is missing. The grammar has it; a value
    // ends at a comma, and a marker at its end is some of it, while SGLang looks ahead for it.
    gemma4("<|tool_call>call:f{query:[<|\"|>a<|\"|>,b]}<tool_call|>").calls(&[("f", "{\"query\": [\"a\", \"b\"]}")]),
    gemma4("<|tool_call>call:f{query:snow in Oslo<|\"|>}<tool_call|>").calls(&[("f", "{\"query\": \"snow in Oslo<|\\\"|>\"}")]),
    gemma4("<|channel>thought\nWhy?<channel|>Because.").reasoning("Why?").text("Because."),
    gemma4("<|channel>thought\n<channel|>\n<|tool_call>call:f{}<tool_call|>").calls(&[("f", "{}")]),
    // SGLang's `test_gemma4_detector_finish.py`: what is cut off is a call as far as it has come, which is text there.
    gemma4("so <|tool_call>call:get_weather{city:").text("so").calls(&[("get_weather", "{\"city\": ")]).cut(),
    gemma4("<|tool_call>call:get_weather{city: 'Oslo'}<tool_call|>").calls(&[("get_weather", "{\"city\": \"'Oslo'\"}")]),
    gemma4("<|channel>thought\nA <|tool_call>call:f{}<tool_call|>").reasoning("A <|tool_call>call:f{}<tool_call|>"),
];

/// vLLM's `test_functiongemma_tool_parser.py`.
const FUNCTIONGEMMA: &[Case] = &[
    functiongemma("Hello, how can I help you today?").text("Hello, how can I help you today?"),
    functiongemma("<start_function_call>call:get_weather{location:<escape>London<escape>}<end_function_call>")
        .calls(&[("get_weather", "{\"location\": \"London\"}")]),
    functiongemma("<start_function_call>call:get_weather{location:<escape>San Francisco<escape>,unit:<escape>celsius<escape>}<end_function_call>")
        .calls(&[("get_weather", "{\"location\": \"San Francisco\", \"unit\": \"celsius\"}")]),
    functiongemma("Let me check the weather for you. <start_function_call>call:get_weather{location:<escape>Paris<escape>}<end_function_call>")
        .text("Let me check the weather for you.")
        .calls(&[("get_weather", "{\"location\": \"Paris\"}")]),
    functiongemma("<start_function_call>call:get_weather{location:<escape>London<escape>}<end_function_call><start_function_call>call:get_time{timezone:<escape>UTC<escape>}<end_function_call>")
        .calls(&[("get_weather", "{\"location\": \"London\"}"), ("get_time", "{\"timezone\": \"UTC\"}")]),
    functiongemma("<start_function_call>call:f{}<end_function_call>").calls(&[("f", "{}")]),
    functiongemma("<start_function_call>call:f{count:42,enabled:true,temperature:26.5}<end_function_call>")
        .calls(&[("f", "{\"count\": 42, \"enabled\": true, \"temperature\": 26.5}")]),
    // What is quoted is a text, where vLLM makes a number of it.
    functiongemma("<start_function_call>call:f{count:<escape>42<escape>,enabled:<escape>true<escape>}<end_function_call>")
        .calls(&[("f", "{\"count\": \"42\", \"enabled\": \"true\"}")]),
    functiongemma("<start_function_call>call:f{message:<escape>Hello {a, b}: World<escape>}<end_function_call>")
        .calls(&[("f", "{\"message\": \"Hello {a, b}: World\"}")]),
    functiongemma("<start_function_call>call:search{query:<escape>python<escape>limit:10,sort:<escape>relevance<escape>}<end_function_call>")
        .calls(&[("search", "{\"query\": \"python\", \"limit\": 10, \"sort\": \"relevance\"}")]),
    functiongemma("<start_function_call>call:f{list:[<escape>a<escape>,<escape>b<escape>],o:{k:null}}<end_function_call>")
        .calls(&[("f", "{\"list\": [\"a\", \"b\"], \"o\": {\"k\": null}}")]),
    functiongemma("<start_function_call>call:get_weather{ci").calls(&[("get_weather", "{")]).cut(),
    functiongemma("<start_function_").text("<start_function_"),
    functiongemma("<start_function_call>call:two words{}").text("<start_function_call>call:two words{}"),
];

/// vLLM's `test_phi4mini_tool_parser.py`.
const FUNCTOOLS: &[Case] = &[
    functools("This is a regular response without any tool calls.").text("This is a regular response without any tool calls."),
    functools("functools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Tokyo\"}}]")
        .calls(&[("get_weather", "{\"city\": \"Tokyo\"}")]),
    functools("functools[\n  {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Tokyo\"}},\n  {\"name\": \"get_time\", \"arguments\": {\"timezone\": \"Asia/Tokyo\"}}\n]")
        .calls(&[("get_weather", "{\"city\": \"Tokyo\"}"), ("get_time", "{\"timezone\": \"Asia/Tokyo\"}")]),
    functools("functools[{\n  \"name\": \"test_function\",\n  \"arguments\": {\"n\": null, \"l\": [\"a\"], \"o\": {\"nested\": \"value\"}, \"e\": {}}\n}]")
        .calls(&[("test_function", "{\"n\": null, \"l\": [\"a\"], \"o\": {\"nested\": \"value\"}, \"e\": {}}")]),
    functools("functools[{\"name\": \"refresh\", \"arguments\": {}}]").calls(&[("refresh", "{}")]),
    functools("Let me check the weather for you.\nfunctools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Tokyo\"}}]\nWould you like to know more?")
        .text("Let me check the weather for you.\nWould you like to know more?")
        .calls(&[("get_weather", "{\"city\": \"Tokyo\"}")]),
    functools("functools[{\"name\": \"t\", \"arguments\": {\"quoted\": \"He said \\\"hello\\\"\", \"path\": \"C:\\\\Users\"}}]")
        .calls(&[("t", "{\"quoted\": \"He said \\\"hello\\\"\", \"path\": \"C:\\\\Users\"}")]),
    functools("functools[{\"name\": \"func\", \"arguments\": {").calls(&[("func", "{")]).cut(),
    functools("functools{\"name\": \"func\"}").text("functools{\"name\": \"func\"}"),
    // Arguments may be missing: there are none.
    functools("functools[{\"name\": \"func\"}]").calls(&[("func", "{}")]),
    functools("functools[] This is just text").text("functools[] This is just text"),
    functools("functools[ This is just text ]").text("functools[ This is just text ]"),
    functools("Use functools.partial").text("Use functools.partial"),
    functools(" functools[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]").calls(&[("f", "{\"x\": 1}")]),
];

/// vLLM's `test_granite_tool_parser.py`: the spelling of 3.1.
const GRANITE: &[Case] = &[
    granite("This is a regular response without any tool calls.").text("This is a regular response without any tool calls."),
    granite("<tool_call> [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Tokyo\"}}]").calls(&[("get_weather", "{\"city\": \"Tokyo\"}")]),
    granite("<tool_call>[\n  {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Tokyo\"}},\n  {\"name\": \"get_time\", \"arguments\": {\"timezone\": \"Asia/Tokyo\"}}\n]")
        .calls(&[("get_weather", "{\"city\": \"Tokyo\"}"), ("get_time", "{\"timezone\": \"Asia/Tokyo\"}")]),
    granite("<tool_call> [{\"arguments\": {\"city\": \"Tokyo\"}, \"name\": \"get_weather\"}, {\"arguments\": {\"timezone\": \"Asia/Tokyo\"}, \"name\": \"get_time\"}]")
        .calls(&[("get_weather", "{\"city\": \"Tokyo\"}"), ("get_time", "{\"timezone\": \"Asia/Tokyo\"}")]),
    granite("<tool_call> [{\"name\": \"refresh\", \"arguments\": {}}]").calls(&[("refresh", "{}")]),
    granite("Let me check.\n<tool_call> [{\"name\": \"a\", \"arguments\": {\"x\": 42}}, {\"name\": \"b\", \"arguments\": {\"y\": 7}}]")
        .text("Let me check.")
        .calls(&[("a", "{\"x\": 42}"), ("b", "{\"y\": 7}")]),
    granite("<tool_call> [{\"name\": \"func\", \"arguments\": {").calls(&[("func", "{")]).cut(),
    granite("<tool_call> [{\"name\": \"t\", \"arguments\": {\"quoted\": \"He said \\\"hello\\\"\", \"newline\": \"line1\\nline2\"}}]")
        .calls(&[("t", "{\"quoted\": \"He said \\\"hello\\\"\", \"newline\": \"line1\\nline2\"}")]),
    granite("[{\"name\": \"func\", \"arguments\": \"not a dict\"}]").text("[{\"name\": \"func\", \"arguments\": \"not a dict\"}]"),
    granite("Some text [{\"name\": \"func\"}]").text("Some text [{\"name\": \"func\"}]"),
];

/// vLLM's `test_llama3_json_tool_parser.py`.
const LLAMA: &[Case] = &[
    llama3("{\"name\": \"searchTool\", \"parameters\": {\"query\": \"test query\", \"limit\": 10}}")
        .calls(&[("searchTool", "{\"query\": \"test query\", \"limit\": 10}")]),
    llama3("<|python_tag|>{\"name\": \"searchTool\", \"parameters\": {}}").calls(&[("searchTool", "{}")]),
    llama3("<|python_tag|> {\"name\": \"searchTool\", \"arguments\": {\"query\": \"test\"}}").calls(&[("searchTool", "{\"query\": \"test\"}")]),
    llama3("<|python_tag|>print(1)").text("<|python_tag|>print(1)"),
    llama3("<|python_tag").text("<|python_tag"),
    llama3("This is just some text without any tool calls").text("This is just some text without any tool calls"),
    // A call begins an answer; vLLM finds it anywhere in a text.
    llama3("Here is the result: {\"name\": \"t\", \"parameters\": {}} Would you like to know more?")
        .text("Here is the result: {\"name\": \"t\", \"parameters\": {}} Would you like to know more?"),
    llama3("{\"name\": \"complexTool\", \"parameters\": {\"level1\": {\"level2\": {\"level3\": {\"level4\": {\"value\": \"deep\"}}}}}}")
        .calls(&[("complexTool", "{\"level1\": {\"level2\": {\"level3\": {\"level4\": {\"value\": \"deep\"}}}}}")]),
    llama3("{\"name\": \"searchTool\", \"parameters\": {\"query\": \"test {value} [complex]\",\"nested\": {\"inner\": \"more {brackets}\"}}}")
        .calls(&[("searchTool", "{\"query\": \"test {value} [complex]\",\"nested\": {\"inner\": \"more {brackets}\"}}")]),
    llama3("{\"name\": \"parserTool\", \"parameters\": {\"text\": \"He said \\\"Hello {world}\\\"\"}}")
        .calls(&[("parserTool", "{\"text\": \"He said \\\"Hello {world}\\\"\"}")]),
    llama3("{\"parameters\": {}}").text("{\"parameters\": {}}"),
    llama3("{\"name\": \"searchTool\", \"parameters\": {\"query\": \"test\"}} I used {searchTool} for this.")
        .text("I used {searchTool} for this.")
        .calls(&[("searchTool", "{\"query\": \"test\"}")]),
    // SGLang's `test_llama32_detector.py`: there is one call, which begins the answer, where SGLang takes several, anywhere.
    llama3("I look. <|python_tag|>{\"name\": \"f\", \"arguments\": {}}").text("I look. <|python_tag|>{\"name\": \"f\", \"arguments\": {}}"),
    llama3("<|python_tag|>{\"name\": \"f\", \"arguments\": {\"x\": 1}};{\"name\": \"g\", \"arguments\": {}}")
        .text(";{\"name\": \"g\", \"arguments\": {}}")
        .calls(&[("f", "{\"x\": 1}")]),
    llama3("<|python_tag|>{\"name\": \"f\", \"parameters\": {}}<|python_tag|>{\"name\": \"g\", \"parameters\": {}}")
        .text("<|python_tag|>{\"name\": \"g\", \"parameters\": {}}")
        .calls(&[("f", "{}")]),
    // SGLang's `test_llama32_detector_finish.py` and `test_streaming_unknown_tool_name.py`.
    llama3("so <|python_tag|>get_weather(city='O").text("so <|python_tag|>get_weather(city='O"),
    llama3("<|python_tag|>get_weather(city='Oslo')").text("<|python_tag|>get_weather(city='Oslo')"),
    llama3("<|python_tag|>{\"name\": \"unheard_of\", \"arguments\": {}};{\"name\": \"f\", \"arguments\": {}}")
        .text(";{\"name\": \"f\", \"arguments\": {}}")
        .calls(&[("unheard_of", "{}")]),
    llama3("{\"name\": \"f\", \"parameters\": {}} Some more words").text("Some more words").calls(&[("f", "{}")]),
    // What is not closed goes on, where SGLang looks for the next object.
    llama3("{\"name\": \"f\", \"parameters\": {{\"name\": \"f\", \"parameters\": {}}")
        .calls(&[("f", "{{\"name\": \"f\", \"parameters\": {}}")])
        .cut(),
    llama4("<|python_start|>{\"name\": \"a\", \"parameters\": {\"x\": 1}}<|python_end|>").calls(&[("a", "{\"x\": 1}")]),
    llama4("{\"name\": \"a\", \"parameters\": {}}").calls(&[("a", "{}")]),
    llama4("<|python_start|>{\"name\": \"a\", \"parameters\": {}}<|python_end").calls(&[("a", "{}")]).text("<|python_end"),
    llama4("Text <|python_start|>{}").text("Text <|python_start|>{}"),
];

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Case> {
    let here = [HARMONY, PYTHONIC, GEMMA4, FUNCTIONGEMMA, FUNCTOOLS, GRANITE, LLAMA];
    let others = [hermes::CASES, mistral::CASES, deepseek::CASES, parameters::QWEN, parameters::GLM, parameters::SEED];
    let coder = [parameters::ALONE, parameters::THINKING, parameters::WITHIN];
    here.into_iter().chain(others).chain(coder).flatten()
}
