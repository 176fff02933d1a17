//! The formats that take 4 or 8 values at once from a grid, a list of chosen points (ggml's `ggml-common.h`; the grids are those
//! of gguf-py's `quants.py`, which is under the MIT licence). Signs, or which way the grid is shifted, and scales are stored
//! beside.
//!
//! `kernels/grid_*.inc` are the grids, a number a point: of 8 values 2 bits each, of 4 values 4 bits each, the first in the
//! lowest bits, which count the magnitudes of the format. The CUDA kernels read the same files.

use super::{BlockCodes, Format, Table, f16_at};

/// Reads numbers such as `0x01ab,`.
const fn grid<const N: usize>(text: &str) -> [u16; N] {
    let (bytes, mut points, mut i, mut at) = (text.as_bytes(), [0; N], 0, 0);
    while at < bytes.len() {
        if bytes[at] == b'x' {
            let (mut point, mut digit) = (0, 1);
            while digit <= 4 {
                let c = bytes[at + digit];
                point = point << 4 | (if c <= b'9' { c - b'0' } else { c - b'a' + 10 }) as u16;
                digit += 1;
            }
            points[i] = point;
            i += 1;
        }
        at += 1;
    }
    assert!(i == N, "a grid has another number of points");
    points
}

macro_rules! grids {
    ($($name:ident [$len:literal] = $file:literal,)*) => {
        $(static $name: [u16; $len] = grid(include_str!(concat!("../../../../kernels/grid_", $file)));)*
    };
}

grids! {
    IQ2_XXS_GRID [256] = "iq2_xxs.inc",
    IQ2_XS_GRID [512] = "iq2_xs.inc",
    IQ2_S_GRID [1024] = "iq2_s.inc",
    IQ3_XXS_GRID [256] = "iq3_xxs.inc",
    IQ3_S_GRID [512] = "iq3_s.inc",
    IQ1_GRID [2048] = "iq1_s.inc",
}

/// Scales are d / 8 times odd numbers.
const TWO_BITS: Table = Table { codes: [8, 25, 43, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], halvings: 3 };
/// Scales are d / 4 times odd numbers.
const THREE_BITS: Table = Table { codes: [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62], halvings: 2 };
const ODD: Table = Table { codes: [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15], halvings: 0 };
/// -1, 0 and 1, an eighth more or less, in eighths.
const SHIFTED: Table = Table { codes: [-9, -7, -1, 1, 7, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], halvings: 3 };

/// The eighth of 8 signs is such that their number is even.
const fn with_parity(signs: u8) -> u8 {
    signs | (signs.count_ones() as u8 & 1) << 7
}

/// 8 values: the magnitudes of a point of 2 bits each, negative where a bit of `signs` is set.
fn eight(point: u16, signs: u8, codes: &mut [i8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        let magnitude = TWO_BITS.codes[usize::from(point >> (2 * i) & 3)];
        *code = if signs >> i & 1 == 1 { -magnitude } else { magnitude };
    }
}

/// 8 values of two points of 4 bits each.
fn twice_four(table: &Table, points: [u16; 2], signs: u8, codes: &mut [i8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        let magnitude = table.codes[usize::from(points[i / 4] >> (4 * (i % 4)) & 7)];
        *code = if signs >> i & 1 == 1 { -magnitude } else { magnitude };
    }
}

/// 8 values of a point of 2 bits each, which count from -1, and an eighth more or less.
fn shifted(point: u16, down: bool, codes: &mut [i8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = ((point >> (2 * i) & 3) as i8 - 1) * 8 + if down { -1 } else { 1 };
    }
}

/// An odd number of sub-block `g` of two a byte.
fn odd_scale(scales: &[u8], g: usize) -> i8 {
    (2 * (scales[g / 2] >> (4 * (g % 2)) & 15) + 1) as i8
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// d f16; for each 32 values 4 bytes of points, and 4 times 7 signs with 4 bits of scale.
pub(super) const IQ2_XXS: Format = Format {
    name: "IQ2_XXS",
    number: 16,
    block_len: 256,
    block_bytes: 66,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&TWO_BITS),
    unpack: iq2_xxs,
};

fn iq2_xxs(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, (b, codes)) in b[2..].chunks_exact(8).zip(out.codes.chunks_exact_mut(32)).enumerate() {
        let signs = u32_at(b, 4);
        out.sub_block_scales[0][g] = (2 * (signs >> 28) + 1) as i8;
        for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
            eight(IQ2_XXS_GRID[usize::from(b[j])], with_parity((signs >> (7 * j) & 127) as u8), codes);
        }
    }
    out.multiply_in(const { TWO_BITS.unit() });
}

/// d f16; for each 8 values 9 bits of a point and 7 signs; 8 bytes of scales.
pub(super) const IQ2_XS: Format = Format {
    name: "IQ2_XS",
    number: 17,
    block_len: 256,
    block_bytes: 74,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&TWO_BITS),
    unpack: iq2_xs,
};

