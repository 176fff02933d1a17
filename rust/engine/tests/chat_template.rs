//! Chat templates against the reference prompts, and against templates that mean harm.

use std::{path::PathBuf, time::Duration};

use engine::{
    ChatTemplate, EngineError, Message, MessageContent, RenderOptions, Tokenizer,
    chat_template::{read_template, template_in_dir},
    tokenizer::SpecialTokens,
};
use serde_json::{Map, Value, json};

/// Folders of golden/text.
const MODELS: [&str; 9] =
    ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"];

fn golden(name: &str) -> PathBuf {
    goldens::dir().join("text").join(name)
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: MessageContent::Text(content.into()), media: Vec::new(), extra: Map::new() }
}

fn special_tokens() -> SpecialTokens {
    SpecialTokens { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..SpecialTokens::default() }
}

fn render_with(source: &str, messages: &[Message], options: &RenderOptions) -> Result<String, EngineError> {
    ChatTemplate::new(source, special_tokens())?.render(messages, options)
}

fn render(source: &str) -> Result<String, EngineError> {
    render_with(source, &[message("user", "Hi"), message("assistant", "Yes?")], &RenderOptions::default())
}

#[test]
fn golden_chats_have_the_golden_prompt_and_ids() {
    for name in MODELS {
        let dir = golden(name);
        let file: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).expect("file")).expect("JSON");
        let chat = &file["chat"];
        let messages: Vec<Message> = chat["messages"]
            .as_array()
            .expect("messages")
            .iter()
            .map(|m| message(m["role"].as_str().expect("role"), m["content"].as_str().expect("content")))
            .collect();
        let tokenizer = Tokenizer::from_hf_dir(&dir, None).expect("tokenizer");
        let source = template_in_dir(&dir).expect("readable").expect("there");
        let template = ChatTemplate::new(&source, tokenizer.special_tokens().clone()).expect("compiles");
        let prompt = template.render(&messages, &RenderOptions::default()).expect("prompt");
        assert_eq!(prompt, chat["prompt"], "{name}");
        let ids = tokenizer.encode(&prompt, false).expect("ids");
        assert_eq!(json!(ids), chat["prompt_ids"], "{name}");
    }
}

#[test]
fn python_idioms_work() {
    for (source, expected) in [
        ("{{ bos_token }}{% for m in messages %}\n  {{ m['role'].upper() }}\n{% endfor %}", "<s>  USER\n  ASSISTANT\n"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "Hi"),
        ("{{ messages[0].content.strip().startswith('H') }} {{ messages[-1]['content'].split('e')[0] }}", "True Y"),
        ("{% if tools is none and documents is none %}none{% endif %}{{ undefined_thing }}", "none"),
        ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "Hi"}"#),
        ("{{ {'b': [1, 2.5, true, none], 'a': \"<é'>\"} | tojson }}", r#"{"b": [1, 2.5, true, null], "a": "<é'>"}"#),
        ("{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"),
        ("{% generation %}{{ messages | length }}{% endgeneration %}", "2"),
        ("{%- for m in messages[::-1] %}{{ loop.index0 }}{{ m.content }}{% endfor -%}  ", "0Yes?1Hi"),
        ("{% if add_generation_prompt %}{{ eos_token }}{% endif %}{{ unk_token is defined }}", "</s>False"),
    ] {
        assert_eq!(render(source).expect(source), expected, "{source}");
    }
}

#[test]
fn options_reach_the_template() {
    let source =
        "{{ enable_thinking is defined }} {{ enable_thinking }} {{ reasoning_effort }} {{ note }} {{ strftime_now('%d %B %Y') }}";
    let options = RenderOptions {
        enable_thinking: Some(false),
        reasoning_effort: Some("low".into()),
        extra: Map::from_iter([("note".to_owned(), json!("x")), ("strftime_now".to_owned(), json!("not this"))]),
        now: std::time::UNIX_EPOCH + Duration::from_secs(1_709_210_096),
        ..RenderOptions::default()
    };
    let messages = [message("user", "Hi")];
    assert_eq!(render_with(source, &messages, &options).expect("text"), "True False low x 29 February 2024");
    let unset =
        render_with("{{ enable_thinking is defined }}{{ reasoning_effort is defined }}", &messages, &RenderOptions::default());
    assert_eq!(unset.expect("text"), "FalseFalse");
}

#[test]
fn text_parts_are_joined_and_others_refused() {
    let source = "{% for m in messages %}{{ m.content }}|{{ m.name }}{% endfor %}";
    let parts = |parts: &Value| Message {
        role: "user".into(),
        content: MessageContent::Parts(parts.as_array().expect("list").clone()),
        media: Vec::new(),
        extra: Map::from_iter([("name".to_owned(), json!("Ann")), ("role".to_owned(), json!("system"))]),
    };
    let run = |message: Message| render_with(source, &[message], &RenderOptions::default());
    assert_eq!(run(parts(&json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))).expect("text"), "ab|Ann");
    let image = run(parts(&json!([{"type": "image_url", "image_url": {"url": "x"}}]))).unwrap_err();
    assert!(matches!(&image, EngineError::NotSupported(m) if m.contains("image_url") && m.contains("messages[0]")), "{image}");
    let empty = run(parts(&json!([{"type": "text"}]))).unwrap_err();
    assert!(matches!(empty, EngineError::InvalidArgument(_)), "{empty}");
    assert!(matches!(render_with(source, &[], &RenderOptions::default()), Err(EngineError::InvalidArgument(_))));
}

