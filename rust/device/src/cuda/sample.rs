//! Tokens from rows of logits that stay on the device.

use std::sync::Arc;

use crate::{
    RowSampling, SampledRow, TokenMask, WorkspaceShape,
    kernel_args::{
        DevicePtr, MAX_SAMPLE_ROWS, SAMPLE_BUCKETS, SAMPLE_LISTED, SAMPLE_MAX_PARTS, SAMPLE_PART, SampleArgs, SampleBucket,
        SamplePart, SampleRow, SampleState, TopLogprobsArgs,
    },
};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver, bytes_of, bytes_of_mut},
    kernels::{Kernel, launch},
    linear::Rows,
    memory::Scratch,
};

/// What `sample` gives for a row with a logit that is not finite, or none that is allowed.
const NO_TOKEN: u32 = u32::MAX;

/// The likeliest token.
const GREEDY: SampleRow = SampleRow { temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0, uniform: 0.0, mask: 0 };

/// Bytes of what the kernels count in: arrivals of each row, then its buckets.
const COUNT_BYTES: usize = MAX_SAMPLE_ROWS * (size_of::<u32>() + SAMPLE_BUCKETS * size_of::<SampleBucket>());

/// The kernels that sample, and what they read and write.
pub struct Sampling {
    likeliest: Kernel,
    cut: Kernel,
    draw: Kernel,
    top_logprobs: Kernel,
    /// Masks of the rows, one behind the other.
    masks: Scratch,
    /// What is found in the parts of the rows of a launch, then the rows' states.
    parts: Scratch,
    /// Tokens of the parts that top-k or top-p end among.
    lists: Scratch,
    /// Zeros between launches.
    counts: Option<DeviceMemory>,
    /// Token ids, then as many log probabilities, then a normalizer of each row.
    sampled: Scratch,
}

