//! What form an answer must have: the keys of OpenAI's, vLLM's and mistral.rs' interfaces for it, as one grammar.

use engine::{Grammar, check_strict};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{ApiError, fields::of_request, sampling::SamplingFields};

/// OpenAI's `response_format`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// "text", "json_object", "json_schema" or "structural_tag".
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text", "json_object", "json_schema", "structural_tag"]))]
    pub kind: String,
    /// With "json_schema".
    pub json_schema: Option<NamedSchema>,
    /// With "json_schema", by vLLM's name: the schema itself.
    pub schema: Option<Value>,
    /// With "structural_tag": what the text is made of, an object with a `type`.
    pub format: Option<Value>,
    /// With "structural_tag", the older form: objects with `begin`, `schema` and `end`, and free text between them.
    pub structures: Option<Vec<Value>>,
    /// With `structures`: what each `begin` begins with, and other text does not have.
    pub triggers: Option<Vec<String>>,
}

/// A schema with its name.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedSchema {
    /// A label.
    pub name: Option<String>,
    /// A label: the model does not see it.
    pub description: Option<String>,
    /// True: every property is required and there are no others, or the schema is refused.
    pub strict: Option<bool>,
    /// The JSON Schema.
    #[schemars(schema_with = "schema_schema")]
    pub schema: Option<Value>,
}

/// vLLM's `structured_outputs`: one of its keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StructuredOutputs {
    /// A JSON Schema, or its text.
    pub json: Option<Value>,
    /// True: any JSON object.
    pub json_object: Option<bool>,
    /// A regular expression for the whole text.
    pub regex: Option<String>,
    /// Texts, one of which comes.
    pub choice: Option<Vec<String>>,
    /// A grammar in llguidance's dialect of Lark.
    pub grammar: Option<String>,
    /// A structural tag, or its text.
    pub structural_tag: Option<Value>,
}

/// mistral.rs' `grammar`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TypedGrammar {
    /// "regex", "json_schema", "lark", "llguidance", "choice" or "structural_tag".
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["regex", "json_schema", "lark", "llguidance", "choice", "structural_tag"]))]
    pub kind: String,
    /// A text, of "json_schema" and "structural_tag" also the object itself, of "choice" a list of texts.
    pub value: Value,
}

fn schema_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": ["object", "boolean", "null"] })
}

/// A grammar of this type, as mistral.rs names it.
pub fn typed(kind: &str, value: Value, param: &str) -> Result<Grammar, ApiError> {
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        _ => Err(ApiError::value(param, format!("must be a text for the type {kind:?}"))),
    };
    Ok(match kind {
        "regex" => Grammar::Regex(text(value)?),
        "lark" => Grammar::Lark(text(value)?),
        "llguidance" => Grammar::Llguidance(match value {
            Value::Object(_) => value.to_string(),
            value => text(value)?,
        }),
        "json_schema" => Grammar::JsonSchema(schema(value, param)?),
        "structural_tag" => Grammar::StructuralTag(schema(value, param)?),
        "choice" => match serde_json::from_value(value) {
            Ok(texts) => Grammar::Choice(texts),
            Err(_) => return Err(ApiError::value(param, "must be a list of texts for the type \"choice\"")),
        },
        other => {
            let shown: String = other.chars().take(32).collect();
            let message =
                format!("{shown:?} is no type of grammar; give regex, json_schema, lark, llguidance, choice or structural_tag");
            return Err(ApiError::value(param, message));
        }
    })
}

/// A schema or a structural tag, or its text.
fn schema(value: Value, param: &str) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::invalid("invalid_schema", param.to_owned(), format!("`{param}` is not JSON: {error}"))),
        value => Ok(value),
    }
}

impl NamedSchema {
    /// The grammar.
    pub fn grammar(self, param: &str) -> Result<Grammar, ApiError> {
        let Some(schema) = self.schema else {
            return Err(ApiError::missing(&format!("{param}.schema"), "give a JSON Schema"));
        };
        if self.strict == Some(true) {
            check_strict(&schema).map_err(|error| ApiError { param: Some(param.to_owned()), ..of_request(error) })?;
        }
        Ok(Grammar::JsonSchema(schema))
    }
}

