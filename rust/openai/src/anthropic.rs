//! `POST /v1/messages`: Anthropic's form of a chat.

use engine::{
    CompletionChoice, FinishReason, GenerationRequest, Grammar, Message, MessageContent, Prompt, RenderOptions, SamplingParams,
    Usage,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::{Map, Value, json};

use crate::{
    ApiError, Delivery, Fields, Generation, MAX_STOPS, ModelContext, Rule,
    fields::{fields, without_fractions},
    media, messages,
    sampling::is_empty,
    structured::{NamedSchema, ResponseFormat},
    tools::{self, MAX_TOOLS},
};

/// Claude Code's first system block: a number that is new each time and would make every prompt a new one to the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

fields! {
    /// A request for a message.
    pub struct MessagesFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// The conversation: objects with `role` ("user" or "assistant") and `content`, a string or a list of text blocks.
        #[schemars(schema_with = "messages::schema")]
        messages: Vec<Value>,
        /// The system prompt: a string or a list of text blocks.
        #[schemars(schema_with = "system_schema")]
        system: Value,
        /// Generated tokens at most; required.
        #[schemars(range(min = 1))]
        max_tokens: usize,
        /// Divides the logits; 0 is greedy.
        #[schemars(range(min = 0.0))]
        temperature: f32,
        /// The likeliest tokens of that probability together.
        #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
        top_p: f32,
        /// The k likeliest tokens; 0 is off.
        top_k: usize,
        /// Strings that end the text.
        #[schemars(length(max = MAX_STOPS.0), inner(length(min = 1, max = MAX_STOPS.1)))]
        stop_sequences: Vec<String>,
        /// Sends server-sent events.
        stream: bool,
        /// `user_id`: requests of one tenant take turns by it.
        metadata: Metadata,
        /// What form the text has; the older key.
        output_format: OutputFormat,
        /// What form the text has.
        output_config: OutputConfig,
        /// Functions that the model may call: `{"name", "description", "input_schema"}`.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Vec<Value>,
        /// `{"type": "auto"}`, "any", "none", or `{"type": "tool", "name"}`; with `disable_parallel_tool_use` one call at most.
        tool_choice: Value,
        /// Whether a reasoning model thinks.
        thinking: Thinking,
    }
}

/// Whose request it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
pub struct Metadata {
    /// Any text.
    pub user_id: Option<String>,
}

/// Whether a reasoning model thinks.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct Thinking {
    /// "enabled", "adaptive" or "disabled".
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["enabled", "adaptive", "disabled"]))]
    pub kind: String,
    /// Tokens of thinking at most; behind them the answer begins.
    #[serde(default, deserialize_with = "whole")]
    pub budget_tokens: Option<usize>,
}

/// JSON by a schema.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputFormat {
    /// "json_schema".
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["json_schema"]))]
    pub kind: String,
    /// The JSON Schema.
    pub schema: Option<Value>,
}

/// What form the text has.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputConfig {
    /// JSON by a schema.
    pub format: Option<OutputFormat>,
}

impl MessagesFields {
    fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        let newer = self.output_config.as_ref().and_then(|config| config.format.clone());
        let format = match (newer, self.output_format.clone()) {
            (Some(_), Some(_)) => {
                return Err(ApiError::value("output_format", "is the older name of `output_config.format`: leave one out"));
            }
            (newer, older) => newer.or(older),
        };
        let Some(OutputFormat { kind, schema }) = format else { return Ok(None) };
        let named = (kind == "json_schema").then_some(NamedSchema { name: None, description: None, strict: None, schema });
        ResponseFormat { kind, json_schema: named, ..ResponseFormat::default() }.grammar_without_tags("output_config.format")
    }
}

/// An integer within an object, however it is written.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let mut value = Value::deserialize(deserializer)?;
    without_fractions(&mut value);
    serde_json::from_value(value).map_err(D::Error::custom)
}

const RULES: &[(&str, Rule)] = &[
    ("service_tier", Rule::True(|v| v == "auto" || v == "standard_only", "leave it out")),
    ("cache_control", Rule::Label),
    ("container", Rule::Refused("this version runs no code")),
    ("mcp_servers", Rule::True(is_empty, "this server runs no tools: the client does")),
    ("context_management", Rule::Refused("leave it out")),
];

/// A request for a message.
#[derive(Clone, Debug, Default)]
pub struct MessagesRequest {
    fields: MessagesFields,
}

