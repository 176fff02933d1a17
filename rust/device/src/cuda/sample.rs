//! Tokens from rows of logits that stay on the device.

use std::sync::Arc;

use crate::{
    RowSampling, SampledRow,
    kernel_args::{DevicePtr, SampleArgs, SampleRow, TopLogprobsArgs},
};

use super::{
    CudaError,
    driver::{Driver, bytes_of, bytes_of_mut},
    kernels::{Kernel, launch},
    linear::Rows,
    memory::Scratch,
};

/// What `sample` gives for a row with a logit that is not finite, or none that is allowed.
const NO_TOKEN: u32 = u32::MAX;

/// The kernels that sample, and what they read and write.
pub struct Sampling {
    sample: Kernel,
    top_logprobs: Kernel,
    /// Entries of the rows, then their masks.
    rows: Scratch,
    /// Token ids, then as many log probabilities.
    sampled: Scratch,
}

impl Sampling {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        let (sample, top_logprobs) = (Kernel::named("sample")?, Kernel::named("top_logprobs")?);
        Ok(Self { sample, top_logprobs, rows: Scratch::default(), sampled: Scratch::default() })
    }

    /// Copies rows as the kernel takes them to the GPU, with their masks; they are there until the next call.
    pub fn rows(&mut self, driver: &Arc<dyn Driver>, rows: &[Option<RowSampling<'_>>]) -> Result<DevicePtr, CudaError> {
        let masks = rows.iter().flatten().filter_map(|row| row.mask);
        let words: usize = masks.clone().map(|mask| mask.words().len()).sum();
        let entries = rows.len() * size_of::<SampleRow>();
        let at = self.rows.bytes(driver, entries + words * size_of::<u32>())?;
        let mut next_mask = at + entries as u64;
        let mut packed = Vec::with_capacity(entries + words * size_of::<u32>());
        for row in rows {
            packed.extend_from_slice(bytes_of(&[sample_row(row.as_ref(), &mut next_mask)]));
        }
        for mask in masks {
            packed.extend_from_slice(bytes_of(mask.words()));
        }
        driver.upload(at, &packed)?;
        Ok(at)
    }

    /// A token of every row of logits, by the row's entry in `rows`; see [`crate::DeviceSampler::sample`].
    ///
    /// # Safety
    /// `logits` and `rows` are memory of the driver, `rows` with an entry for each row, and masks of `logits.cols` tokens.
    pub unsafe fn sample(
        &mut self,
        driver: &Arc<dyn Driver>,
        logits: Rows,
        rows: DevicePtr,
        num_top: usize,
    ) -> Result<Vec<Option<SampledRow>>, CudaError> {
        let num_top = num_top.min(logits.cols);
        // A row's token goes before its likeliest ones.
        let (count, size) = (logits.count * (1 + num_top), size_of::<u32>());
        let token_ids = self.sampled.bytes(driver, 2 * count * size)?;
        let logprobs = token_ids + (count * size) as u64;
        let args = SampleArgs {
            logits: logits.at,
            rows,
            token_ids,
            logprobs,
            num_rows: logits.count as u32,
            vocab_size: logits.cols as u32,
            stride: logits.cols as u32,
            reserved: 0,
        };
        // SAFETY: the caller's promise; both outputs have room for a value of each row.
        unsafe { launch(driver, self.sample, [logits.count, 1, 1], &args)? };
        if num_top > 0 {
            let after = (logits.count * size) as u64;
            let args = TopLogprobsArgs {
                logits: logits.at,
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
}

/// As the kernel takes it; unowned rows are asked for their likeliest token. A mask lies at `next_mask`, the next row's behind
/// it.
fn sample_row(row: Option<&RowSampling<'_>>, next_mask: &mut DevicePtr) -> SampleRow {
    let greedy = SampleRow { temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0, uniform: 0.0, mask: 0 };
    row.map_or(greedy, |row| SampleRow {
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
    })
}
