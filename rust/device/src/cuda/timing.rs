//! How long a GPU is at copies, attention and products over made-up buffers, for `make bench-gpu`.
//!
//! Buffers that are smaller than a cache take turns, so that every run reads memory.

use std::{num::NonZero, sync::Arc, thread::available_parallelism, time::Duration};

use half::{bf16, f16};

use crate::{
    AttentionArgs, AttentionParams, CacheEngine, DType, Device, DeviceError, EmbedArgs, EmbeddingTable, KvCacheSpec, KvDType,
    KvGroupMetadata, KvPlace, KvShape, KvSide, Linear, LinearOptions, Phases, Precision, Projection, StepMetadata, Tensor,
    WeightView, mmap::Bytes,
};

use super::{
    CudaBackend, LibraryPaths, NvidiaDriver,
    driver::{DeviceMemory, Driver},
};

/// More than the L2 of any GPU.
const CACHE_BYTES: usize = 256 << 20;
/// Buffers that take turns at most.
const MAX_TURNS: usize = 64;
/// Calls between two readings of the clock at least.
const MIN_CALLS: usize = 8;
/// Some hundred microseconds of copying on the fastest GPUs: the launches of a run are asked for meanwhile.
const HEAD_START_BYTES: usize = 1 << 30;
/// Blocks of random values, of which the others are copies.
const RANDOM_BLOCKS: usize = 4;
/// Blocks that are copied at once.
const COPIES: usize = 256;
/// Rows of random values that a weight repeats.
const RANDOM_ROWS: usize = 16;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedWork {
    /// From one place of the GPU's memory to another.
    Copy {
        /// So many.
        bytes: usize,
    },
    /// One layer's attention, of requests that decode.
    Attention {
        /// Requests.
        batch: usize,
        /// Tokens that each sees.
        context: usize,
        /// KV heads.
        num_kv_heads: usize,
        /// Query heads of each.
        queries_per_kv: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Type of the cache.
        cache: KvDType,
        /// Tokens of a block.
        block_size: usize,
    },
    /// A product with a weight.
    Linear {
        /// Rows of the input.
        rows: usize,
        /// Rows of the weight.
        out_features: usize,
        /// Columns of the weight.
        in_features: usize,
        /// Its format.
        format: DType,
    },
}

/// Times work on one GPU.
pub struct GpuTimer {
    driver: Arc<dyn Driver>,
    backend: CudaBackend,
    head_start: [DeviceMemory; 2],
}

impl GpuTimer {
    /// On the GPU of that number, with the libraries that are found there.
    ///
    /// Errors: as of [`NvidiaDriver::new`] and [`Self::new`].
    pub fn open(ordinal: usize, libraries: &LibraryPaths) -> Result<Self, DeviceError> {
        Self::new(Arc::new(NvidiaDriver::new(ordinal, libraries)?), HEAD_START_BYTES)
    }

    /// On the GPU of a driver. So many bytes are copied before the clock is read first, so that calls wait in line for the GPU,
    /// and not the GPU for them.
    ///
    /// Errors: as of [`CudaBackend::new`], [`DeviceError::Cuda`] when there is no memory for the copy.
    pub fn new(driver: Arc<dyn Driver>, head_start_bytes: usize) -> Result<Self, DeviceError> {
        let head_start = [DeviceMemory::zeroed(&driver, head_start_bytes)?, DeviceMemory::new(&driver, head_start_bytes)?];
        // Weights are packed by all threads that there are.
        let num_threads = available_parallelism().map_or(1, NonZero::get);
        let backend = CudaBackend::new(Arc::clone(&driver))?.with_host_threads(num_threads)?;
        Ok(Self { driver, backend, head_start })
    }

    /// Seconds of one call, of each of `runs` runs of several calls, after one that is not counted.
    ///
    /// Errors: [`DeviceError::Cuda`], and what the backend does not support.
    pub fn seconds(&self, work: &TimedWork, runs: usize) -> Result<Vec<f64>, DeviceError> {
        match *work {
            TimedWork::Copy { bytes } => {
                let [from, to] = [self.random_memory(bytes)?, DeviceMemory::new(&self.driver, bytes)?];
                self.time(1, runs, &mut |_| Ok(self.driver.copy(to.at(), from.at(), bytes)?))
            }
            TimedWork::Attention { .. } => self.attention(work, runs),
            TimedWork::Linear { .. } => self.linear(work, runs),
        }
    }

