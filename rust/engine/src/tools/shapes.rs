//! What the arguments of a tool may be, where its schema puts them together of parts: `$ref`, `allOf`, `anyOf`, `oneOf`.

use serde_json::{Map, Value, json};

/// Ways in which the arguments may be; what has more of them is one in which each argument may come.
const MAX_SHAPES: usize = 32;
/// Schemas that are looked at.
const MAX_SCHEMAS: usize = 512;
/// Schemas within schemas.
const MAX_DEPTH: usize = 16;

/// The ways in which a tool's arguments may be, at least one: each a schema with `properties`, `required` and
/// `additionalProperties` of its own, as far as the parts have them.
pub(super) fn shapes(parameters: &Value) -> Vec<Map<String, Value>> {
    let mut shapes = Shapes { root: parameters, num_left: MAX_SCHEMAS }.of(parameters, MAX_DEPTH);
    if shapes.is_empty() {
        shapes.push(Map::new());
    }
    shapes
}

/// The schemas that an argument has in them.
pub(super) fn of_argument<'a>(shapes: &'a [Map<String, Value>], key: &'a str) -> impl Iterator<Item = &'a Value> {
    shapes.iter().filter_map(move |shape| shape.get("properties")?.get(key))
}

/// Whether a schema is of texts alone. The values of an `enum` tell what it is of.
pub(super) fn is_text(schema: &Value) -> bool {
    let are_texts = |values: &Vec<Value>| !values.is_empty() && values.iter().all(Value::is_string);
    if let Some(kind) = schema.get("type") {
        return kind == "string";
    }
    let is_whole = ["$ref", "allOf", "anyOf", "oneOf"].iter().all(|key| schema.get(key).is_none());
    let of_values = schema.get("enum").and_then(Value::as_array).is_some_and(are_texts);
    is_whole && (of_values || schema.get("const").is_some_and(Value::is_string))
}

struct Shapes<'a> {
    root: &'a Value,
    num_left: usize,
}

impl Shapes<'_> {
    fn of(&mut self, schema: &Value, depth: usize) -> Vec<Map<String, Value>> {
        let Some(map) = schema.as_object().filter(|_| depth > 0 && self.num_left > 0) else { return vec![Map::new()] };
        self.num_left -= 1;
        // What is no object is no way in which arguments may be.
        let is_object = |kind: &Value| kind == "object" || kind.as_array().is_some_and(|kinds| kinds.contains(&json!("object")));
        if !map.get("type").is_none_or(is_object) {
            return Vec::new();
        }
        let own = ["properties", "required", "additionalProperties"].into_iter();
        let own: Map<String, Value> = own.filter_map(|key| Some((key.to_owned(), map.get(key)?.clone()))).collect();
        let mut all = vec![own];
        let target = map.get("$ref").and_then(Value::as_str).and_then(|at| self.root.pointer(at.strip_prefix('#')?));
        let parts = map.get("allOf").and_then(Value::as_array).into_iter().flatten();
        for part in target.into_iter().chain(parts) {
            all = both(&all, &self.of(part, depth - 1));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(branches) = map.get(key).and_then(Value::as_array) {
                let branches: Vec<_> = branches.iter().flat_map(|branch| self.of(branch, depth - 1)).collect();
                all = both(&all, &branches);
            }
        }
        all
    }
}

/// Each of these with each of those.
fn both(these: &[Map<String, Value>], those: &[Map<String, Value>]) -> Vec<Map<String, Value>> {
    if those.is_empty() {
        return these.to_vec();
    }
    if these.len().saturating_mul(those.len()) > MAX_SHAPES {
        return vec![any_of(these.iter().chain(those))];
    }
    these.iter().flat_map(|this| those.iter().map(|that| merged(this, that))).collect()
}

fn merged(this: &Map<String, Value>, that: &Map<String, Value>) -> Map<String, Value> {
    let mut whole = this.clone();
    for (key, value) in that {
        match (whole.get_mut(key), value) {
            (Some(Value::Object(all)), Value::Object(more)) if key == "properties" => {
                for (name, schema) in more {
                    let schema = all.get(name).map_or_else(|| schema.clone(), |other| all_of(other, schema));
                    all.insert(name.clone(), schema);
                }
            }
            (Some(Value::Array(all)), Value::Array(more)) if key == "required" => all.extend(more.iter().cloned()),
            // Where one part allows no other arguments, none come.
            (Some(other), _) if *other == Value::Bool(false) => {}
            _ => {
                whole.insert(key.clone(), value.clone());
            }
        }
    }
    whole
}

