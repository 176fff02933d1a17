//! Quantized weights, packed as [`layout`](super::layout) says, and the portable kernel.

use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::{
    PANEL,
    act_block::{ActBlock, UPPER},
    layout::{
        COLS, Codes, Kernel, Layout, Lookup, T4, TILE, block_bytes, blocks_of, codes_bytes, select, super_block_body_bytes,
        super_block_len, zero_point,
    },
    out::SharedOut,
    slab::SlabBytes,
    tiles::MAX_WEIGHT,
};
use crate::{
    DType, DeviceError, GgmlType, WeightView,
    cpu::{Isa, ThreadPool},
    quant::{BlockCodes, Format},
};

/// Bytes of a panel of rows of `cols` columns.
pub(super) const fn panel_bytes(format: GgmlType, cols: usize) -> usize {
    let layout = Layout::of(format);
    cols / (COLS * super_block_len(layout.super_blocks)) * layout.super_block_bytes()
}

/// A packed weight.
pub(super) struct Packed {
    data: SlabBytes,
    /// Bytes of a panel.
    pub panel_bytes: usize,
    kernel: Kernel,
    layout: Layout,
    lookup: Lookup,
    /// Whether its values are well within f16.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    fits_f16: bool,
}

impl Packed {
    /// Packs `weight`; `None` when its type is not quantized or a scale is beyond f16 (no sane file has one).
    pub(super) fn new(weight: &WeightView, isa: Isa, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        let DType::Ggml(format) = weight.dtype else { return Ok(None) };
        let layout = Layout::of(format);
        let panels = weight.rows.div_ceil(PANEL);
        let panel_bytes = panel_bytes(format, weight.cols);
        let mut data = SlabBytes::zeroed(panels * panel_bytes)?;
        let (fits, fits_f16) = (AtomicBool::new(true), AtomicBool::new(true));
        let out = SharedOut::new(data.as_mut_slice());
        pool.for_each_range(panels, 1, &|start, end| {
            for p in start..end {
                // SAFETY: each panel is packed by one thread.
                let panel = unsafe { out.part(p * panel_bytes, panel_bytes) };
                for row in p * PANEL..weight.rows.min((p + 1) * PANEL) {
                    match pack_row(format, layout, weight.row(row), row - p * PANEL, panel) {
                        None => fits.store(false, Ordering::Relaxed),
                        Some(largest) if largest > MAX_WEIGHT => fits_f16.store(false, Ordering::Relaxed),
                        Some(_) => {}
                    }
                }
            }
        });
        Ok(fits.into_inner().then(|| Self {
            data,
            panel_bytes,
            kernel: kernel(layout, isa),
            layout,
            lookup: layout.lookup(),
            fits_f16: fits_f16.into_inner(),
        }))
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let panel = &self.data.as_slice()[r / PANEL * self.panel_bytes..][..self.panel_bytes];
        let unpack: fn(&[u8], &Lookup, usize, &mut [f32]) = select!(self.layout, unpack_row);
        unpack(panel, &self.lookup, r % PANEL, out);
    }

    /// Whether its values are well within f16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn fits_f16(&self) -> bool {
        self.fits_f16
    }

    /// Panel `p`, and how it is packed.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn panel(&self, p: usize) -> (&[u8], &Lookup, Layout) {
        (&self.data.as_slice()[p * self.panel_bytes..(p + 1) * self.panel_bytes], &self.lookup, self.layout)
    }

    /// Where the first panel lies.
    pub(super) fn address(&self) -> usize {
        self.data.as_slice().as_ptr().addr()
    }

    /// Bytes of the packed form.
    pub(super) fn bytes(&self) -> usize {
        self.data.as_slice().len()
    }

    /// Multiplies panel `p` by rows of activations; see [`Kernel`].
    pub(super) fn multiply(&self, p: usize, acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        let panel = &self.data.as_slice()[p * self.panel_bytes..(p + 1) * self.panel_bytes];
        // SAFETY: `CpuLinear::new` refuses an ISA above the machine's, so the kernel's instructions exist.
        unsafe { (self.kernel)(panel, &self.lookup, acts, out) }
    }
}

/// The kernel of an ISA; that of one above the machine's must not be called.
pub(super) fn kernel(layout: Layout, isa: Isa) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => super::avx512::kernel(layout),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => super::avx2::kernel(layout),
        _ => select!(layout, scalar),
    }
}

