//! What values are, by their schemas: SGLang's `test_glm47_schema_types.py` and `test_qwen3_coder_numeric_precision.py`.

use serde_json::json;

use super::{
    super::{
        Tool,
        formats::{Body, FORMATS},
    },
    *,
};

/// The arguments of a call of a function with this schema, in the form of `glm4.5`.
fn read(parameters: Value, values: &[(&str, &str)]) -> String {
    let format = FORMATS.iter().find(|format| format.name == "glm4.5").unwrap();
    let Body::Parameters(parts) = format.body else { panic!("{format:?}") };
    let tools = [Tool { name: "f".into(), description: None, parameters, strict: false }];
    let mut reader = ParametersReader::new(parts, format.close, &Arc::from(tools), |text| text.trim().to_owned());
    let written = |(key, value): &(&str, &str)| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>");
    let values = values.iter().map(written).collect::<Vec<_>>().concat();
    let mut arguments = String::new();
    for character in format!("f{values}</tool_call>").chars() {
        assert_ne!(reader.push(character, &mut arguments), Step::Malformed);
    }
    arguments
}

fn assert_read(schema: &Value, raw: &str, expected: &str) {
    let parameters = json!({ "type": "object", "properties": { "x": schema } });
    assert_eq!(read(parameters, &[("x", raw)]), format!("{{\"x\": {expected}}}"), "{raw} of {schema}");
}

#[test]
fn a_value_is_of_a_type_that_its_schema_allows() {
    for (schema, raw, expected) in [
        (json!({ "type": ["integer", "string"] }), "auto", "\"auto\""),
        (json!({ "type": ["string", "integer"] }), "7", "7"),
        (json!({ "type": ["number", "string"] }), "auto", "\"auto\""),
        (json!({ "type": ["object", "string"] }), "7", "\"7\""),
        (json!({ "type": ["string", "object"] }), "{\"ok\": false}", "{\"ok\": false}"),
        (json!({ "type": ["string", "array"] }), "1e2", "\"1e2\""),
        (json!({ "type": ["string", "integer"] }), "true", "\"true\""),
        (json!({ "type": ["string", "integer"] }), "null", "\"null\""),
        (json!({ "type": ["string", "boolean"] }), "false", "false"),
        (json!({ "type": ["string", "null"] }), "null", "null"),
        (json!({ "type": ["string", "null"] }), "\"null\"", "\"null\""),
        (json!({ "type": "null" }), "null", "null"),
        (json!({ "type": "string" }), "null", "\"null\""),
        (json!({ "type": "string" }), "123_456", "\"123_456\""),
        (json!({ "type": "string" }), "{ \"a\" : true }", "\"{ \\\"a\\\" : true }\""),
        (json!({ "type": "string" }), "one\n\"two\" \\d+ \u{e9}", "\"one\\n\\\"two\\\" \\\\d+ \u{e9}\""),
        (json!({ "oneOf": [{ "type": "string" }, { "type": "object" }] }), "7", "\"7\""),
        (json!({ "oneOf": [{ "type": "null" }, { "type": "array" }] }), "[1, 2]", "[1, 2]"),
        (json!({ "anyOf": [{ "type": "string", "enum": ["auto"] }, { "type": "integer" }] }), "7", "7"),
        (json!({ "allOf": [{ "type": ["integer", "string"] }, { "type": "integer" }] }), "7", "7"),
        (json!({}), "123_456", "\"123_456\""),
        (json!({}), "{\"ok\": false}", "{\"ok\": false}"),
        (json!({ "type": "number" }), "123abc", "\"123abc\""),
        (json!({ "type": "number" }), "1.25e2", "1.25e2"),
        (json!({ "type": "number" }), "", "\"\""),
        (json!({ "type": "number" }), "18446744073709551616", "18446744073709551616"),
        (json!({ "type": "number" }), " 9007199254740993 ", "9007199254740993"),
        (json!({ "anyOf": [{ "type": "number" }, { "type": "null" }] }), "-9007199254740993", "-9007199254740993"),
    ] {
        assert_read(&schema, raw, expected);
    }
}

