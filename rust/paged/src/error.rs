//! Every way the crate says no. Each message names the value and says what would work.

use crate::ids::{BlockId, RequestId};

/// Why the block pool refused an operation. The pool is unchanged whenever one of these comes back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Fewer blocks are free than were asked for.
    #[error("{needed} blocks are needed and {free} are free: free some or ask for at most {free}")]
    OutOfBlocks {
        /// Blocks asked for.
        needed: usize,
        /// Blocks free now, cached ones included.
        free: usize,
    },
    /// A block that nobody holds was freed.
    #[error("block {} is not held by anyone and cannot be freed again", .block.0)]
    NotAllocated {
        /// The block.
        block: BlockId,
    },
    /// The same block stands twice in one list.
    #[error("block {} stands twice in the list to free: name each block once", .block.0)]
    DuplicateBlock {
        /// The block.
        block: BlockId,
    },
    /// The null block was named where a real one is needed.
    #[error("block 0 is the null block, which is never allocated or freed: skip it")]
    NullBlock,
    /// An id outside the pool.
    #[error("block {} is outside the pool, whose ids are 1 to {num_blocks}", .block.0)]
    UnknownBlock {
        /// The id.
        block: BlockId,
        /// Usable blocks of the pool.
        num_blocks: usize,
    },
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// No prompt tokens.
    #[error("request {}: the prompt has 0 tokens, at least 1 is needed", .request_id.0)]
    EmptyPrompt {
        /// The request.
        request_id: RequestId,
    },
    /// Nothing to generate.
    #[error("request {}: max_tokens is 0, at least 1 is needed", .request_id.0)]
    ZeroMaxTokens {
        /// The request.
        request_id: RequestId,
    },
    /// The id is taken.
    #[error("request {} is already being served: use an id that is not in use", .request_id.0)]
    DuplicateRequest {
        /// The request.
        request_id: RequestId,
    },
    /// Prompt and one generated token do not fit the model's context.
    #[error(
        "request {}: the prompt has {num_prompt_tokens} tokens and the context length is {max_model_len}: \
         at most {} prompt tokens leave room for an answer",
        .request_id.0, .max_model_len - 1
    )]
    TooLongForModel {
        /// The request.
        request_id: RequestId,
        /// Tokens of the prompt.
        num_prompt_tokens: usize,
        /// The limit of prompt and answer together.
        max_model_len: usize,
    },
    /// The request needs more blocks than the whole pool has.
    #[error(
        "request {}: {num_tokens} tokens need {needed_blocks} KV blocks and the whole pool has {usable_blocks}, \
         which hold {usable_tokens} tokens: shorten the prompt or give the KV cache more memory",
        .request_id.0
    )]
    TooLongForPool {
        /// The request.
        request_id: RequestId,
        /// Tokens that must have KV at once: the prompt, or the whole context when it is reserved up front.
        num_tokens: usize,
        /// Blocks those tokens need at their peak.
        needed_blocks: usize,
        /// Blocks of the pool.
        usable_blocks: usize,
        /// The longest sequence the pool can serve, in tokens.
        usable_tokens: usize,
    },
    /// Tokens that a step must compute together are more than the scheduler was made for.
    #[error("request {}: {len} tokens must be computed in one step, and it was made for {longest} at most", .request_id.0)]
    SpanTooLong {
        /// The request.
        request_id: RequestId,
        /// Tokens of the span.
        len: usize,
        /// [`crate::SchedulerConfig::longest_span`].
        longest: usize,
    },
    /// A priority was asked for, and the fairness policy goes by arrival alone.
    #[error("request {}: priority {priority} has no effect under the fairness policy fcfs: use priority or drr", .request_id.0)]
    NoPriorities {
        /// The request.
        request_id: RequestId,
        /// The priority asked for.
        priority: i32,
    },
    /// Only what was accepted before is served to its end.
    #[error("request {}: the scheduler is draining and accepts no new requests: resume it first", .request_id.0)]
    Draining {
        /// The request.
        request_id: RequestId,
    },
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} {name:?}: use {}", .known.join(", "))]
pub struct UnknownPolicy {
    /// What was to be chosen.
    pub kind: &'static str,
    /// The name given.
    pub name: String,
    /// The names that work.
    pub known: Vec<&'static str>,
}

