//! Errors of the engine; every one names the value that cannot be honoured.

use std::{
    borrow::Cow,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    sync::Once,
};

use thiserror::Error;

/// Characters of an error's words at most, for files and requests that are quoted may be of any length. The names of all
/// architectures fit.
const MAX_CHARS: usize = 2000;

/// The beginning and the end of words that are too long.
fn bounded(words: &str) -> Cow<'_, str> {
    let num_chars = words.len().checked_sub(MAX_CHARS).map_or(0, |_| words.chars().count());
    if num_chars <= MAX_CHARS {
        return words.into();
    }
    let (end, _) = words.char_indices().nth(MAX_CHARS * 3 / 4).unwrap_or_default();
    let (start, _) = words.char_indices().nth_back(MAX_CHARS / 4).unwrap_or_default();
    format!("{} [...] {}", &words[..end], &words[start..]).into()
}

/// What can go wrong from loading a model to ending a request.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A file is missing, unreadable or malformed.
    #[error("{}", bounded(.0))]
    Load(String),
    /// The architecture is not implemented, or contradicts the configuration.
    #[error("{}", bounded(.0))]
    Architecture(String),
    /// An argument of the engine or of a request cannot be honoured.
    #[error("{}", bounded(.0))]
    InvalidArgument(String),
    /// A prompt that leaves no room for an answer, in the model's context or in the whole pool.
    #[error("{}", bounded(message))]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of prompt and answer together at most.
        max_tokens: usize,
        /// Which of the two it is.
        message: String,
    },
    /// Part of the mirrored interface that is not there yet.
    #[error("{}", bounded(.0))]
    NotSupported(String),
    /// The chat template is missing or rejected the messages.
    #[error("{}", bounded(.0))]
    ChatTemplate(String),
    /// The tokenizer is missing or malformed.
    #[error("{}", bounded(.0))]
    Tokenizer(String),
    /// The grammar of an answer cannot be compiled.
    #[error("{}", bounded(message))]
    Grammar {
        /// What is wrong with it.
        fault: crate::GrammarFault,
        /// Where, and what would work.
        message: String,
    },
    /// An adapter cannot be loaded, or is not there.
    #[error("{}", bounded(message))]
    Adapter {
        /// Why, in the mirrored words: `lora_adapter_not_found` and so on.
        code: &'static str,
        /// Which, and what would work.
        message: String,
    },
    /// The device refused something.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The KV pool cannot be made as asked.
    #[error(transparent)]
    KvCache(#[from] paged::ConfigError),
    /// The engine accepts no requests, as it was told.
    #[error("{}", bounded(.0))]
    Draining(String),
    /// An address cannot be listened on.
    #[error("{}", bounded(.0))]
    Address(String),
    /// The device computes no more in this process.
    #[error("{}", bounded(.0))]
    DeviceLost(String),
    /// A step failed, or the engine has stopped.
    #[error("{}", bounded(.0))]
    Internal(String),
}

/// What `work` gives, or the words of its panic.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_message(panic.as_ref()))
}

/// What `work` gives, done on a thread of its own with so many bytes of stack; the words of its panic.
pub(crate) fn with_known_stack<T: Send>(name: &str, stack_bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(stack_bytes);
        let thread = builder
            .spawn_scoped(scope, || caught_quietly(work))
            .map_err(|error| format!("there is no thread for it: {error}"))?;
        thread.join().unwrap_or_else(|_| Err("its thread ended".into()))
    })
}

thread_local! {
    /// Panics of this thread are answers, not defects.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// As [`caught`], for libraries that panic at a file's mistakes: nothing is printed.
pub(crate) fn caught_quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                print(panic);
            }
        }));
    });
    let was_quiet = IS_QUIET.replace(true);
    let result = caught(work);
    IS_QUIET.set(was_quiet);
    result
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_keep_their_beginning_and_their_end() {
        let said = |words: &str| EngineError::Load(words.to_owned()).to_string();
        for words in ["", "short", &"é".repeat(MAX_CHARS)] {
            assert_eq!(said(words), words);
        }
        let long = said(&format!("model.gguf: `{}` is missing", "é".repeat(300_000)));
        assert!(long.starts_with("model.gguf: `é") && long.ends_with("é` is missing"), "{long}");
        assert!(long.chars().count() < MAX_CHARS + 20);
    }
}
