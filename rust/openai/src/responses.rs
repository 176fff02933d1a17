//! `POST /v1/responses`: OpenAI's newer form of a chat.

use engine::{
    FinishReason, GenerationRequest, Grammar, Message, MessageContent, Prompt, RenderOptions, SamplingParams, ToolCall, Usage,
};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    ApiError, Delivery, Fields, Generation, MAX_TOP_LOGPROBS, ModelContext, Rule,
    chat::thinking,
    fields::fields,
    messages,
    response::{ChatLogprobs, Envelope},
    structured::{NamedSchema, ResponseFormat},
    tools::{self, MAX_TOOLS},
};

/// A text, or items.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "it must be a string or a list of items")]
pub enum Input {
    /// One user's message.
    Text(String),
    /// Messages.
    Items(#[schemars(schema_with = "messages::schema")] Vec<Value>),
}

/// How much a reasoning model thinks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
pub struct Reasoning {
    /// none, minimal, low, medium, high or xhigh.
    #[schemars(extend("enum" = ["off", "none", "minimal", "low", "medium", "high", "xhigh", "max", null]))]
    pub effort: Option<String>,
    /// A label: the reasoning is not summed up.
    pub summary: Option<String>,
}

fields! {
    /// A request for a response.
    pub struct ResponsesFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// What is asked.
        input: Input,
        /// The system prompt, of this response alone.
        instructions: String,
        /// Generated tokens at most.
        #[schemars(range(min = 1))]
        max_output_tokens: usize,
        /// Divides the logits; 0 is greedy.
        #[schemars(range(min = 0.0))]
        temperature: f32,
        /// The likeliest tokens of that probability together.
        #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
        top_p: f32,
        /// Log probabilities of that many likeliest tokens; needs `include: ["message.output_text.logprobs"]`.
        #[schemars(range(max = MAX_TOP_LOGPROBS))]
        top_logprobs: usize,
        /// Sends server-sent events.
        stream: bool,
        /// Keeps the response, to be read or gone on from; true unless given.
        store: bool,
        /// Goes on from a response that is kept.
        previous_response_id: String,
        /// What form the text has.
        text: Text,
        /// Functions that the model may call: `{"type": "function", "name", "description", "parameters", "strict"}`.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Vec<Value>,
        /// "auto", "none", "required", `{"type": "function", "name"}`, or `{"type": "allowed_tools", ...}`.
        tool_choice: Value,
        /// False: an answer has one call at most.
        parallel_tool_calls: bool,
        /// How much a reasoning model thinks.
        reasoning: Reasoning,
        /// "auto" drops the start of a prompt that is too long; "disabled" (unless given) refuses it.
        #[schemars(extend("enum" = ["auto", "disabled", null]))]
        truncation: String,
        /// What else the response has.
        #[schemars(extend("items" = json!({ "enum": ["message.output_text.logprobs", "reasoning.encrypted_content"] })))]
        include: Vec<String>,
        /// Up to 16 labels, which come back.
        metadata: Map<String, Value>,
        /// Who asks: requests of one tenant take turns by it.
        user: String,
    }
}

/// What form the text has.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// Any text, a JSON object, or JSON by a schema.
    pub format: Option<TextFormat>,
    /// "medium" is so anyway.
    #[schemars(extend("enum" = ["medium", null]))]
    pub verbosity: Option<String>,
}

/// A form, with its schema beside its type.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TextFormat {
    /// "text", "json_object" or "json_schema".
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text", "json_object", "json_schema"]))]
    pub kind: String,
    /// A label.
    pub name: Option<String>,
    /// A label.
    pub description: Option<String>,
    /// True: every property is required and there are no others.
    pub strict: Option<bool>,
    /// With "json_schema".
    pub schema: Option<Value>,
}

impl Text {
    fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        if self.verbosity.as_deref().is_some_and(|verbosity| verbosity != "medium") {
            return Err(ApiError::unsupported("text.verbosity", "send \"medium\""));
        }
        let Some(TextFormat { kind, name, description, strict, schema }) = self.format.clone() else { return Ok(None) };
        let is_schema = kind == "json_schema";
        let named = (is_schema || schema.is_some()).then_some(NamedSchema { name, description, strict, schema });
        ResponseFormat { kind, json_schema: named, ..ResponseFormat::default() }.grammar_without_tags("text.format")
    }
}