impl Sampling {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        Ok(Self {
            likeliest: Kernel::named("sample")?,
            cut: Kernel::named("sample_cut")?,
            draw: Kernel::named("sample_draw")?,
            top_logprobs: Kernel::named("top_logprobs")?,
            masks: Scratch::default(),
            parts: Scratch::default(),
            lists: Scratch::default(),
            counts: None,
            sampled: Scratch::default(),
        })
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        let [parts, lists, _] = planned_bytes(shape);
        self.parts.plan(parts);
        self.lists.plan(lists);
    }

    /// A token of every row of logits, which `rows` has an entry for; see [`crate::DeviceSampler::sample`].
    ///
    /// # Panics
    /// When a row has more parts than the kernels take.
    ///
    /// # Safety
    /// `logits` is memory of the driver, and masks are of `logits.cols` tokens.
    pub unsafe fn sample(
        &mut self,
        driver: &Arc<dyn Driver>,
        logits: Rows,
        rows: &[Option<RowSampling<'_>>],
        num_top: usize,
    ) -> Result<Vec<Option<SampledRow>>, CudaError> {
        let num_top = num_top.min(logits.cols);
        // A row's token goes before its likeliest ones.
        let (count, size) = (logits.count * (1 + num_top), size_of::<u32>());
        let token_ids = self.sampled.bytes(driver, (2 * count + logits.count) * size)?;
        let logprobs = token_ids + (count * size) as u64;
        let normalizers = logprobs + (count * size) as u64;
        let rows = self.rows(driver, rows)?;
        for (chunk, rows) in rows.chunks(MAX_SAMPLE_ROWS).enumerate() {
            let first = chunk * MAX_SAMPLE_ROWS;
            let [token_ids, logprobs, normalizers] = [token_ids, logprobs, normalizers].map(|list| list + (first * size) as u64);
            let at = logits.at + (first * logits.cols * size_of::<f32>()) as u64;
            let logits = Rows { at, count: rows.len(), ..logits };
            // SAFETY: the caller's promise; each output has room for a value of each row.
            unsafe { self.launch(driver, logits, rows, [token_ids, logprobs, normalizers])? };
        }
        if num_top > 0 {
            let after = (logits.count * size) as u64;
            let args = TopLogprobsArgs {
                logits: logits.at,
                normalizers,
                token_ids: token_ids + after,
                logprobs: logprobs + after,
                num_rows: logits.count as u32,
                vocab_size: logits.cols as u32,
                stride: logits.cols as u32,
                num_top: num_top as u32,
            };
            // SAFETY: as above; behind the rows' own values is room for `num_top` of each.
            unsafe { launch(driver, self.top_logprobs, [logits.count, 1, 1], &args)? };
        }
        let mut sampled = vec![0_u32; 2 * count];
        driver.download(bytes_of_mut(&mut sampled), token_ids)?;
        let (ids, values) = sampled.split_at(count);
        let logprob = |index: usize| f32::from_bits(values[index]);
        let row = |row: usize| {
            let top = logits.count + row * num_top..logits.count + (row + 1) * num_top;
            let top = top.map(|index| (ids[index], logprob(index))).collect();
            (ids[row] != NO_TOKEN).then(|| SampledRow { token_id: ids[row], logprob: logprob(row), top })
        };
        Ok((0..logits.count).map(row).collect())
    }

    /// Rows as the kernels take them. Their masks are copied to the GPU, and are there until the next call.
    fn rows(&mut self, driver: &Arc<dyn Driver>, rows: &[Option<RowSampling<'_>>]) -> Result<Vec<SampleRow>, CudaError> {
        let masks = rows.iter().flatten().filter_map(|row| row.mask);
        let words: Vec<u32> = masks.flat_map(TokenMask::words).copied().collect();
        let mut next_mask = 0;
        if !words.is_empty() {
            next_mask = self.masks.bytes(driver, size_of_val(&words[..]))?;
            driver.upload(next_mask, bytes_of(&words))?;
        }
        Ok(rows.iter().map(|row| row.as_ref().map_or(GREEDY, |row| sample_row(row, &mut next_mask))).collect())
    }

    /// Up to [`MAX_SAMPLE_ROWS`] rows.
    unsafe fn launch(
        &mut self,
        driver: &Arc<dyn Driver>,
        logits: Rows,
        rows: &[SampleRow],
        [token_ids, logprobs, normalizers]: [DevicePtr; 3],
    ) -> Result<(), CudaError> {
        let num_parts = logits.cols.div_ceil(SAMPLE_PART);
        assert!(num_parts <= SAMPLE_MAX_PARTS, "a vocabulary of {} tokens", logits.cols);
        let is_drawn = |row: &SampleRow| row.temperature > 0.0;
        let is_cut = |row: &SampleRow| is_drawn(row) && (row.top_k > 0 || row.top_p < 1.0);
        let (draws, cuts) = (rows.iter().any(is_drawn), rows.iter().any(is_cut));
        let [part_bytes, list_bytes] = row_bytes(num_parts);
        let parts = self.parts.bytes(driver, rows.len() * part_bytes)?;
        let arrivals = match &self.counts {
            Some(memory) => memory.at(),
            None => self.counts.insert(DeviceMemory::zeroed(driver, COUNT_BYTES)?).at(),
        };
        let mut entries = [GREEDY; MAX_SAMPLE_ROWS];
        entries[..rows.len()].copy_from_slice(rows);
        let args = SampleArgs {
            logits: logits.at,
            token_ids,
            logprobs,
            normalizers,
            parts,
            states: parts + (rows.len() * num_parts * size_of::<SamplePart>()) as u64,
            buckets: arrivals + (MAX_SAMPLE_ROWS * size_of::<u32>()) as u64,
            lists: if cuts { self.lists.bytes(driver, rows.len() * list_bytes)? } else { 0 },
            arrivals,
            num_rows: rows.len() as u32,
            vocab_size: logits.cols as u32,
            stride: logits.cols as u32,
            reserved: 0,
            rows: entries,
        };
        let grid = [num_parts, rows.len(), 1];
        let kernels = [(self.likeliest, true), (self.cut, cuts), (self.draw, draws)];
        for (kernel, _) in kernels.into_iter().filter(|(_, is_needed)| *is_needed) {
            // SAFETY: the caller's promise; the lists were made for these rows and parts.
            unsafe { launch(driver, kernel, grid, &args)? };
        }
        Ok(())
    }
}

/// Bytes of a row of so many parts: what is found in them with the row's state, and their lists.
fn row_bytes(num_parts: usize) -> [usize; 2] {
    let parts = num_parts * size_of::<SamplePart>() + size_of::<SampleState>();
    [parts, num_parts * SAMPLE_LISTED * size_of::<u64>()]
}

/// Bytes of each of the buffers in the largest step.
fn planned_bytes(shape: &WorkspaceShape) -> [usize; 3] {
    let num_rows = shape.num_sampled_rows.min(MAX_SAMPLE_ROWS);
    let [parts, lists] = row_bytes(shape.vocab_size.div_ceil(SAMPLE_PART)).map(|bytes| num_rows * bytes);
    [parts, lists, COUNT_BYTES]
}

/// Bytes of all buffers once the largest step has run.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    planned_bytes(shape).iter().sum::<usize>() as u64
}

/// As the kernels take it. A mask lies at `next_mask`, the next row's behind it.
fn sample_row(row: &RowSampling<'_>, next_mask: &mut DevicePtr) -> SampleRow {
    SampleRow {
        temperature: row.temperature.unwrap_or(0.0),
        top_p: row.top_p,
        min_p: row.min_p,
        top_k: row.top_k.map_or(0, |k| k.min(u32::MAX as usize) as u32),
        uniform: row.uniform,
        mask: row.mask.map_or(0, |mask| {
            let at = *next_mask;
            *next_mask += size_of_val(mask.words()) as u64;
            at
        }),
    }
}
