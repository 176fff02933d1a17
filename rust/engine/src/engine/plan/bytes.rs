//! Bytes on one device, by what they are for.

use paged::DeviceMemory;

/// One part in so many of everything but the KV cache is left free for what is not counted: rounding to pages, the allocator,
/// code.
const MARGIN_DIVISOR: u64 = 64;

/// Bytes on one device, by what they are for. Memory is committed as it is first written: these are the figures once every block
/// has been used, and a step of the most tokens has run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceBytes {
    /// Weights in the form that they are computed with; those used in place are pages of their file.
    pub weights: u64,
    /// The KV pool, the null block included.
    pub kv_cache: u64,
    /// States of recurrent layers, of as many requests as run at once.
    pub states: u64,
    /// Snapshots of such states, for prefix hits to begin with.
    pub state_snapshots: u64,
    /// Activations of a step, logits, and rope tables.
    pub activations: u64,
    /// Buffers of the kernels.
    pub workspaces: u64,
    /// Captured graphs on a GPU.
    pub graphs: u64,
    /// The tokenizer, estimated from its vocabulary.
    pub tokenizer: u64,
    /// The budget for outputs of vision and audio encoders; 0 for a model of text.
    pub encoder_cache: u64,
    /// Adapters that the model was loaded with, and buffers of steps with any; 0 where it takes none.
    pub adapters: u64,
    /// Left free for what is not counted.
    pub margin: u64,
    /// Whether the device is the host, whose memory is committed as it is first written; else it is taken at once.
    pub is_host: bool,
    /// All that the device has.
    pub device_total: u64,
    /// What of that was free when the plan was made.
    pub device_available: u64,
}

impl DeviceBytes {
    /// What will be resident: everything but the margin.
    pub fn resident(&self) -> u64 {
        self.kv_cache + self.counted_beside_kv()
    }

    /// By name, for a table.
    pub(super) fn lines(&self) -> [(&'static str, u64); 12] {
        [
            ("weights", self.weights),
            ("KV cache", self.kv_cache),
            ("states", self.states),
            ("snapshots", self.state_snapshots),
            ("activations", self.activations),
            ("workspaces", self.workspaces),
            ("graphs", self.graphs),
            ("tokenizer", self.tokenizer),
            ("encoders", self.encoder_cache),
            ("adapters", self.adapters),
            ("margin", self.margin),
            ("of", self.device_total),
        ]
    }

    /// As the sizing of the pool sees it.
    pub(super) fn memory(&self) -> DeviceMemory {
        DeviceMemory {
            total: self.device_total,
            available: self.device_available,
            pending: self.beside_kv(),
            unified: self.is_host,
        }
    }

    /// What is taken beside the KV cache, for an error.
    pub(super) fn ledger(&self) -> String {
        const MIB: u64 = 1 << 20;
        let lines = self.lines().into_iter().filter(|(name, bytes)| *bytes > 0 && !["KV cache", "of"].contains(name));
        let beside: Vec<_> = lines.map(|(name, bytes)| format!("{name} {:.1} MB", bytes as f64 / MIB as f64)).collect();
        let [total, available] = [self.device_total, self.device_available].map(|bytes| bytes / MIB);
        format!("of {total} MB, {available} MB are free; beside the KV cache: {}", beside.join(", "))
    }

    /// What is taken beside the KV cache.
    pub(super) fn beside_kv(&self) -> u64 {
        self.counted_beside_kv() + self.margin
    }

    fn counted_beside_kv(&self) -> u64 {
        let working = self.states + self.state_snapshots + self.activations + self.workspaces + self.graphs;
        self.weights + working + self.tokenizer + self.encoder_cache + self.adapters
    }

    pub(super) fn with_margin(self) -> Self {
        Self { margin: self.counted_beside_kv() / MARGIN_DIVISOR, ..self }
    }
}