const RULES: &[(&str, Rule)] = &[
    ("max_tool_calls", Rule::Label),
    ("background", Rule::True(|v| v == false, "send stream: true instead")),
    ("service_tier", Rule::True(|v| v == "auto" || v == "default", "leave it out")),
    ("prompt_cache_key", Rule::Label),
    ("prompt_cache_retention", Rule::Label),
    ("safety_identifier", Rule::Label),
    ("client_metadata", Rule::Label),
    ("stream_options", Rule::True(|v| v["include_obfuscation"] != true, "leave it out")),
    ("conversation", Rule::Refused("use previous_response_id")),
    ("prompt", Rule::Refused("send input and instructions")),
];

/// A request for a response.
#[derive(Clone, Debug, Default)]
pub struct ResponsesRequest {
    /// Its keys.
    pub fields: ResponsesFields,
}

impl ResponsesRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self { fields: ResponsesFields::take(&mut fields)? };
        fields.finish(RULES)?;
        Ok(request)
    }

    /// Whether the response is to be kept.
    pub fn store(&self) -> bool {
        self.fields.store.unwrap_or(true)
    }

    /// The messages of its input.
    pub fn input(&self, context: &ModelContext) -> Result<Vec<Message>, ApiError> {
        match &self.fields.input {
            None => Err(ApiError::missing("input", "give a string or a list of items")),
            Some(Input::Text(text)) => Ok(vec![Message::user(text.clone())]),
            Some(Input::Items(items)) => {
                let mut chat = Vec::new();
                for (i, item) in items.iter().enumerate() {
                    if let Some(message) = message_of(i, item)? {
                        tools::push_message(&mut chat, message);
                    }
                }
                messages::parse(chat, context).map_err(of_input)
            }
        }
    }

    /// Checks it, in the engine's terms; `chat` is all that came before, with this input at its end.
    pub fn generation(&self, mut chat: Vec<Message>) -> Result<Generation, ApiError> {
        let fields = &self.fields;
        if let Some(instructions) = &fields.instructions {
            let content = MessageContent::Text(instructions.clone());
            chat.insert(0, Message { role: "system".into(), content, media: Vec::new(), extra: Map::new() });
        }
        if fields.max_output_tokens == Some(0) {
            return Err(ApiError::value("max_output_tokens", "is 0; it must be at least 1"));
        }
        let truncate_sequence = match fields.truncation.as_deref() {
            None | Some("disabled") => false,
            Some("auto") => true,
            Some(_) => return Err(ApiError::value("truncation", "must be \"auto\" or \"disabled\"")),
        };
        let effort = fields.reasoning.clone().unwrap_or_default().effort;
        let options = RenderOptions {
            enable_thinking: thinking(None, effort.as_deref())?,
            reasoning_effort: effort,
            tools: tools::options(
                tools::Form::Responses,
                fields.tools.as_deref(),
                fields.tool_choice.as_ref(),
                fields.parallel_tool_calls,
            )?,
            ..RenderOptions::default()
        };
        let sampling = SamplingParams {
            temperature: fields.temperature,
            top_p: fields.top_p,
            logprobs: self.logprobs()?,
            max_tokens: fields.max_output_tokens,
            grammar: fields.text.as_ref().map(Text::grammar).transpose()?.flatten(),
            ..SamplingParams::default()
        };
        let stream = fields.stream.unwrap_or(false);
        let prompt = Prompt::Chat { messages: chat, options };
        let request = GenerationRequest { stream, truncate_sequence, ..GenerationRequest::new(prompt, sampling) };
        Ok(Generation {
            model: fields.model.clone(),
            requests: vec![request],
            delivery: Delivery { stream, ..Delivery::default() },
            user: fields.user.clone(),
            grammar_param: fields.text.as_ref().map(|_| "text.format"),
        })
    }

    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        let include = self.fields.include.as_deref().unwrap_or_default();
        for (i, name) in include.iter().enumerate() {
            if !matches!(name.as_str(), "message.output_text.logprobs" | "reasoning.encrypted_content") {
                return Err(ApiError::unsupported(format!("include[{i}]"), "\"message.output_text.logprobs\" is"));
            }
        }
        let wanted = include.iter().any(|name| name == "message.output_text.logprobs");
        match self.fields.top_logprobs {
            Some(top) if top > MAX_TOP_LOGPROBS => {
                Err(ApiError::value("top_logprobs", format!("is {top}; it must be at most {MAX_TOP_LOGPROBS}")))
            }
            Some(1..) if !wanted => Err(ApiError::value("top_logprobs", "needs \"message.output_text.logprobs\" in `include`")),
            top => Ok(wanted.then_some(top.unwrap_or(0))),
        }
    }

    /// The form of its text, as it was asked for.
    fn format(&self) -> Value {
        let Some(format) = self.fields.text.as_ref().and_then(|text| text.format.as_ref()) else {
            return json!({ "type": "text" });
        };
        if format.kind != "json_schema" {
            return json!({ "type": format.kind });
        }
        let TextFormat { kind, name, description, strict, schema } = format;
        json!({ "type": kind, "name": name, "description": description, "strict": strict, "schema": schema })
    }

    /// The response object.
    pub fn response(&self, envelope: &Envelope, state: &State) -> Value {
        let fields = &self.fields;
        let (status, incomplete, error) = match &state.ended {
            None => ("in_progress", Value::Null, Value::Null),
            Some(Ended::Finished(FinishReason::Length)) => ("incomplete", json!({ "reason": "max_output_tokens" }), Value::Null),
            Some(Ended::Finished(FinishReason::Stop | FinishReason::ToolCalls)) => ("completed", Value::Null, Value::Null),
            Some(Ended::Finished(reason)) => ("incomplete", json!({ "reason": reason.as_str() }), Value::Null),
            Some(Ended::Failed(message)) => ("failed", Value::Null, json!({ "code": "server_error", "message": message })),
        };
        json!({
            "id": envelope.id,
            "object": "response",
            "created_at": envelope.created,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": null,
            "metadata": fields.metadata.clone().unwrap_or_default(),
            "model": envelope.model,
            "output": state.items,
            "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": null,
            "reasoning": { "effort": fields.reasoning.clone().unwrap_or_default().effort, "summary": null },
            "safety_identifier": null,
            "service_tier": "default",
            "store": self.store(),
            "temperature": fields.temperature,
            "text": { "format": self.format(), "verbosity": "medium" },
            "tool_choice": fields.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": fields.tools.clone().unwrap_or_default(),
            "top_logprobs": fields.top_logprobs.unwrap_or(0),
            "top_p": fields.top_p,
            "truncation": fields.truncation.as_deref().unwrap_or("disabled"),
            "usage": state.usage.as_ref().map(usage),
            "user": fields.user,
        })
    }
}

