//! `POST /v1/chat/completions`.

use engine::{GenerationRequest, Prompt, RenderOptions};
use serde_json::{Map, Value};

use crate::{
    ApiError, Fields, Generation, MAX_TOP_LOGPROBS, ModelContext, Rule,
    fields::fields,
    messages,
    sampling::{COMMON_RULES, SamplingFields, check_choices, is_empty},
    tools::{self, MAX_TOOLS},
};

fields! {
    /// What only chats have.
    pub struct ChatFields {
        /// The model's id, `default`, or another of its names.
        model: String,
        /// The conversation: objects with `role` and `content`, which is a string or a list of parts.
        #[schemars(schema_with = "messages::schema")]
        messages: Vec<Value>,
        /// Generated tokens at most; the older name.
        #[schemars(range(min = 1))]
        max_tokens: usize,
        /// Generated tokens at most.
        #[schemars(range(min = 1))]
        max_completion_tokens: usize,
        /// Log probabilities of the answer's tokens.
        logprobs: bool,
        /// Of that many likeliest tokens at each position, 20 at most.
        #[schemars(range(max = MAX_TOP_LOGPROBS))]
        top_logprobs: usize,
        /// How much a reasoning model thinks: none, minimal, low, medium, high or xhigh.
        #[schemars(extend("enum" = ["off", "none", "minimal", "low", "medium", "high", "xhigh", "max", null]))]
        reasoning_effort: String,
        /// Whether a reasoning model thinks.
        enable_thinking: bool,
        /// Tokens of reasoning at most; behind them the answer begins.
        thinking_token_budget: usize,
        /// The same, as llama.cpp's server calls it.
        thinking_budget_tokens: usize,
        /// Variables of the chat template.
        chat_template_kwargs: Map<String, Value>,
        /// Ends the prompt with the beginning of an answer; true unless given.
        add_generation_prompt: bool,
        /// The answer goes on from the last message.
        continue_final_message: bool,
        /// Documents for a template that knows them.
        documents: Vec<Value>,
        /// Functions that the model may call: `{"type": "function", "function": {"name", "description", "parameters",
        /// "strict"}}`.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Vec<Value>,
        /// "auto", "none", "required", `{"type": "function", "function": {"name"}}`, or `{"type": "allowed_tools", ...}`.
        tool_choice: Value,
        /// False: an answer has one call at most.
        parallel_tool_calls: bool,
        /// Leading messages that are shared in spite of a `cache_salt`.
        public_messages: usize,
    }
}

const RULES: &[(&str, Rule)] = &[
    ("store", Rule::True(|v| v == false, "chats are not stored: leave it out, or send false")),
    ("modalities", Rule::True(|v| *v == serde_json::json!(["text"]), "send [\"text\"]")),
    ("verbosity", Rule::True(|v| v == "medium", "send \"medium\"")),
    ("prompt_cache_key", Rule::Label),
    ("prompt_cache_retention", Rule::Label),
    ("functions", Rule::True(is_empty, "use tools")),
    ("function_call", Rule::True(|v| v == "none" || v == "auto", "use tool_choice")),
    ("tool_schemas", Rule::Refused("use tools")),
    ("audio", Rule::Refused("this version takes and writes text only")),
    ("prediction", Rule::Refused("leave it out")),
    ("web_search_options", Rule::Refused("this version searches nothing")),
    ("chat_template", Rule::Refused("the server's operator chooses the template, with --chat-template")),
    ("best_of", Rule::Refused("use n")),
    ("echo", Rule::True(|v| v == false, "use /v1/completions")),
    ("include_reasoning", Rule::True(|v| v == true, "leave it out")),
    ("separate_reasoning", Rule::True(|v| v == true, "reasoning always stands apart: leave it out")),
    ("stream_reasoning", Rule::True(|v| v == true, "reasoning is streamed as it comes: leave it out")),
    ("mm_processor_kwargs", Rule::Refused("the operator sizes images, with --max-edge")),
    ("session_id", Rule::Refused("this version keeps no sessions")),
    ("files", Rule::Refused("send images as parts of a message, of the type image_url")),
    ("max_tool_rounds", Rule::Refused("this server runs no tools: the client does")),
    ("agent_permission", Rule::Refused("this server runs no tools: the client does")),
];