/// Packs one row of a file as row `r` of a panel. Returns a bound of the magnitudes of its values; `None` when a scale or minimum
/// that is to be f16 is beyond it.
pub(super) fn pack_row(format: GgmlType, layout: Layout, bytes: &[u8], r: usize, panel: &mut [u8]) -> Option<f32> {
    let Layout { codes, halves, min, super_blocks, table } = layout;
    let (tile, lane, codes_len) = (r / TILE, r % TILE, codes_bytes(codes as u8));
    let (sub_blocks, kinds) = (1 + usize::from(halves), 1 + usize::from(min));
    let zero = zero_point(codes as u8, min) as u8;
    // What stands for a code.
    let mut stored: [u8; 256] = std::array::from_fn(|code| (code as u8).wrapping_add(zero));
    for (i, code) in table.iter().flat_map(|table| table.codes.iter().enumerate()).rev() {
        stored[usize::from(code.cast_unsigned())] = i as u8;
    }
    // Of what multiplies a scale, and a minimum: codes less their zeros, and scales within super-blocks.
    let within = if super_blocks { 128.0 } else { 1.0 };
    let factors = [within * largest_code(layout), within];
    let (mut fits, mut largest) = (true, 0.0f32);
    let (mut block, &Format { unpack, block_len, block_bytes: file_block_bytes, .. }) = (BlockCodes::new(), format.format());
    let super_block_cols = COLS * super_block_len(super_blocks);
    let super_blocks_of = panel.chunks_exact_mut(layout.super_block_bytes() * (block_len / super_block_cols));
    for (bytes, outs) in bytes.chunks_exact(file_block_bytes).zip(super_blocks_of) {
        unpack(bytes, &mut block);
        for (s, super_block) in outs.chunks_exact_mut(layout.super_block_bytes()).enumerate() {
            let (outs, floats) = super_block.split_at_mut(super_block_body_bytes(codes as u8, halves, min, super_blocks));
            for (b, out) in outs.chunks_exact_mut(block_bytes(codes as u8, halves, min, super_blocks)).enumerate() {
                let quads = std::array::from_fn(|q| {
                    let at = s * super_block_cols + b * COLS + 4 * q;
                    let code = |i: usize| stored[usize::from(block.codes[at + i].cast_unsigned())];
                    u32::from_le_bytes([code(0), code(1), code(2), code(3)])
                });
                let (out, scales) = out.split_at_mut(codes_len);
                put_codes(codes, &quads, out, (tile, lane));
                let own = block.sub_block_scales.iter().flat_map(|scales| &scales[b * sub_blocks..(b + 1) * sub_blocks]);
                for (out, scale) in scales.chunks_exact_mut(PANEL).zip(own) {
                    out[r] = scale.cast_unsigned();
                }
            }
            let own: [&[f32]; 2] = if super_blocks {
                block.super_block_scales.each_ref().map(std::slice::from_ref)
            } else {
                [&block.scales, &block.mins].map(|v| &v[s * sub_blocks..(s + 1) * sub_blocks])
            };
            let mut lines = floats.chunks_exact_mut(64);
            let mut bounds = [0.0f32; 2];
            for ((values, bound), factor) in own.into_iter().take(kinds).zip(&mut bounds).zip(factors) {
                for (value, line) in values.iter().zip(&mut lines) {
                    let value = f16::from_f32(*value);
                    fits &= value.is_finite();
                    *bound = bound.max(factor * value.to_f32().abs());
                    line[2 * r..2 * r + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
            largest = largest.max(bounds[0] + bounds[1]);
        }
    }
    fits.then_some(largest)
}

/// A bound of the magnitudes of codes less their zeros, times the unit of scales.
fn largest_code(layout: Layout) -> f32 {
    let codes = if layout.codes == Codes::T4 { 128.0 } else { (1 << (layout.codes as u8)) as f32 };
    codes * layout.lookup().unit
}

/// Writes the codes of one row of a block; a quad is those of 4 columns.
pub(super) fn put_codes(codes: Codes, quads: &[u32; COLS / 4], out: &mut [u8], (tile, lane): (usize, usize)) {
    let mut put = |line: usize, quad: u32| {
        let at = line * 64 + 4 * lane;
        out[at..at + 4].copy_from_slice(&quad.to_le_bytes());
    };
    if codes == Codes::U8 {
        for (q, quad) in quads.iter().enumerate() {
            put(8 * tile + q, *quad);
        }
        return;
    }
    let mut fifth = 0;
    let mut upper = [0; 2];
    for (g, (low, high)) in quads[..4].iter().zip(&quads[4..]).enumerate() {
        put(4 * tile + g, low & 0x0f0f_0f0f | (high & 0x0f0f_0f0f) << 4);
        fifth |= (low >> 4 & 0x0101_0101) << g | (high >> 4 & 0x0101_0101) << (4 + g);
        upper[0] |= (low >> 4 & 0x0303_0303) << (2 * g);
        upper[1] |= (high >> 4 & 0x0303_0303) << (2 * g);
    }
    match codes {
        Codes::U5 => put(8 + tile, fifth),
        Codes::U6 => {
            put(8 + 2 * tile, upper[0]);
            put(9 + 2 * tile, upper[1]);
        }
        Codes::U4 | Codes::U8 | Codes::T4 => {}
    }
}

/// The inverse of [`put_codes`]: the codes of one row of a block, of a table their places in it.
pub(super) fn codes_of<const CODES: u8>(block: &[u8], (tile, lane): (usize, usize)) -> [u8; COLS] {
    let get = |line: usize| {
        let at = line * 64 + 4 * lane;
        u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
    };
    let mut out = [0; COLS];
    let (quads, _) = out.as_chunks_mut::<4>();
    if CODES == 8 {
        for (q, quad) in quads.iter_mut().enumerate() {
            *quad = get(8 * tile + q).to_le_bytes();
        }
        return out;
    }
    let upper = match CODES {
        5 => [get(8 + tile), get(8 + tile) >> 4],
        6 => [get(8 + 2 * tile), get(9 + 2 * tile)],
        _ => [0; 2],
    };
    for g in 0..4 {
        let nibbles = get(4 * tile + g);
        for half in 0..2 {
            let high = if CODES == 5 { (upper[half] >> g) & 0x0101_0101 } else { (upper[half] >> (2 * g)) & 0x0303_0303 };
            quads[4 * half + g] = ((nibbles >> (4 * half)) & 0x0f0f_0f0f | high << 4).to_le_bytes();
        }
    }
    out
}

/// The f16 at byte `at` of a block.
pub(super) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale and minimum of sub-block `s` of row `r` of a block.
fn scale_and_min<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    block: &[u8],
    floats: &[u8],
    unit: f32,
    (r, s): (usize, usize),
) -> (f32, f32) {
    let sub_blocks = 1 + usize::from(HALVES);
    let of = |kind: usize| {
        if SUPER {
            f16_at(floats, 64 * kind + 2 * r)
                * f32::from(block[codes_bytes(CODES) + PANEL * (kind * sub_blocks + s) + r].cast_signed())
        } else {
            f16_at(floats, 64 * (kind * sub_blocks + s) + 2 * r)
        }
    };
    (of(0) * unit, if MIN { of(1) } else { 0.0 })
}

/// The codes of row `r` of a block, less their zero.
fn values_of<const CODES: u8, const MIN: bool>(block: &[u8], lookup: &Lookup, r: usize) -> [i16; COLS] {
    codes_of::<CODES>(block, (r / TILE, r % TILE)).map(|code| {
        let code = if CODES == T4 { lookup.codes[usize::from(code)] } else { code };
        i16::from(code) - zero_point(CODES, MIN) as i16
    })
}

/// Row `r` of a panel.
fn unpack_row<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    r: usize,
    out: &mut [f32],
) {
    let sub_blocks = 1 + usize::from(HALVES);
    for ((block, floats), out) in blocks_of::<CODES, HALVES, MIN, SUPER>(panel).zip(out.chunks_exact_mut(COLS)) {
        let codes = values_of::<CODES, MIN>(block, lookup, r);
        for (s, (out, codes)) in out.chunks_exact_mut(COLS / sub_blocks).zip(codes.chunks_exact(COLS / sub_blocks)).enumerate() {
            let (scale, min) = scale_and_min::<CODES, HALVES, MIN, SUPER>(block, floats, lookup.unit, (r, s));
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(*code) + min;
            }
        }
    }
}

