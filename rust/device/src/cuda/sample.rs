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

/// The kernels that sample, and where they write.
pub struct Sampling {
    sample: Kernel,
    top_logprobs: Kernel,
    token_ids: Scratch,
    logprobs: Scratch,
    masks: Scratch,
}

impl Sampling {
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new() -> Result<Self, CudaError> {
        let (sample, top_logprobs) = (Kernel::named("sample")?, Kernel::named("top_logprobs")?);
        let [token_ids, logprobs, masks] = std::array::from_fn(|_| Scratch::default());
        Ok(Self { sample, top_logprobs, token_ids, logprobs, masks })
    }

    /// Rows as the kernel takes them; their masks are copied to the GPU, and are there until the next call.
    pub fn rows(&mut self, driver: &Arc<dyn Driver>, rows: &[Option<RowSampling<'_>>]) -> Result<Vec<SampleRow>, CudaError> {
        let mut words = Vec::new();
        for mask in rows.iter().flatten().filter_map(|row| row.mask) {
            words.extend_from_slice(mask.words());
        }
        let mut next_mask = 0;
        if !words.is_empty() {
            next_mask = self.masks.bytes(driver, size_of_val(&*words))?;
            driver.upload(next_mask, bytes_of(&words))?;
        }
        Ok(rows.iter().map(|row| sample_row(row.as_ref(), &mut next_mask)).collect())
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
        let [token_ids, logprobs] = [self.token_ids.bytes(driver, count * size)?, self.logprobs.bytes(driver, count * size)?];
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
        let (mut ids, mut values) = (vec![0_u32; count], vec![0.0_f32; count]);
        driver.download(bytes_of_mut(&mut ids), token_ids)?;
        driver.download(bytes_of_mut(&mut values), logprobs)?;
        let row = |row: usize| {
            let top = logits.count + row * num_top..logits.count + (row + 1) * num_top;
            let top = ids[top.clone()].iter().copied().zip(values[top].iter().copied()).collect();
            (ids[row] != NO_TOKEN).then(|| SampledRow { token_id: ids[row], logprob: values[row], top })
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