#[test]
fn a_template_that_raises_gives_its_message() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(matches!(&error, EngineError::ChatTemplate(m) if m.contains("roles must alternate")), "{error}");
    let error = render("{% for m in messages %}").unwrap_err();
    assert!(matches!(&error, EngineError::ChatTemplate(m) if m.contains("does not compile")), "{error}");
}

#[test]
fn hostile_templates_end_with_an_error() {
    let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ c }}";
    let ends = "{% endfor %}{% endfor %}{% endfor %}";
    let silent = nested.replace("{{ c }}", "");
    let recursive = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    let wide = "{% set x = '0123456789' * 1000000 %}{% for a in range(10) %}{{ x }}{% endfor %}";
    for source in [&format!("{nested}{ends}"), &format!("{silent}{ends}"), recursive, wide] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, EngineError::ChatTemplate(_)), "{error}");
    }
}

#[test]
fn templates_that_grow_without_end_are_refused_and_take_little_memory() {
    let grown = |start: &str, step: &str, use_it: &str| {
        format!(
            "{{% set ns = namespace(x={start}) %}}{{% for i in range(4000) %}}{{% set ns.x = {step} %}}{{% endfor %}}{use_it}"
        )
    };
    let text = "'0123456789abcdef' * 1000";
    let mut sources: Vec<String> = [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x * 2",
        "ns.x.replace('0', '00')",
        "ns.x|replace('0', ns.x)",
        "ns.x.join(ns.x)",
        "ns.x|join(ns.x)",
        "[ns.x, ns.x]|join",
        "''.join([ns.x, ns.x])",
        "[ns.x, ns.x]|string",
        "ns.x|indent(10000000)",
        "ns.x|indent(width=10000000)",
        "('{0}{0}{0}' * 100).format(ns.x)",
        "('%s%s' * 8)|format(ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x, ns.x)",
        "[ns.x, ns.x]|tojson",
        "ns.x|upper ~ ns.x|title",
        "[ns.x]|map('replace', '0', ns.x)|join",
        "(ns.x ~ ns.x)[::-1]",
    ]
    .iter()
    .map(|step| grown(text, step, ""))
    .collect();
    for (start, step) in [
        ("[1]", "[ns.x, ns.x]"),
        ("[1]", "[ns.x]"),
        ("[1]", "ns.x + ns.x"),
        ("[1]", "(ns.x * 2)|list"),
        ("[1]", "ns.x * 2"),
        ("[1]", "ns.x + [range(99999)|list]"),
        ("[1]", "[range(99999)] + ns.x"),
        ("[1]", "{'a': ns.x, 'b': ns.x}"),
        ("[1]", "ns.x|batch(10000000)"),
        ("[1]", "ns.x|slice(10000000)|list"),
        ("[1]", "[('ab' * 1000000)|list] + ns.x"),
        ("[1]", "[('ab' * 1000000).split('b')] + ns.x"),
        ("'a'", "ns"),
        ("'a'", "[ns]"),
        ("'a'", "dict(n=ns)"),
        ("'a'", "namespace(n=ns)"),
    ] {
        sources.push(grown(start, step, "{{ ns }}{{ ns.x }}"));
    }
    sources.extend(
        [
            "{{ '%.100000000f'|format(1.0) }}",
            "{{ '{:>100000000}'.format('a') }}",
            "{{ '%100000000d'|format(1) }}",
            "{{ 'a'.count('') }}",
            "{{ debug() }}",
            "{{ messages|pprint }}",
            "{% include 'chat_template' %}",
            "{% macro f() %}{% endmacro %}{{ f(*range(99999), *range(99999)) }}",
        ]
        .map(str::to_owned),
    );
    let raw = "0123456789abcdef".repeat(60_000);
    sources.push(format!("{{% for i in range(99999) %}}{raw}{{% endfor %}}"));
    sources.push(format!("{{% set x %}}{{% for i in range(99999) %}}{raw}{{% endfor %}}{{% endset %}}"));
    sources
        .push(format!("{{% macro f() %}}{{% for i in range(99999) %}}{raw}{{% endfor %}}{{% endmacro %}}{{{{ f()|length }}}}"));
    for source in &sources {
        let error = render(source).expect_err(source);
        assert!(matches!(error, EngineError::ChatTemplate(_)), "{error}");
    }
    let error = render(&sources[0]).unwrap_err().to_string();
    assert!(error.contains("bytes in all"), "{error}");
    let peak = resident_peak_bytes();
    assert!(peak < 1 << 30, "{peak} bytes were resident");
}