/// Both schemas hold.
fn all_of(this: &Value, that: &Value) -> Value {
    match (this, that) {
        _ if this == that => this.clone(),
        (Value::Object(this), Value::Object(that)) if this.keys().all(|key| that.get(key).is_none_or(|of| *of == this[key])) => {
            Value::Object(this.iter().chain(that).map(|(key, value)| (key.clone(), value.clone())).collect())
        }
        (Value::Bool(true), _) => that.clone(),
        (_, Value::Bool(true)) => this.clone(),
        _ => json!({ "allOf": [this, that] }),
    }
}

/// Each argument of all of them may come, as one of them has it.
fn any_of<'a>(shapes: impl Iterator<Item = &'a Map<String, Value>>) -> Map<String, Value> {
    let mut properties: Map<String, Value> = Map::new();
    for (name, schema) in shapes.filter_map(|shape| shape.get("properties")?.as_object()).flatten() {
        match properties.get_mut(name) {
            None => {
                properties.insert(name.clone(), json!({ "anyOf": [schema] }));
            }
            Some(other) => {
                if let Some(branches) = other["anyOf"].as_array_mut().filter(|branches| !branches.contains(schema)) {
                    branches.push(schema.clone());
                }
            }
        }
    }
    for schema in properties.values_mut() {
        if let Some([only]) = schema["anyOf"].as_array().map(Vec::as_slice) {
            *schema = only.clone();
        }
    }
    Map::from_iter([("properties".to_owned(), Value::Object(properties))])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(parameters: &Value) -> Vec<String> {
        shapes(parameters).into_iter().map(|shape| Value::Object(shape).to_string()).collect()
    }

    #[test]
    fn parts_that_hold_together_are_one_shape() {
        let city = json!({ "properties": { "city": { "type": "string" } }, "required": ["city"] });
        let of_city = json!({ "properties": { "city": { "maxLength": 3 }, "zip": {} }, "required": ["zip"] });
        let parameters = json!({ "type": "object", "$defs": { "city": city }, "$ref": "#/$defs/city", "allOf": [of_city] });
        let whole = json!({
            "properties": { "city": { "type": "string", "maxLength": 3 }, "zip": {} },
            "required": ["city", "zip"]
        });
        assert_eq!(shapes(&parameters), [whole.as_object().unwrap().clone()]);
    }

    #[test]
    fn each_branch_is_a_shape_with_what_stands_beside_it() {
        let parameters = json!({
            "properties": { "kind": { "type": "string" } },
            "oneOf": [
                { "properties": { "kind": { "const": "a" }, "x": {} }, "additionalProperties": false },
                { "properties": { "kind": { "type": "integer" } } },
                { "type": "null" }
            ]
        });
        let first = r#"{"properties":{"kind":{"type":"string","const":"a"},"x":{}},"additionalProperties":false}"#;
        let second = r#"{"properties":{"kind":{"allOf":[{"type":"string"},{"type":"integer"}]}}}"#;
        assert_eq!(texts(&parameters), [first, second]);
        assert_eq!(texts(&json!({ "type": "string" })), ["{}"]);
        assert_eq!(texts(&json!(true)), ["{}"]);
    }

    #[test]
    fn too_many_shapes_are_one_in_which_every_argument_may_come() {
        let branch = |i: usize| json!({ "properties": { format!("a{i}"): {}, "b": { "const": i % 2 } }, "required": ["b"] });
        let parameters = json!({ "anyOf": (0..40).map(branch).collect::<Vec<_>>() });
        let [shape] = &shapes(&parameters)[..] else { panic!("{:?}", texts(&parameters)) };
        assert_eq!(shape["properties"].as_object().unwrap().len(), 41);
        assert_eq!(shape["properties"]["b"], json!({ "anyOf": [{ "const": 0 }, { "const": 1 }] }));
        assert_eq!(shape.get("required"), None);
    }

    #[test]
    fn schemas_that_refer_to_themselves_end() {
        let itself = json!({ "$ref": "#" });
        assert!(!shapes(&json!({ "anyOf": [itself, itself], "allOf": [itself, itself] })).is_empty());
    }

    #[test]
    fn texts_are_told_by_their_type_or_by_their_values() {
        for schema in [json!({ "type": "string" }), json!({ "enum": ["a", "1"] }), json!({ "const": "a" })] {
            assert!(is_text(&schema), "{schema}");
        }
        let no_texts = [
            json!({}),
            json!(true),
            json!({ "type": ["string", "null"] }),
            json!({ "enum": ["a", null] }),
            json!({ "enum": [] }),
            json!({ "const": 1 }),
            json!({ "const": "a", "$ref": "#/$defs/a" }),
        ];
        for schema in no_texts {
            assert!(!is_text(&schema), "{schema}");
        }
    }
}
