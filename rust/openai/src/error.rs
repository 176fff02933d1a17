//! What a client is told when a request cannot be served.

use std::fmt::Display;

use engine::EngineError;
use serde_json::{Map, Value, json};

/// Characters of what is said of a value, which may quote it.
const MAX_CHARS: usize = 400;

/// An error in OpenAI's form. Everything that it says is safe to be shown to a client.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// `invalid_request_error`, `authentication_error`, ...
    pub kind: &'static str,
    /// The machine's word for it, such as `unknown_parameter`.
    pub code: &'static str,
    /// JSON path of the field that is wrong.
    pub param: Option<String>,
    /// What is wrong, and what would work.
    pub message: String,
    /// Seconds after which it may work.
    pub retry_after: Option<u64>,
    /// Further keys of the error object.
    pub extra: Option<Box<Map<String, Value>>>,
}

impl ApiError {
    /// A request that cannot be honoured: 400.
    pub fn invalid(code: &'static str, param: impl Into<Option<String>>, message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", code, param.into(), message.into())
    }

    /// A value out of its range: 400.
    pub fn value(param: impl Into<String>, message: impl Display) -> Self {
        let param = param.into();
        let message: String = format!("`{param}` {message}").chars().take(MAX_CHARS).collect();
        Self::invalid("invalid_value", param, message)
    }

    /// A parameter that is known and not supported: 400.
    pub fn unsupported(param: impl Into<String>, advice: impl Display) -> Self {
        let param = param.into();
        let message = format!("`{param}` is not supported by this server; {advice}");
        Self::invalid("unsupported_parameter", param, message)
    }

    /// A parameter that must be there: 400.
    pub fn missing(param: &str, advice: impl Display) -> Self {
        Self::invalid("missing_required_parameter", param.to_owned(), format!("Missing required parameter: '{param}'; {advice}"))
    }

    /// Any other.
    pub fn new(status: u16, kind: &'static str, code: &'static str, param: Option<String>, message: String) -> Self {
        Self { status, kind, code, param, message, retry_after: None, extra: None }
    }

    /// The error object of OpenAI's clients: `{"error": {message, type, param, code}}`, always all four.
    pub fn body(&self) -> Value {
        let mut error = json!({ "message": self.message, "type": self.kind, "param": self.param, "code": self.code });
        if let (Value::Object(object), Some(extra)) = (&mut error, &self.extra) {
            object.extend(Map::clone(extra));
        }
        json!({ "error": error })
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::PromptTooLong { prompt_tokens, max_tokens, .. } => {
                let message = format!(
                    "This model's maximum context length is {max_tokens} tokens. However, your prompt has {prompt_tokens} tokens, and \
                     at least one is generated. Shorten the prompt, or set truncate_sequence."
                );
                let mut error = Self::invalid("context_length_exceeded", None, message);
                let numbers = [("n_prompt_tokens", prompt_tokens), ("n_ctx", max_tokens)];
                error.extra = Some(Box::new(numbers.map(|(key, number)| (key.to_owned(), number.into())).into_iter().collect()));
                error
            }
            EngineError::InvalidArgument(_) | EngineError::Tokenizer(_) | EngineError::KvCache(_) => {
                Self::invalid("invalid_value", None, message)
            }
            EngineError::Grammar { fault, .. } => Self::invalid(fault.as_str(), None, message),
            EngineError::ChatTemplate(_) => Self::invalid("invalid_messages", "messages".to_owned(), message),
            EngineError::NotSupported(_) => Self::invalid("unsupported_parameter", None, message),
            EngineError::Adapter { code, .. } => {
                let status = match code {
                    "lora_adapter_not_found" | "adapter_file_not_found" => 404,
                    "lora_runtime_unavailable" | "lora_adapter_already_loaded" | "lora_generation_mismatch" => 409,
                    "lora_load_busy" => 429,
                    _ => 400,
                };
                let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
                let mut error = Self::new(status, kind, code, None, message);
                error.retry_after = (status == 429).then_some(1);
                error
            }
            EngineError::Draining(_) => {
                let mut error = Self::new(503, "server_error", "draining", None, "the server is shutting down".into());
                error.retry_after = Some(10);
                error
            }
            EngineError::DeviceLost(_) => Self::new(503, "server_error", "device_lost", None, message),
            EngineError::Load(_)
            | EngineError::Architecture(_)
            | EngineError::Device(_)
            | EngineError::Address(_)
            | EngineError::Internal(_) => Self::new(500, "server_error", "internal_error", None, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_quoted_in_part() {
        let error = ApiError::value("tokens", format!("is not what it must be: {}", "\u{e9}".repeat(100_000)));
        assert!(error.message.starts_with("`tokens` is not what it must be: \u{e9}"), "{}", error.message);
        assert_eq!(error.message.chars().count(), MAX_CHARS);
    }
}
