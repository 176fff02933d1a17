//! A query and a document as the messages of a chat, which a template makes a prompt of.

use std::cell::OnceCell;

use serde_json::{Map, Value};

use crate::{ChatTemplate, Engine, EngineError, Message, MessageContent, RenderOptions};

/// How a chat template writes two texts: as messages whose roles are `query` and `document`, behind the prompt of the model's
/// files, whose role is `system`.
#[derive(Clone, Debug, PartialEq)]
pub struct PairTemplate {
    /// Contents are lists of parts, whatever the template looks for.
    pub has_parts: bool,
    /// It ends with the beginning of an answer, if the template has one.
    pub add_generation_prompt: bool,
    /// What the template writes behind the texts stays where a prompt is cut.
    pub keeps_end: bool,
    /// Further variables.
    pub variables: Map<String, Value>,
}

impl PairTemplate {
    fn options(&self) -> RenderOptions {
        RenderOptions {
            add_generation_prompt: self.add_generation_prompt,
            has_parts: self.has_parts,
            extra: self.variables.clone(),
            ..RenderOptions::default()
        }
    }

    /// Whether a template writes both texts: one that knows the roles of a chat alone leaves them out.
    pub(crate) fn check(&self, template: Option<&ChatTemplate>, prompt: Option<&str>) -> Result<(), EngineError> {
        let refused = |why: &str| {
            EngineError::ChatTemplate(format!(
                "the model scores pairs of texts by its chat template, {why}: give one for messages with the roles query and \
                 document with chat_template or jinja_explicit"
            ))
        };
        let template = template.ok_or_else(|| refused("and has none"))?;
        let written = |query, document| template.render(&messages(prompt, query, document), &self.options());
        let both = written("alpha", "bravo")?;
        for (role, other) in [("query", written("charlie", "bravo")?), ("document", written("alpha", "foxtrot")?)] {
            if other == both {
                return Err(refused(&format!("which leaves out the {role}")));
            }
        }
        Ok(())
    }
}

fn messages(prompt: Option<&str>, query: &str, document: &str) -> Vec<Message> {
    let texts = [("system", prompt.unwrap_or_default()), ("query", query), ("document", document)];
    let given = texts.into_iter().filter(|(role, text)| *role != "system" || !text.is_empty());
    given.map(|(role, text)| Message::new(role, MessageContent::Text(text.to_owned()))).collect()
}

/// The documents of one query.
pub(super) struct ChatPairs<'a> {
    engine: &'a Engine,
    template: &'a PairTemplate,
    prompt: Option<&'a str>,
    query: &'a str,
    /// The tokens that every prompt ends with.
    end: OnceCell<Vec<u32>>,
}

impl<'a> ChatPairs<'a> {
    pub(super) fn new(engine: &'a Engine, template: &'a PairTemplate, prompt: Option<&'a str>, query: &'a str) -> Self {
        Self { engine, template, prompt, query, end: OnceCell::new() }
    }

    /// The token ids of the query with a document, no more than `limit`: where there would be, the text of the document goes
    /// first, and what the template writes behind it stays.
    pub(super) fn encode(&self, document: &str, limit: Option<usize>) -> Result<Vec<u32>, EngineError> {
        let mut ids = self.tokens(self.query, document)?;
        let Some(limit) = limit.filter(|limit| *limit < ids.len()) else { return Ok(ids) };
        if self.engine.tokenizer().cuts_left() {
            ids.drain(..ids.len() - limit);
        } else {
            ids.truncate(limit);
        }
        let end = self.end()?;
        let kept = end.len().min(limit);
        ids[limit - kept..].copy_from_slice(&end[end.len() - kept..]);
        Ok(ids)
    }

    fn tokens(&self, query: &str, document: &str) -> Result<Vec<u32>, EngineError> {
        Ok(self.engine.render_chat(&messages(self.prompt, query, document), &self.template.options())?.1)
    }

    /// What prompts of texts that have no token in common end with alike.
    fn end(&self) -> Result<&[u32], EngineError> {
        if let Some(end) = self.end.get() {
            return Ok(end);
        }
        let (one, other) = ("0", "1 2 3 4");
        let (one, other) = (self.tokens(one, one)?, self.tokens(other, other)?);
        let shared = one.iter().rev().zip(other.iter().rev()).take_while(|(a, b)| a == b).count();
        let is_end = self.template.keeps_end && shared < one.len().min(other.len());
        Ok(self.end.get_or_init(|| if is_end { one[one.len() - shared..].to_vec() } else { Vec::new() }))
    }
}