fn scalar<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    acts: &[ActBlock],
    out: &mut [[f32; PANEL]],
) {
    let sub_blocks = 1 + usize::from(HALVES);
    out.fill([0.0; PANEL]);
    let stride = acts.len() / out.len();
    for (b, (block, floats)) in blocks_of::<CODES, HALVES, MIN, SUPER>(panel).enumerate() {
        for r in 0..PANEL {
            let codes = values_of::<CODES, MIN>(block, lookup, r);
            let scales: [(f32, f32); 2] = std::array::from_fn(|s| {
                scale_and_min::<CODES, HALVES, MIN, SUPER>(block, floats, lookup.unit, (r, s.min(sub_blocks - 1)))
            });
            for (x, out) in acts.iter().skip(b).step_by(stride).zip(out.iter_mut()) {
                let mut dots = [0; 2];
                for (i, code) in codes.iter().enumerate() {
                    let x = UPPER * i32::from(x.upper[i]) + i32::from(x.lower[i]);
                    dots[i / 16] += i32::from(*code) * x;
                }
                if !HALVES {
                    dots[0] += dots[1];
                }
                for (s, (scale, min)) in scales.iter().enumerate().take(sub_blocks) {
                    out[r] += dots[s] as f32 * x.scale * scale + min * x.scaled_sums[if HALVES { 1 + s } else { 0 }];
                }
            }
        }
    }
}