impl ResponseFormat {
    /// The grammar; `None` for free text.
    pub fn grammar(self, param: &str) -> Result<Option<Grammar>, ApiError> {
        let has_schema = self.json_schema.is_some() || self.schema.is_some();
        let of_tags =
            [("format", self.format.is_some()), ("structures", self.structures.is_some()), ("triggers", self.triggers.is_some())];
        if let Some((key, _)) = of_tags.iter().find(|(_, is_given)| *is_given && self.kind != "structural_tag") {
            let message = format!("goes with the type \"structural_tag\", and the type is {:?}", self.shown());
            return Err(ApiError::value(format!("{param}.{key}"), message));
        }
        match self.kind.as_str() {
            "structural_tag" if has_schema => {
                Err(ApiError::value(param, "has a schema, and its type is \"structural_tag\": make it \"json_schema\""))
            }
            "structural_tag" => {
                let given = [
                    ("format", self.format),
                    ("structures", self.structures.map(Value::from)),
                    ("triggers", self.triggers.map(Value::from)),
                ];
                let tag: Map<_, _> = given.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
                if tag.is_empty() {
                    return Err(ApiError::missing(&format!("{param}.format"), "say what the text is made of"));
                }
                Ok(Some(Grammar::StructuralTag(Value::Object(tag))))
            }
            "text" | "json_object" if has_schema => {
                Err(ApiError::value(param, format!("has a schema, and its type is {:?}: make it \"json_schema\"", self.kind)))
            }
            "text" => Ok(None),
            "json_object" => Ok(Some(any_object())),
            "json_schema" => {
                let named = match (self.json_schema, self.schema) {
                    (Some(named), None) => named,
                    (None, Some(schema)) => NamedSchema { name: None, description: None, strict: None, schema: Some(schema) },
                    (None, None) => return Err(ApiError::missing(&format!("{param}.json_schema"), "give a schema")),
                    (Some(_), Some(_)) => return Err(ApiError::value(param, "has two schemas: leave one out")),
                };
                named.grammar(&format!("{param}.json_schema")).map(Some)
            }
            _ => {
                let message =
                    format!("is {:?}; it must be \"text\", \"json_object\", \"json_schema\" or \"structural_tag\"", self.shown());
                Err(ApiError::value(format!("{param}.type"), message))
            }
        }
    }

    /// The grammar, of routes that have no structural tags.
    pub fn grammar_without_tags(self, param: &str) -> Result<Option<Grammar>, ApiError> {
        if self.kind == "structural_tag" {
            let message = "is \"structural_tag\", which only the response_format of chats and completions may be";
            return Err(ApiError::value(format!("{param}.type"), message));
        }
        self.grammar(param)
    }

    fn shown(&self) -> String {
        self.kind.chars().take(32).collect()
    }
}

fn any_object() -> Grammar {
    Grammar::JsonSchema(json!({ "type": "object" }))
}

impl StructuredOutputs {
    fn grammar(self) -> Result<Grammar, ApiError> {
        let Self { json, json_object, regex, choice, grammar, structural_tag } = self;
        let mut all = Vec::new();
        if let Some(json) = json {
            all.push(Grammar::JsonSchema(schema(json, "structured_outputs.json")?));
        }
        all.extend(json_object.unwrap_or(false).then(any_object));
        all.extend(regex.map(Grammar::Regex));
        all.extend(choice.map(Grammar::Choice));
        all.extend(grammar.map(Grammar::Lark));
        if let Some(tag) = structural_tag {
            all.push(Grammar::StructuralTag(schema(tag, "structured_outputs.structural_tag")?));
        }
        match all.len() {
            1 => Ok(all.remove(0)),
            0 => Err(ApiError::missing(
                "structured_outputs.json",
                "give json, json_object, regex, choice, grammar or structural_tag",
            )),
            _ => Err(ApiError::value("structured_outputs", "has several keys; give one of them")),
        }
    }
}

impl SamplingFields {
    /// What the answer must be, by whichever key says so.
    pub fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        let mut all: Vec<(&str, Grammar)> = Vec::new();
        if let Some(format) = self.response_format.clone() {
            all.extend(format.grammar("response_format")?.map(|grammar| ("response_format", grammar)));
        }
        if let Some(outputs) = self.structured_outputs.clone() {
            all.push(("structured_outputs", outputs.grammar()?));
        }
        if let Some(json) = self.guided_json.clone() {
            all.push(("guided_json", Grammar::JsonSchema(schema(json, "guided_json")?)));
        }
        all.extend(self.guided_regex.clone().map(|regex| ("guided_regex", Grammar::Regex(regex))));
        all.extend(self.guided_choice.clone().map(|texts| ("guided_choice", Grammar::Choice(texts))));
        all.extend(self.guided_grammar.clone().map(|lark| ("guided_grammar", Grammar::Lark(lark))));
        if let Some(grammar) = self.grammar.clone() {
            all.push(("grammar", typed(&grammar.kind, grammar.value, "grammar")?));
        }
        if let [(one, _), (other, _), ..] = &all[..] {
            return Err(ApiError::value(*other, format!("says what the answer must be, and so does `{one}`: leave one out")));
        }
        Ok(all.pop().map(|(_, grammar)| grammar))
    }

    /// The key that says what the answer must be.
    pub fn grammar_param(&self) -> Option<&'static str> {
        let given = [
            ("structured_outputs", self.structured_outputs.is_some()),
            ("guided_json", self.guided_json.is_some()),
            ("guided_regex", self.guided_regex.is_some()),
            ("guided_choice", self.guided_choice.is_some()),
            ("guided_grammar", self.guided_grammar.is_some()),
            ("grammar", self.grammar.is_some()),
            ("response_format", self.response_format.is_some()),
        ];
        given.into_iter().find_map(|(name, is_given)| is_given.then_some(name))
    }
}