    fn time(
        &self,
        turns: usize,
        runs: usize,
        call: &mut dyn FnMut(usize) -> Result<(), DeviceError>,
    ) -> Result<Vec<f64>, DeviceError> {
        let [from, to] = &self.head_start;
        let calls = MIN_CALLS.next_multiple_of(turns);
        let mut run = || -> Result<f64, DeviceError> {
            self.driver.copy(to.at(), from.at(), from.bytes())?;
            let mut result = Ok(());
            let took: Duration = self.driver.time(&mut || {
                result = (0..calls).try_for_each(|i| call(i % turns));
            })?;
            result.map(|()| took.as_secs_f64() / calls as f64)
        };
        run()?;
        (0..runs).map(|_| run()).collect()
    }

    fn attention(&self, work: &TimedWork, runs: usize) -> Result<Vec<f64>, DeviceError> {
        let TimedWork::Attention { batch, context, num_kv_heads, queries_per_kv, head_dim, cache: dtype, block_size } = *work
        else {
            unreachable!("the caller looked");
        };
        let max_blocks = context.div_ceil(block_size);
        let num_blocks = 1 + batch * max_blocks;
        let shape = KvShape::new(num_kv_heads, head_dim);
        let spec = |num_layers| KvCacheSpec::uniform((num_blocks, block_size), dtype, shape, num_layers);
        let bytes = spec(1)?.total_bytes().ok_or(DeviceError::Shape("a block of these sizes".into()))?;
        let spec = spec(turns(bytes as usize))?;
        let cache = self.backend.alloc_kv_cache(&spec)?;
        fill(&cache)?;
        let step = decode_step(batch, context, block_size);
        self.backend.begin_step(&step);
        let num_heads = num_kv_heads * queries_per_kv;
        let q = self.random_tensor(batch, num_heads * head_dim)?;
        let mut out = self.backend.alloc(batch, num_heads * head_dim)?;
        let params = AttentionParams::new([num_heads, num_kv_heads, head_dim], Precision::Fast);
        self.time(spec.layers.len(), runs, &mut |layer| {
            self.backend
                .attention(AttentionArgs { q: &q, out: &mut out, cache: &cache, layer, sinks: None, params, next: None }, &step);
            Ok(())
        })
    }

    fn linear(&self, work: &TimedWork, runs: usize) -> Result<Vec<f64>, DeviceError> {
        let TimedWork::Linear { rows, out_features, in_features, format } = *work else { unreachable!("the caller looked") };
        let weight = random_weight(format, out_features, in_features)?;
        let load =
            || self.backend.load_linear(&weight, &LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None });
        let weights = (0..turns(weight.bytes().len())).map(|_| load()).collect::<Result<Vec<Linear>, _>>()?;
        let x = self.random_tensor(rows, in_features)?;
        let mut out = self.backend.alloc(rows, out_features)?;
        self.time(weights.len(), runs, &mut |turn| {
            self.backend.norm_linear(
                &x,
                None,
                &mut [Projection { linear: &weights[turn], out: &mut out }],
                &StepMetadata::default(),
            );
            Ok(())
        })
    }

    fn random_memory(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        let memory = DeviceMemory::new(&self.driver, bytes)?;
        let random: Vec<u8> = Values::new().flat_map(|x| x.to_bits().to_le_bytes()).take(bytes.min(1 << 24)).collect();
        for start in (0..bytes).step_by(random.len()) {
            memory.upload(start, &random[..random.len().min(bytes - start)])?;
        }
        Ok(memory)
    }

    fn random_tensor(&self, rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        let table = random_weight(DType::F32, rows, cols)?;
        let token_ids: Vec<u32> = (0..rows as u32).collect();
        let mut tensor = self.backend.alloc(rows, cols)?;
        self.backend.embed(
            &EmbedArgs { table: EmbeddingTable::Stored(&table), token_ids: &token_ids, beyond: None, adapters: &[], scale: 1.0 },
            &mut tensor,
        );
        Ok(tensor)
    }
}

/// The weight format of that name, such as "Q4_K".
pub fn format_named(name: &str) -> Option<DType> {
    DType::all().find(|format| format.to_string() == name)
}