impl MessagesRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self { fields: MessagesFields::take(&mut fields)? };
        fields.finish(RULES)?;
        Ok(request)
    }

    /// What it calls the model.
    pub fn model(&self) -> Option<&str> {
        self.fields.model.as_deref()
    }

    /// Generated tokens at most, as the request says.
    pub fn max_tokens(&self) -> Option<usize> {
        self.fields.max_tokens
    }

    /// The conversation, and what its template gets.
    fn chat(&self, context: &ModelContext) -> Result<(Vec<Message>, RenderOptions), ApiError> {
        let fields = &self.fields;
        let given = fields.messages.clone().ok_or_else(|| ApiError::missing("messages", "give at least one message"))?;
        let mut chat: Vec<Message> = system(fields.system.as_ref())?.into_iter().collect();
        // A conversation that ends with the assistant's words is gone on from there.
        let continues = given.last().is_some_and(|message| message["role"] == "assistant");
        let mut converted = Vec::new();
        for (i, message) in given.into_iter().map(without_cache_control).enumerate() {
            convert(i, message, &mut converted)?;
        }
        chat.extend(messages::parse(converted, context)?);
        let enable_thinking = match fields.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            None => None,
            Some("enabled" | "adaptive") => Some(true),
            Some("disabled") => Some(false),
            Some(_) => return Err(ApiError::value("thinking.type", "must be \"enabled\", \"adaptive\" or \"disabled\"")),
        };
        let options = RenderOptions {
            add_generation_prompt: !continues,
            continue_final_message: continues,
            enable_thinking,
            thinking_budget: fields.thinking.as_ref().and_then(|thinking| thinking.budget_tokens),
            tools: tools::options(tools::Form::Messages, fields.tools.as_deref(), fields.tool_choice.as_ref(), None)?,
            ..RenderOptions::default()
        };
        Ok((chat, options))
    }

    /// As [`Self::into_generation`], of a request whose tokens are only counted, and which may leave `max_tokens` out.
    pub fn into_count(mut self, context: &ModelContext) -> Result<Generation, ApiError> {
        self.fields.max_tokens.get_or_insert(1);
        self.into_generation(context)
    }

    /// Checks it, in the engine's terms.
    pub fn into_generation(self, context: &ModelContext) -> Result<Generation, ApiError> {
        let (chat, options) = self.chat(context)?;
        let fields = self.fields;
        let grammar = fields.grammar()?;
        let max_tokens =
            fields.max_tokens.ok_or_else(|| ApiError::missing("max_tokens", "give the tokens of an answer at most"))?;
        if max_tokens == 0 {
            return Err(ApiError::value("max_tokens", "is 0; it must be at least 1"));
        }
        let stop = fields.stop_sequences.unwrap_or_default();
        crate::sampling::check_stops("stop_sequences", &stop)?;
        let sampling = SamplingParams {
            temperature: fields.temperature,
            top_p: fields.top_p,
            top_k: fields.top_k,
            stop,
            max_tokens: Some(max_tokens),
            grammar,
            ..SamplingParams::default()
        };
        let stream = fields.stream.unwrap_or(false);
        let request = GenerationRequest { stream, ..GenerationRequest::new(Prompt::Chat { messages: chat, options }, sampling) };
        Ok(Generation {
            model: fields.model,
            requests: vec![request],
            delivery: Delivery { stream, ..Delivery::default() },
            user: fields.metadata.and_then(|metadata| metadata.user_id),
            grammar_param: Some("output_config.format"),
        })
    }
}

fn system_schema(_: &mut SchemaGenerator) -> Schema {
    let text = json!({ "type": "object", "properties": { "type": { "const": "text" }, "text": { "type": "string" } }, "required": ["type", "text"] });
    json_schema!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": text }, { "type": "null" }] })
}

/// The system prompt as a message.
fn system(system: Option<&Value>) -> Result<Option<Message>, ApiError> {
    let text = match system {
        None => return Ok(None),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(blocks)) => {
            let text = |(i, block): (usize, &Value)| match block["text"].as_str() {
                Some(text) if block["type"] == "text" => Ok(text.to_owned()),
                _ => Err(ApiError::value(format!("system[{i}]"), "must be a text block")),
            };
            let mut texts = blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
            texts.retain(|text| !text.starts_with(BILLING_HEADER));
            texts.join("\n\n")
        }
        Some(_) => return Err(ApiError::value("system", "must be a string or a list of text blocks")),
    };
    Ok((!text.is_empty()).then(|| Message {
        role: "system".into(),
        content: MessageContent::Text(text),
        media: Vec::new(),
        extra: Map::new(),
    }))
}