/// What this process had resident at most.
fn resident_peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

#[test]
fn nothing_repeated_without_end_is_nothing() {
    for (source, expected) in [
        ("{{ ([] * 9223372036854775807)|length }}", "0"),
        ("{{ 9223372036854775807 * messages[9:] }}", "[]"),
        ("{% for m in [] * 9223372036854775807 %}x{% endfor %}", ""),
        ("{% for m in [[] * 9223372036854775807][0] %}x{% endfor %}", ""),
        ("{% for m in {'a': [] * 9223372036854775807}.a %}x{% endfor %}", ""),
        ("{{ ([0] * 3 + [1])|length }}", "4"),
    ] {
        assert_eq!(render(source).expect(source), expected, "{source}");
    }
    for source in ["{{ ([0] * 9223372036854775807)|length }}", "{% for m in [0, 1] * 999999999999 %}{% endfor %}"] {
        let error = render(source).expect_err(source);
        assert!(matches!(error, EngineError::ChatTemplate(_)), "{error}");
    }
}

#[test]
fn what_conversations_need_is_within_the_budget() {
    let content = "word ".repeat(200);
    let messages: Vec<Message> = (0..300).map(|i| message(if i % 2 == 0 { "user" } else { "assistant" }, &content)).collect();
    let source = "{% set ns = namespace(text='', all=[]) %}{% for m in messages[1:] %}{% set ns.text = ns.text ~ m.content %}\
                  {% set ns.all = ns.all + [m] %}{% set parts = m.content.split(' ') %}{{ parts[-1]|trim }}{{ m|tojson }}\
                  {% if m.content in ns.text and loop.index0 < messages|length %}+{% endif %}{% endfor %}\
                  {{ ns.all|length }}{{ ns.text|length }}";
    let text = render_with(source, &messages, &RenderOptions::default()).expect("text");
    assert!(text.ends_with("299299000"), "{}", &text[text.len() - 40..]);
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let dir = std::env::temp_dir().join(format!("chat-templates-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("folder");
    assert_eq!(template_in_dir(&dir).expect("readable"), None);
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).expect("written");
    write("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!(template_in_dir(&dir).expect("readable").as_deref(), Some("json"));
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "config"}]}"#,
    );
    assert_eq!(template_in_dir(&dir).expect("readable").as_deref(), Some("config"));
    write("chat_template.jinja", "jinja");
    assert_eq!(template_in_dir(&dir).expect("readable").as_deref(), Some("jinja"));
    assert_eq!(read_template(&dir.join("chat_template.json")).expect("readable"), "json");
    write("broken.json", "{");
    for name in ["broken.json", "absent.json", "absent.jinja"] {
        let error = read_template(&dir.join(name)).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    std::fs::remove_dir_all(&dir).expect("removed");
}

#[test]
fn templates_that_nest_without_end_are_refused_and_the_process_lives() {
    let repeated = |prefix: &str, unit: &str, count: usize, suffix: &str| format!("{prefix}{}{suffix}", unit.repeat(count));
    let mut sources = vec![
        repeated("{{ ", "-", 5_000, "1 }}"),
        repeated("{{ ", "not ", 5_000, "1 }}"),
        repeated("{{ ", "1 if 1 else ", 20_000, "1 }}"),
        repeated("{% if a %}", "{% elif b %}", 50_000, "{% endif %}"),
        repeated("", "{% if a %}", 50_000, ""),
        "{% raw %}".repeat(50_000),
        "{{".repeat(100_000),
    ];
    for unit in ["+1", "**1", " and 1", "|string", ".a", "[0]", "()", "~\"\"", ",1", " is defined"] {
        sources.push(repeated("{{ 1", unit, 100_000, " }}"));
        sources.push(repeated("{% set a = 1", unit, 100_000, " %}"));
    }
    for source in sources {
        let error = render(&source).unwrap_err();
        assert!(matches!(error, EngineError::ChatTemplate(_)), "{error}");
    }
}

#[test]
fn templates_at_the_limits_are_read_on_a_stack_that_holds_them() {
    for (prefix, unit, num_tokens, suffix) in [
        ("{{ ", "-", 1, "1 }}"),
        ("{{ ", "not ", 1, "1 }}"),
        ("{{ 1", "+1", 2, " }}"),
        ("{{ 1", "**1", 3, " }}"),
        ("{{ ", "1 if 1 else ", 4, "1 }}"),
        ("{{ 1", "|string", 2, " }}"),
        ("{{ a", ".a", 2, " }}"),
        ("{{ a", "[0]", 3, " }}"),
        ("{{ 1", "~\"\"", 2, " }}"),
    ] {
        // What it comes to does not matter: it is read, run and dropped.
        let _ = render(&format!("{prefix}{}{suffix}", unit.repeat(4000 / num_tokens)));
    }
    let _ = render(&format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(8000)));
}