/// Why a fork was refused. Source and scheduler are unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForkError {
    /// Nothing by that name is being served.
    #[error("request {} cannot be forked: it is not being served", .source_id.0)]
    UnknownSource {
        /// The source.
        source_id: RequestId,
    },
    /// What the source computes at the moment is not written yet.
    #[error("request {} cannot be forked while step {step_id} is in flight: fork after its update", .source_id.0)]
    StepInFlight {
        /// The source.
        source_id: RequestId,
        /// The step.
        step_id: u64,
    },
    /// The source does not have so many tokens, or none was asked for.
    #[error("request {} has {num_tokens} tokens and cannot be cut to {asked}: ask for 1 to {num_tokens}", .source_id.0)]
    Cut {
        /// The source.
        source_id: RequestId,
        /// Tokens asked for.
        asked: usize,
        /// Tokens the source has.
        num_tokens: usize,
    },
    /// The child could not be served.
    #[error(transparent)]
    Child(#[from] AdmissionError),
}

/// Why the encoder cache refused an item. The cache is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncoderCacheError {
    /// The cache has no bytes at all.
    #[error("the encoder cache has 0 bytes, which turns it off, and an item needs {needed_bytes}: give it at least that many")]
    Off {
        /// Bytes of the item's output.
        needed_bytes: u64,
    },
    /// The item does not fit even alone.
    #[error(
        "an item needs {needed_bytes} bytes of encoder output and the encoder cache has {budget_bytes}: \
         make the item smaller or give the cache at least {needed_bytes}"
    )]
    TooLarge {
        /// Bytes of the item's output.
        needed_bytes: u64,
        /// Bytes of the whole cache.
        budget_bytes: u64,
    },
    /// The output is kept with another size: the key does not cover all that decides it.
    #[error(
        "an item's output has {kept_bytes} bytes in the encoder cache and {asked_bytes} were asked for: its key is not complete"
    )]
    OtherSize {
        /// Bytes of the output that is kept.
        kept_bytes: u64,
        /// Bytes asked for.
        asked_bytes: u64,
    },
}

/// A scheduler that cannot be built as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {requirement}")]
pub struct InvalidSchedulerConfig {
    /// The field at fault.
    pub field: &'static str,
    /// What it was set to.
    pub value: usize,
    /// What it must be.
    pub requirement: &'static str,
}

pub(crate) fn at_least(
    field: &'static str,
    value: usize,
    least: usize,
    requirement: &'static str,
) -> Result<(), InvalidSchedulerConfig> {
    if value < least { Err(InvalidSchedulerConfig { field, value, requirement }) } else { Ok(()) }
}

/// Why a step's result was not taken. The scheduler is unchanged; the step is still in flight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// The result belongs to another step than the one in flight.
    #[error("step {got} was reported and the step in flight is {expected:?}: report each step once, in order")]
    StaleStep {
        /// The step that was reported.
        got: u64,
        /// The step in flight, if any.
        expected: Option<u64>,
    },
    /// A row that reaches the end of its tokens came without a sampled token.
    #[error("request {} sampled in this step but no token was given for it, in the order of the rows", .request_id.0)]
    MissingSample {
        /// The request.
        request_id: RequestId,
    },
    /// A token for a request that did not sample in this step.
    #[error("a token was given for request {}, which does not sample at this place of the step", .request_id.0)]
    UnexpectedSample {
        /// The request.
        request_id: RequestId,
    },
    /// More tokens than the row has outputs.
    #[error("request {} was given {given} tokens and its row has {num_outputs} outputs: give at most one for each", .request_id.0)]
    TooManyTokens {
        /// The request.
        request_id: RequestId,
        /// Tokens that were given.
        given: usize,
        /// Outputs of its row.
        num_outputs: usize,
    },
    /// A token behind a draft that was not accepted: the row computed the draft, so what follows it does not follow the token.
    #[error(
        "request {} was given token {token} where its row computed the draft {draft}, and more tokens behind it: \
         the first token that is not the draft is the last",
        .request_id.0
    )]
    NotTheDraft {
        /// The request.
        request_id: RequestId,
        /// The token that was given.
        token: u32,
        /// What was computed in its place.
        draft: u32,
    },
}