fn iq2_xs(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, scale) in out.sub_block_scales[0].iter_mut().enumerate() {
        *scale = odd_scale(&b[66..], g);
    }
    for (j, codes) in out.codes.chunks_exact_mut(8).enumerate() {
        let q = u16_at(b, 2 + 2 * j);
        eight(IQ2_XS_GRID[usize::from(q & 511)], with_parity((q >> 9) as u8), codes);
    }
    out.multiply_in(const { TWO_BITS.unit() });
}

/// d f16, 32 bytes of points, 32 of signs, 8 of the points' ninth and tenth bits, 8 of scales.
pub(super) const IQ2_S: Format = Format {
    name: "IQ2_S",
    number: 22,
    block_len: 256,
    block_bytes: 82,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&TWO_BITS),
    unpack: iq2_s,
};

fn iq2_s(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, scale) in out.sub_block_scales[0].iter_mut().enumerate() {
        *scale = odd_scale(&b[74..], g);
    }
    for (j, codes) in out.codes.chunks_exact_mut(8).enumerate() {
        let high = b[66 + j / 4] >> (2 * (j % 4)) & 3;
        eight(IQ2_S_GRID[usize::from(b[2 + j]) | usize::from(high) << 8], b[34 + j], codes);
    }
    out.multiply_in(const { TWO_BITS.unit() });
}

/// d f16, 64 bytes of points; for each 32 values 4 times 7 signs with 4 bits of scale.
pub(super) const IQ3_XXS: Format = Format {
    name: "IQ3_XXS",
    number: 18,
    block_len: 256,
    block_bytes: 98,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&THREE_BITS),
    unpack: iq3_xxs,
};

fn iq3_xxs(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let signs = u32_at(b, 66 + 4 * g);
        out.sub_block_scales[0][g] = (2 * (signs >> 28) + 1) as i8;
        for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
            let points = [0, 1].map(|i| IQ3_XXS_GRID[usize::from(b[2 + 8 * g + 2 * j + i])]);
            twice_four(&THREE_BITS, points, with_parity((signs >> (7 * j) & 127) as u8), codes);
        }
    }
    out.multiply_in(const { THREE_BITS.unit() });
}

/// d f16, 64 bytes of points, 8 of their ninth bits, 32 of signs, 4 of scales.
pub(super) const IQ3_S: Format = Format {
    name: "IQ3_S",
    number: 21,
    block_len: 256,
    block_bytes: 110,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&ODD),
    unpack: iq3_s,
};

fn iq3_s(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, scale) in out.sub_block_scales[0][..8].iter_mut().enumerate() {
        *scale = odd_scale(&b[106..], g);
    }
    for (j, codes) in out.codes.chunks_exact_mut(8).enumerate() {
        let points = [2 * j, 2 * j + 1].map(|i| {
            let high = b[66 + i / 8] >> (i % 8) & 1;
            IQ3_S_GRID[usize::from(b[2 + i]) | usize::from(high) << 8]
        });
        twice_four(&ODD, points, b[74 + j], codes);
    }
    out.multiply();
}

/// d f16, 32 bytes of points; for each 32 values 4 times 3 more bits of points, 3 bits of scale, one of the shift.
pub(super) const IQ1_S: Format = Format {
    name: "IQ1_S",
    number: 19,
    block_len: 256,
    block_bytes: 50,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&SHIFTED),
    unpack: iq1_s,
};

fn iq1_s(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let high = u16_at(b, 34 + 2 * g);
        out.sub_block_scales[0][g] = (2 * (high >> 12 & 7) + 1) as i8;
        for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
            let point = usize::from(b[2 + 4 * g + j]) | usize::from(high >> (3 * j) & 7) << 8;
            shifted(IQ1_GRID[point], high & 0x8000 != 0, codes);
        }
    }
    out.multiply_in(const { SHIFTED.unit() });
}

/// 32 bytes of points; for each 8 values 3 more bits of points and one of the shift; 4 times 12 bits of scales and 4 of d, f16.
pub(super) const IQ1_M: Format = Format {
    name: "IQ1_M",
    number: 29,
    block_len: 256,
    block_bytes: 56,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&SHIFTED),
    unpack: iq1_m,
};

fn iq1_m(b: &[u8], out: &mut BlockCodes) {
    let scales: [u16; 4] = std::array::from_fn(|i| u16_at(b, 48 + 2 * i));
    let d = scales.iter().enumerate().fold(0, |d, (i, scale)| d | scale >> 12 << (4 * i));
    out.super_block_scales[0] = f16_at(&d.to_le_bytes(), 0);
    for (g, scale) in out.sub_block_scales[0].iter_mut().enumerate() {
        *scale = (2 * (scales[g / 4] >> (3 * (g % 4)) & 7) + 1) as i8;
    }
    for (j, codes) in out.codes.chunks_exact_mut(8).enumerate() {
        let high = b[32 + j / 2] >> (4 * (j % 2)) & 15;
        shifted(IQ1_GRID[usize::from(b[j]) | usize::from(high & 7) << 8], high & 8 != 0, codes);
    }
    out.multiply_in(const { SHIFTED.unit() });
}