/// Marks for a cache are hints, and the cache is automatic.
fn without_cache_control(mut message: Value) -> Value {
    let blocks = message.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten();
    for block in blocks.filter_map(Value::as_object_mut) {
        block.shift_remove("cache_control");
    }
    message
}

/// A message in OpenAI's form: calls stand beside an assistant's text, results in messages of their own.
fn convert(index: usize, mut message: Value, chat: &mut Vec<Value>) -> Result<(), ApiError> {
    let Some(blocks) = message.get_mut("content").and_then(Value::as_array_mut) else {
        chat.push(message);
        return Ok(());
    };
    let blocks = std::mem::take(blocks);
    let (mut rest, mut calls, mut thoughts) = (Vec::new(), Vec::new(), String::new());
    for (i, block) in blocks.into_iter().enumerate() {
        match block["type"].as_str() {
            Some("tool_use") => {
                let call = tools::call_message(&block["id"], &block["name"], &Value::from(block["input"].to_string()));
                calls.push(call["tool_calls"][0].clone());
            }
            Some("tool_result") => {
                let place = format!("messages[{index}].content[{i}]");
                if !block["tool_use_id"].is_string() {
                    return Err(ApiError::missing(&format!("{place}.tool_use_id"), "give the id of the tool_use block"));
                }
                let content = match &block["content"] {
                    Value::Null => Value::from(""),
                    Value::Array(blocks) => {
                        let block =
                            |(i, block): (usize, &Value)| media::of_block(&format!("{place}.content[{i}]"), block.clone());
                        Value::Array(blocks.iter().enumerate().map(block).collect::<Result<_, _>>()?)
                    }
                    content => content.clone(),
                };
                chat.push(tools::result_message(&block["tool_use_id"], &content));
            }
            Some("thinking") => thoughts.push_str(block["thinking"].as_str().unwrap_or_default()),
            Some("redacted_thinking") => {}
            _ => rest.push(media::of_block(&format!("messages[{index}].content[{i}]"), block)?),
        }
    }
    if rest.is_empty() && calls.is_empty() && chat.last().is_some_and(|last| last["role"] == "tool") {
        return Ok(());
    }
    message["content"] = if rest.is_empty() { Value::from("") } else { Value::Array(rest) };
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.into();
    }
    chat.push(message);
    Ok(())
}

/// Tokens of a message: `input_tokens` and `cache_read_input_tokens` together are the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MessageUsage {
    /// Of the prompt, those that were computed.
    pub input_tokens: usize,
    /// Always 0: nothing is charged for writing to the cache.
    pub cache_creation_input_tokens: usize,
    /// Of the prompt, those that the prefix cache had.
    pub cache_read_input_tokens: usize,
    /// Generated.
    pub output_tokens: usize,
    /// Images that had to be encoded, and were not cached.
    pub encoded_images: usize,
}

impl MessageUsage {
    /// Of a request that has ended.
    pub fn new(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
            encoded_images: usage.encoded_images,
        }
    }
}

/// Why a message ended.
pub fn stop_reason(reason: FinishReason, stop_sequence: Option<&str>, output_tokens: usize, max_tokens: usize) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls if stop_sequence.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
        FinishReason::ToolCalls => "tool_use",
        FinishReason::Length if output_tokens < max_tokens => "model_context_window_exceeded",
        FinishReason::Length => "max_tokens",
        FinishReason::Timeout | FinishReason::Canceled | FinishReason::Error => "pause_turn",
    }
}

/// A message's head, without content.
pub fn message(id: &str, model: &str, content: &[Value], ended: Option<(&str, Option<&str>)>, usage: MessageUsage) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": ended.map(|(reason, _)| reason),
        "stop_sequence": ended.and_then(|(_, sequence)| sequence),
        "usage": usage,
    })
}

/// A complete message.
pub fn complete(id: &str, model: &str, choice: &CompletionChoice, usage: &Usage, max_tokens: usize) -> Value {
    let stop = choice.stop_sequence.as_deref();
    let reason = stop_reason(choice.finish_reason, stop, usage.completion_tokens, max_tokens);
    let mut content = Vec::new();
    if let Some(reasoning) = &choice.reasoning {
        content.push(json!({ "type": "thinking", "thinking": reasoning, "signature": "" }));
    }
    if !choice.text.is_empty() || choice.tool_calls.is_empty() {
        content.push(json!({ "type": "text", "text": choice.text }));
    }
    for call in &choice.tool_calls {
        // One that was cut off is no JSON.
        let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        content.push(json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input }));
    }
    message(id, model, &content, Some((reason, stop)), MessageUsage::new(usage))
}