/// The cache type of that name: "f32", "f16", "bf16", "f8e4m3" or "int8".
pub fn cache_named(name: &str) -> Option<KvDType> {
    KvDType::ALL.into_iter().find(|dtype| format!("{dtype:?}").eq_ignore_ascii_case(name))
}

/// How many buffers take turns.
fn turns(bytes: usize) -> usize {
    CACHE_BYTES.div_ceil(bytes).clamp(1, MAX_TURNS)
}

/// Values from -1 to 1, always the same (a linear congruential generator).
struct Values(u32);

impl Values {
    fn new() -> Self {
        Self(1)
    }
}

impl Iterator for Values {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some((self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0)
    }
}

/// Random keys and values in every block but the null block. Which element of a key is which does not matter.
fn fill(cache: &CacheEngine) -> Result<(), DeviceError> {
    let spec = cache.spec();
    let last = spec.num_blocks - 1;
    let shape = cache.layer(0).shape;
    let small = CacheEngine::new(&KvCacheSpec::uniform((RANDOM_BLOCKS, spec.block_size), spec.dtype, shape, 1)?)?;
    let mut values = Values::new();
    for slot in 0..RANDOM_BLOCKS * spec.block_size {
        for head in 0..shape.num_kv_heads {
            for side in [KvSide::Key, KvSide::Value] {
                let vector: Vec<f32> = values.by_ref().take(shape.dim(side)).collect();
                small.write(side, KvPlace { layer: 0, slot, head }, &vector);
            }
        }
    }
    let mut block = vec![0; small.block_bytes()];
    for id in 1..=RANDOM_BLOCKS.min(last) as u32 {
        small.export_block(id - 1, &mut block);
        cache.import_block(id, &block.repeat(spec.layers.len()));
    }
    // Each copy doubles what there is.
    let mut filled = RANDOM_BLOCKS.min(last);
    while filled < last {
        let more = filled.min(last - filled);
        let pairs: Vec<(u32, u32)> = (1..=more as u32).map(|id| (id, filled as u32 + id)).collect();
        // A copy is checked pair by pair against the pairs before it.
        pairs.chunks(COPIES).for_each(|pairs| cache.copy_blocks(pairs));
        filled += more;
    }
    Ok(())
}

/// Requests of one row each, whose blocks lie in no order.
fn decode_step(batch: usize, context: usize, block_size: usize) -> StepMetadata {
    let max_blocks = context.div_ceil(block_size);
    let num_blocks = batch * max_blocks;
    // A step that shares no divisor with their number visits every block once.
    let stride = (num_blocks * 5 / 8..num_blocks).find(|n| gcd(*n, num_blocks) == 1).unwrap_or(1);
    let block_tables = (0..num_blocks).map(|i| 1 + (i * stride % num_blocks) as u32).collect();
    let group = KvGroupMetadata { block_tables, max_blocks, slot_mapping: vec![-1; batch] };
    StepMetadata {
        positions: vec![context as u32 - 1; batch],
        rope_positions: vec![0; batch],
        query_start_loc: (0..=batch as u32).collect(),
        seq_lens: vec![context as u32; batch],
        state_slots: Vec::new(),
        adapters: Vec::new(),
        span_ends: Vec::new(),
        groups: vec![group],
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Random values; of quantized formats random codes with scales that keep products small.
fn random_weight(format: DType, rows: usize, cols: usize) -> Result<WeightView, DeviceError> {
    let shape = || DeviceError::Shape(format!("{cols} columns of {format}"));
    let row_bytes = format.row_bytes(cols).ok_or_else(shape)?;
    let values = Values::new().take(RANDOM_ROWS * cols);
    let mut bytes: Vec<u8> = match format {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        // Bytes whose pairs are small f16 numbers wherever a format has its scales: 0x00 to 0x1f.
        DType::Ggml(_) => Values::new().take(RANDOM_ROWS * row_bytes).map(|x| (x.to_bits() >> 8) as u8 & 0x1f).collect(),
    };
    bytes = bytes.repeat(rows.div_ceil(RANDOM_ROWS));
    bytes.truncate(rows * row_bytes);
    WeightView::new(format, rows, cols, Bytes::from_vec(bytes))
}