/// A broken invariant, found by a `check_integrity`. Always a bug of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("KV bookkeeping is inconsistent: {0}")]
pub struct IntegrityError(pub String);

/// Why no cache configuration could be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Unsupported block size.
    #[error("Block size must be in {supported:?}, got {block_size}")]
    BlockSize {
        /// The sizes that work.
        supported: &'static [usize],
        /// The size asked for.
        block_size: usize,
    },
    /// The budget does not hold a single block, or not one block for each group of layers.
    #[error(
        "Num GPU blocks is 0. The KV cache has {budget_bytes} bytes and needs at least {needed_bytes}, \
         {bytes_per_block} bytes for each block of {block_size} tokens: raise the memory amount, fraction or \
         context length, or choose a smaller block size or cache type"
    )]
    NoBlocks {
        /// Bytes given to the KV cache on the tightest device.
        budget_bytes: u64,
        /// The least that could work on that device.
        needed_bytes: u64,
        /// Bytes of one block on that device.
        bytes_per_block: u64,
        /// Tokens a block.
        block_size: usize,
    },
    /// More memory was asked for than the machine has.
    #[error(
        "the KV cache was asked to take {requested_bytes} bytes and device {device} has {limit_bytes} bytes: \
         ask for less, or use a smaller cache type"
    )]
    MoreThanTheMachine {
        /// Index of the device.
        device: usize,
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes that the device can give.
        limit_bytes: u64,
    },
    /// A context, or as many of them as are guaranteed, that a device has no room for.
    #[error(
        "{num_seqs} x {num_tokens} tokens take {needed_bytes} bytes of KV on device {device}, which has {limit_bytes} bytes for it: \
         {num_seqs} x {fitting_tokens} or {fitting_seqs} x {num_tokens} tokens would fit"
    )]
    DoesNotFit {
        /// Index of the device.
        device: usize,
        /// Sequences at once.
        num_seqs: usize,
        /// Tokens of each, prompt and answer.
        num_tokens: usize,
        /// Bytes of their blocks there.
        needed_bytes: u64,
        /// Bytes that the device can give.
        limit_bytes: u64,
        /// So many sequences of that length would fit.
        fitting_seqs: usize,
        /// So many sequences of this length would fit.
        fitting_tokens: usize,
    },
    /// A guarantee for sequences longer than the model takes.
    #[error("{num_tokens} tokens a request cannot be guaranteed, the model takes {longest}: ask for {longest} at most")]
    BeyondTheModel {
        /// The length asked for.
        num_tokens: usize,
        /// The model's.
        longest: usize,
    },
    /// A memory fraction that is not one.
    #[error("the memory fraction must be above 0 and at most 1, got {fraction}")]
    Fraction {
        /// The value given.
        fraction: f32,
    },
    /// A knob set to zero.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// The field at fault.
        field: &'static str,
    },
    /// No device to size for.
    #[error("the list of devices is empty: name at least one device")]
    NoDevices,
    /// A layer placed on a device that is not in the list.
    #[error("layer {layer} is on device {device} and {num_devices} devices were given")]
    UnknownDevice {
        /// The layer.
        layer: usize,
        /// Where the model says it lies.
        device: usize,
        /// Devices given.
        num_devices: usize,
    },
    /// A cache type nobody knows.
    #[error("unknown KV cache type {name:?}: use auto, f32, f16, bf16, f8e4m3 or int8")]
    UnknownCacheType {
        /// The name given.
        name: String,
    },
    /// Sizes whose product does not fit 64 bits, or more blocks than 32-bit ids can name.
    #[error("{what} is too large to be counted: {value}")]
    TooLarge {
        /// What was being counted.
        what: &'static str,
        /// The figure, or the factor that broke it.
        value: u64,
    },
}