/// An error of messages as one of the input.
pub fn of_input(mut error: ApiError) -> ApiError {
    error.param = error.param.map(|param| param.replacen("messages", "input", 1));
    error.message = error.message.replacen("messages", "input", 1);
    error
}

/// The message that an input item is; none for what only helps a model of OpenAI's.
fn message_of(index: usize, item: &Value) -> Result<Option<Value>, ApiError> {
    match item.get("type").and_then(Value::as_str) {
        None | Some("message") => {
            let mut message = item.clone();
            if let Some(object) = message.as_object_mut() {
                for key in ["type", "id", "status", "phase"] {
                    object.shift_remove(key);
                }
            }
            Ok(Some(message))
        }
        Some("reasoning") => Ok(None),
        Some("function_call") => Ok(Some(tools::call_message(&item["call_id"], &item["name"], &item["arguments"]))),
        Some("function_call_output") => {
            let output = match &item["output"] {
                text @ Value::String(_) => text.clone(),
                parts @ Value::Array(_) => parts.clone(),
                _ => return Err(ApiError::value(format!("input[{index}].output"), "must be a string or a list of text parts")),
            };
            Ok(Some(tools::result_message(&item["call_id"], &output)))
        }
        Some(kind) => {
            let shown: String = kind.chars().take(32).collect();
            Err(ApiError::unsupported(
                format!("input[{index}].type"),
                format!("{shown:?} is neither a message nor a function's call or output"),
            ))
        }
    }
}

/// What a response has come to.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Reasoning, message and calls.
    pub items: Vec<Value>,
    /// Why it ended.
    pub ended: Option<Ended>,
    /// What it took.
    pub usage: Option<Usage>,
}

/// Why a response ended.
#[derive(Clone, Debug)]
pub enum Ended {
    /// It is as complete as it will be.
    Finished(FinishReason),
    /// A step failed.
    Failed(String),
}

/// A part of text.
pub fn text_part(text: &str, logprobs: Option<ChatLogprobs>) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs.map_or_else(Vec::new, |l| l.content) })
}

/// A message of these parts.
pub fn message_item(id: &str, status: &str, content: &[Value]) -> Value {
    json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": content })
}

/// Reasoning, whose text comes in full.
pub fn reasoning_item(id: &str, text: &str) -> Value {
    json!({ "type": "reasoning", "id": id, "summary": [], "content": [{ "type": "reasoning_text", "text": text }], "status": "completed" })
}

/// A call.
pub fn call_item(id: &str, status: &str, call: &ToolCall) -> Value {
    json!({
        "type": "function_call",
        "id": id,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    })
}

/// The status of a message that ended so.
pub fn item_status(reason: FinishReason) -> &'static str {
    if matches!(reason, FinishReason::Stop | FinishReason::ToolCalls) { "completed" } else { "incomplete" }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "encoded_images": usage.encoded_images,
    })
}
