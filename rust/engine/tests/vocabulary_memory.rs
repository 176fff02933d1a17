//! Memory of a tokenizer from untrusted metadata; alone in its process, for nothing else may allocate beside it.

#![allow(missing_docs)]

use engine::{
    Tokenizer,
    weights::{Metadata, metadata::MetadataValue},
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

#[test]
fn a_vocabulary_of_empty_tokens_takes_memory_like_its_file() {
    // In a file each such token takes the eight bytes of its length.
    const NUM_TOKENS: usize = 1 << 22;
    let values = [
        ("tokenizer.ggml.model", MetadataValue::String("gpt2".into())),
        ("tokenizer.ggml.tokens", MetadataValue::Strings(vec![String::new(); NUM_TOKENS])),
        ("tokenizer.ggml.merges", MetadataValue::Strings(Vec::new())),
    ];
    let metadata = Metadata::new(values.map(|(key, value)| (key.to_owned(), value)).into());
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let _ = Tokenizer::from_gguf(&metadata);
    let used = MEMORY.peak_usage().saturating_sub(before);
    assert!(used < 3 * 8 * NUM_TOKENS, "{used} bytes for {NUM_TOKENS} empty tokens");
}
