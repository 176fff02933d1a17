//! `POST /tokenize`, `/detokenize` and `/apply-template`: text to tokens and back, without generation.

use serde_json::{Map, Value};

use crate::{ApiError, Fields, fields::fields};

fields! {
    /// `POST /tokenize`: a text as `prompt` (vLLM) or `content` (llama.cpp), or a chat as `messages`.
    pub struct TokenizeRequest {
        /// The model's id.
        model: String,
        /// The text.
        prompt: String,
        /// The text, by another name.
        content: String,
        /// The chat.
        #[schemars(schema_with = "crate::messages::nullable_schema")]
        messages: Vec<Value>,
        /// Adds BOS and the like to a text; true unless given, for `content` false.
        add_special_tokens: bool,
        /// llama.cpp's name of it.
        add_special: bool,
        /// Ends a chat with the beginning of an answer; true unless given.
        add_generation_prompt: bool,
        /// Ends a chat with the text of its last message.
        continue_final_message: bool,
        /// Variables of the chat template.
        chat_template_kwargs: Map<String, Value>,
        /// Each token's text as well.
        return_token_strs: bool,
        /// Tokens become objects with `id` and `piece`: llama.cpp's.
        with_pieces: bool,
    }
}

fields! {
    /// `POST /detokenize`.
    pub struct DetokenizeRequest {
        /// The model's id.
        model: String,
        /// Token ids.
        tokens: Vec<u32>,
    }
}

impl TokenizeRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self::take(&mut fields)?;
        fields.finish(&[])?;
        let given = [request.prompt.is_some(), request.content.is_some(), request.messages.is_some()];
        match given.iter().filter(|is_given| **is_given).count() {
            0 => Err(ApiError::missing("prompt", "give prompt, content or messages")),
            1 => Ok(request),
            _ => Err(ApiError::value("prompt", "goes alone: give one of prompt, content and messages")),
        }
    }
}

impl DetokenizeRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let request = Self::take(&mut fields)?;
        fields.finish(&[])?;
        Ok(request)
    }
}