/// A chat, and how it is to be answered.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// What only chats have.
    pub chat: ChatFields,
    /// The rest.
    pub sampling: SamplingFields,
}

impl ChatRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self { chat: ChatFields::take(&mut fields)?, sampling: SamplingFields::take(&mut fields)? };
        fields.finish(&[RULES, COMMON_RULES].concat())?;
        Ok(request)
    }

    /// Checks it, in the engine's terms.
    pub fn into_generation(self, context: &ModelContext) -> Result<Generation, ApiError> {
        let Self { chat, sampling } = self;
        let messages = chat.messages.clone().ok_or_else(|| {
            ApiError::missing("messages", "give at least one message, such as {\"role\": \"user\", \"content\": \"Hello\"}")
        })?;
        let n_choices = sampling.n.unwrap_or(1);
        check_choices("n", 1, n_choices)?;
        let params = sampling.sampling(chat.max_tokens()?, chat.logprobs()?)?;
        let mut service = sampling.service()?;
        service.public_prefix = chat.public_messages.unwrap_or(0);
        let delivery = sampling.delivery()?;
        let prompt = Prompt::Chat { messages: messages::parse(messages, context)?, options: chat.render_options()? };
        let request = GenerationRequest { service, n_choices, ..GenerationRequest::new(prompt, params) };
        let request = sampling.with_wishes(request)?;
        let grammar_param = sampling.grammar_param();
        Ok(Generation { model: chat.model, requests: vec![request], delivery, user: sampling.user, grammar_param })
    }
}

impl ChatFields {
    fn max_tokens(&self) -> Result<Option<usize>, ApiError> {
        match (self.max_tokens, self.max_completion_tokens) {
            (Some(older), Some(newer)) if older != newer => Err(ApiError::value(
                "max_completion_tokens",
                format!("is {newer} and `max_tokens` {older}; they are two names of one limit: give one of them"),
            )),
            (older, newer) => Ok(newer.or(older)),
        }
    }

    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (_, Some(top)) if top > MAX_TOP_LOGPROBS => {
                Err(ApiError::value("top_logprobs", format!("is {top}; it must be at most {MAX_TOP_LOGPROBS}")))
            }
            (false, Some(1..)) => Err(ApiError::value("top_logprobs", "needs `logprobs`: true")),
            (wanted, top) => Ok(wanted.then_some(top.unwrap_or(0))),
        }
    }

    fn render_options(&self) -> Result<RenderOptions, ApiError> {
        let mut extra = self.chat_template_kwargs.clone().unwrap_or_default();
        messages::check_template_kwargs(&extra)?;
        if let Some(documents) = &self.documents {
            extra.insert("documents".into(), documents.clone().into());
        }
        let from_kwargs = extra.get("enable_thinking").and_then(Value::as_bool);
        let continue_final_message = self.continue_final_message.unwrap_or(false);
        Ok(RenderOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
            enable_thinking: thinking(self.enable_thinking.or(from_kwargs), self.reasoning_effort.as_deref())?,
            reasoning_effort: self.reasoning_effort.clone(),
            thinking_budget: self.thinking_token_budget.or(self.thinking_budget_tokens),
            tools: tools::options(tools::Form::Chat, self.tools.as_deref(), self.tool_choice.as_ref(), self.parallel_tool_calls)?,
            extra,
            ..RenderOptions::default()
        })
    }
}

/// Whether a reasoning model thinks, as the template gets it: an effort of "off" or "none" turns thinking off.
pub fn thinking(enable_thinking: Option<bool>, effort: Option<&str>) -> Result<Option<bool>, ApiError> {
    match effort {
        None | Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => Ok(enable_thinking),
        Some("off" | "none") if enable_thinking == Some(true) => {
            Err(ApiError::value("reasoning_effort", "is off and `enable_thinking` is true; leave one of them out"))
        }
        Some("off" | "none") => Ok(Some(false)),
        Some(other) => {
            let shown: String = other.chars().take(32).collect();
            let names = "off, none, minimal, low, medium, high, xhigh, max";
            Err(ApiError::value("reasoning_effort", format!("must be one of {names}, got {shown:?}")))
        }
    }
}