#[test]
fn a_value_is_one_of_those_that_its_schema_names() {
    for (schema, raw, expected) in [
        (json!({ "enum": ["ok", null] }), "null", "null"),
        (json!({ "enum": ["ok", null] }), "ok", "\"ok\""),
        (json!({ "enum": ["7", null] }), "7", "\"7\""),
        (json!({ "enum": ["7", 8] }), "7", "\"7\""),
        (json!({ "enum": ["7", 8] }), "8", "8"),
        (json!({ "enum": ["true", 7] }), "true", "\"true\""),
        (json!({ "enum": ["7", false] }), "7", "\"7\""),
        (json!({ "type": ["number", "string"], "enum": [1, "auto"] }), "1", "1"),
        (json!({ "type": ["number", "string"], "enum": [1, "auto"] }), "1.0", "1.0"),
        (json!({ "type": "number", "enum": [1, 2] }), "3", "3"),
        (json!({ "const": 7 }), "7", "7"),
        (json!({ "const": { "ok": false } }), "{\"ok\": false}", "{\"ok\": false}"),
        (json!({ "const": "null" }), "null", "\"null\""),
        (json!({ "const": "[1,2]" }), "[1,2]", "\"[1,2]\""),
        // No number; SGLang takes the quotes away. A grammar lets no such value come.
        (json!({ "type": "number", "enum": [1, 2] }), "\"1\"", "\"\\\"1\\\"\""),
    ] {
        assert_read(&schema, raw, expected);
    }
}

#[test]
fn references_are_followed() {
    for (raw, field, expected) in [("7", "integer", "7"), ("{}", "object", "{}"), ("null", "string", "\"null\"")] {
        let parameters = json!({ "$defs": { "a/b~c": { "type": field } }, "properties": { "x": { "$ref": "#/$defs/a~1b~0c" } } });
        assert_eq!(read(parameters, &[("x", raw)]), format!("{{\"x\": {expected}}}"));
    }
    let of_all = json!({ "$defs": { "all": { "properties": { "x": { "type": "string" } } } }, "$ref": "#/$defs/all" });
    assert_eq!(read(of_all, &[("x", "null")]), "{\"x\": \"null\"}");
    let itself = json!({ "$defs": { "a": { "$ref": "#/$defs/a" } }, "properties": { "x": { "$ref": "#/$defs/a" } } });
    assert_eq!(read(itself, &[("x", "auto")]), "{\"x\": \"auto\"}");
}

#[test]
fn arguments_tell_which_branch_those_behind_them_are_of() {
    let branch = |kind: Value, of: &str| json!({ "properties": { "kind": kind, "x": { "type": of } } });
    for is_constant in [true, false] {
        let kind = |name: &str| if is_constant { json!({ "const": name }) } else { json!({ "enum": [name] }) };
        let (text, count) = (branch(kind("text"), "string"), branch(kind("count"), "integer"));
        for parameters in [
            json!({ "oneOf": [text, count] }),
            json!({ "anyOf": [{ "allOf": [count] }, { "allOf": [text] }] }),
            json!({ "$defs": { "0": text, "1": count }, "oneOf": [{ "$ref": "#/$defs/0" }, { "$ref": "#/$defs/1" }] }),
        ] {
            let of = |values: &[(&str, &str)]| read(parameters.clone(), values);
            assert_eq!(of(&[("kind", "text"), ("x", "7")]), "{\"kind\": \"text\", \"x\": \"7\"}");
            assert_eq!(of(&[("kind", "count"), ("x", "7")]), "{\"kind\": \"count\", \"x\": 7}");
            assert_eq!(of(&[("x", "seven"), ("kind", "text")]), "{\"x\": \"seven\", \"kind\": \"text\"}");
            // It is given out before its kind is known; SGLang waits for that.
            assert_eq!(of(&[("x", "7"), ("kind", "text")]), "{\"x\": 7, \"kind\": \"text\"}");
            // No branch has it: what is there stays as it is.
            assert_eq!(of(&[("kind", "other"), ("x", "7")]), "{\"kind\": \"other\", \"x\": 7}");
        }
    }
}
