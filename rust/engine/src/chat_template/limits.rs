//! How large a template may be, so that its parser needs no more stack than it has.
//!
//! The parser descends into operators, filters, conditions and blocks, one call or several for each, and bounds that itself in
//! parentheses only. So how deep it may get is bounded here by what a template is made of, and it runs on a thread whose stack
//! holds that.

use crate::{EngineError, error};

/// Bytes of a template; the longest of well-known models have 30 KB.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Names, numbers, texts and signs between two braces; some hundred are many.
const MAX_TOKENS: usize = 4096;
/// Blocks, `{% ... %}`; some hundred are many.
const MAX_BLOCKS: usize = 8192;
/// Address space, committed as it is used. Parsing takes up to 4 KB a token or block, some times that in a build without
/// optimisation.
const STACK_BYTES: usize = 1 << 28;

/// An [`EngineError::ChatTemplate`] for a source that is larger.
pub(super) fn check(source: &str) -> Result<(), EngineError> {
    let fail = |why: String| Err(EngineError::ChatTemplate(format!("the chat template {why}")));
    if source.len() > MAX_BYTES {
        return fail(format!("has {} bytes; at most {MAX_BYTES} are read", source.len()));
    }
    let mut blocks = 0;
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        blocks += usize::from(rest[start..].starts_with("{%"));
        if blocks > MAX_BLOCKS {
            return fail(format!("has more than {MAX_BLOCKS} blocks"));
        }
        let (tokens, len) = scan(&rest[start + 2..]);
        if tokens > MAX_TOKENS {
            let line = source[..source.len() - rest.len() + start].matches('\n').count() + 1;
            return fail(format!("has an expression of more than {MAX_TOKENS} tokens on line {line}"));
        }
        rest = &rest[start + 2 + len..];
    }
    Ok(())
}

/// Tokens up to the end of an expression or block, and its bytes. Texts in quotes are one token, whatever is in them.
fn scan(inside: &str) -> (usize, usize) {
    let bytes = inside.as_bytes();
    let (mut tokens, mut at) = (0, 0);
    while at < bytes.len() && tokens <= MAX_TOKENS {
        if bytes[at..].starts_with(b"}}") || bytes[at..].starts_with(b"%}") {
            break;
        }
        let is_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b >= 0x80;
        at += match bytes[at] {
            space if space.is_ascii_whitespace() => 1,
            quote @ (b'"' | b'\'') => {
                tokens += 1;
                text_len(&bytes[at..], quote)
            }
            _ => {
                tokens += 1;
                bytes[at..].iter().take_while(|b| is_word(b)).count().max(1)
            }
        };
    }
    // A sign may be the first byte of a character.
    (tokens, (at..=inside.len()).find(|end| inside.is_char_boundary(*end)).unwrap_or(inside.len()))
}

/// Bytes of a text in quotes, both included.
fn text_len(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b if b == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Runs `work` where a template within the limits cannot use the stack up.
pub(super) fn with_known_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, EngineError> {
    error::with_known_stack("chat-template", STACK_BYTES, work)
        .map_err(|why| EngineError::ChatTemplate(format!("the chat template cannot be read: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_to_the_end_of_the_expression() {
        for (inside, tokens, len) in [
            (" a }} rest", 1, 3),
            ("a.b[0]|join(', }} ')%}", 11, 20),
            (" 'it\\'s' ~ \"%}\" }}", 3, 16),
            ("'never ends", 1, 11),
            (" \u{e9}t\u{e9} }}", 1, 7),
        ] {
            assert_eq!(scan(inside), (tokens, len), "{inside}");
        }
    }

    #[test]
    fn long_texts_are_no_long_expressions() {
        let text = "- ".repeat(100_000);
        check(&format!("{{{{ '{text}' }}}}{text}")).unwrap();
        check(&"{{ a }}".repeat(100_000)).unwrap();
    }
}
