//! A block of quantized activations; [`activations`](super::activations) says what its parts are for.

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// A code is this times its upper part plus its lower part.
pub(super) const UPPER: i32 = 128;

/// The largest code: upper parts are -127..=127, lower parts -64..=63.
pub(super) const MAX_CODE: i32 = 127 * UPPER;

/// Blocks of smaller values are taken for zeros: the factor that makes codes of them may be beyond f32.
const TINY: f32 = 1e-30;

/// 32 activations, `value = scale * code` with `scale = max |value| / 16256`, and the sums of the codes.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct ActBlock {
    /// The upper parts of the codes; lower parts, which are rarely read but with AMX, are last.
    pub upper: [i8; BLOCK],
    pub scale: f32,
    /// `scale` times the sum of the codes: of all 32, of the first 16, of the last 16.
    pub scaled_sums: [f32; 3],
    /// The sums of the codes, likewise.
    pub sums: [i32; 3],
    /// Not 0 if the lower part may be other than zeros.
    pub has_lower: u32,
    pub lower: [i8; BLOCK],
}

impl ActBlock {
    pub(super) const ZERO: Self =
        Self { upper: [0; BLOCK], scale: 0.0, scaled_sums: [0.0; 3], sums: [0; 3], has_lower: 0, lower: [0; BLOCK] };

    /// Given the largest magnitude, and that above which a block has a lower part, sets both; returns the factor that makes codes
    /// of values.
    #[inline(always)]
    pub(super) fn set_scale(&mut self, max: f32, limit: f32) -> f32 {
        self.scale = max / MAX_CODE as f32;
        self.has_lower = (max > limit).into();
        if max > TINY { MAX_CODE as f32 / max } else { 0.0 }
    }

    /// Sets the sums, given those of the codes of each half.
    #[inline(always)]
    pub(super) fn set_sums(&mut self, halves: [i32; 2]) {
        self.sums = [halves[0] + halves[1], halves[0], halves[1]];
        for (scaled, sum) in self.scaled_sums.iter_mut().zip(self.sums) {
            *scaled = sum as f32 * self.scale;
        }
    }
}

/// Quantizes a row whose blocks are outliers if their largest magnitude is above `ratio` times the mean of those of the row,
/// given what finds the largest magnitude of a block and what writes its codes and sums. A macro, for a function could not be
/// compiled with the features of each of its callers.
macro_rules! quantize_blocks {
    ($ratio:expr, $x:expr, $out:expr, $largest:ident, $quantize_block:ident) => {{
        let (blocks, _) = $x.as_chunks::<{ $crate::cpu::linear::act_block::BLOCK }>();
        let mut sum = 0.0;
        for (x, out) in blocks.iter().zip($out.iter_mut()) {
            // The scale is made of it below.
            out.scale = $largest(x);
            sum += out.scale;
        }
        // Of no number, which is 0 times infinity, 0.
        let limit = ($ratio * (sum / blocks.len() as f32)).max(0.0);
        for (x, out) in blocks.iter().zip($out) {
            let inverse = out.set_scale(out.scale, limit);
            $quantize_block(x, inverse, out);
        }
    }};
}
pub(super) use quantize_blocks;
