//! The formats of super-blocks, 256 values whose sub-blocks have scales that are quantized themselves: `Q2_K` to `Q6_K` (ggml's
//! `ggml-common.h`).

use super::{BlockCodes, Format, f16_at};

/// 16 bytes of (scale, min) nibbles, 64 bytes of 2-bit codes, d f16, dmin f16; value = d * sc * q - dmin * m, sub-blocks of 16.
pub(super) const Q2_K: Format = Format {
    name: "Q2_K",
    number: 10,
    block_len: 256,
    block_bytes: 84,
    sub_block_len: 16,
    has_min: true,
    has_super_blocks: true,
    code_bits: 4,
    table: None,
    unpack: q2_k,
};

fn q2_k(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales = [f16_at(b, 80), -f16_at(b, 82)];
    for (g, s) in b[..16].iter().enumerate() {
        (out.sub_block_scales[0][g], out.sub_block_scales[1][g]) = ((s & 15) as i8, (s >> 4) as i8);
    }
    out.multiply();
    two_bits(&b[16..80], &mut out.codes);
}

/// Of 128 values, value 32 j + l is bits 2 j and 2 j + 1 of byte l.
fn two_bits(qs: &[u8], codes: &mut [i8]) {
    for (qs, codes) in qs.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (c, q) in codes.iter_mut().zip(qs) {
                *c = ((q >> (2 * j)) & 3) as i8;
            }
        }
    }
}

/// 32 bytes of inverted third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, d f16; value = d * (sc - 32) * q,
/// sub-blocks of 16.
pub(super) const Q3_K: Format = Format {
    name: "Q3_K",
    number: 11,
    block_len: 256,
    block_bytes: 110,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: None,
    unpack: q3_k,
};

fn q3_k(b: &[u8], out: &mut BlockCodes) {
    let (hmask, scales) = (&b[..32], &b[96..108]);
    out.super_block_scales[0] = f16_at(b, 108);
    for g in 0..16 {
        let low = if g < 8 { scales[g] & 15 } else { scales[g - 8] >> 4 };
        let high = (scales[8 + g % 4] >> (2 * (g / 4))) & 3;
        out.sub_block_scales[0][g] = (low | (high << 4)) as i8 - 32;
    }
    out.multiply();
    two_bits(&b[32..96], &mut out.codes);
    for (bit, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (c, h) in codes.iter_mut().zip(hmask) {
            *c -= 4 - ((h >> bit) & 1) as i8 * 4;
        }
    }
}

/// 6-bit scale and min of sub-block `j` of 8, from the 12 bytes that `Q4_K` and `Q5_K` keep them in.
fn scale_and_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// d and dmin at bytes 0 and 2, the 12 bytes of scales at 4, into 8 sub-blocks.
fn scales_and_mins(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales = [f16_at(b, 0), -f16_at(b, 2)];
    for j in 0..8 {
        let (scale, min) = scale_and_min(&b[4..16], j);
        (out.sub_block_scales[0][j], out.sub_block_scales[1][j]) = (scale as i8, min as i8);
    }
    out.multiply();
}

/// Of 64 values, value l is the low half of byte l, value 32 + l its high half.
fn four_bits(qs: &[u8], codes: &mut [i8]) {
    for (qs, codes) in qs.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((q, l), h) in qs.iter().zip(low).zip(high) {
            *l = (q & 15) as i8;
            *h = (q >> 4) as i8;
        }
    }
}

/// d f16, dmin f16, 12 bytes of scales, 128 bytes of nibbles; value = d * sc * q - dmin * m, sub-blocks of 32.
pub(super) const Q4_K: Format = Format {
    name: "Q4_K",
    number: 12,
    block_len: 256,
    block_bytes: 144,
    sub_block_len: 32,
    has_min: true,
    has_super_blocks: true,
    code_bits: 4,
    table: None,
    unpack: q4_k,
};

fn q4_k(b: &[u8], out: &mut BlockCodes) {
    scales_and_mins(b, out);
    four_bits(&b[16..144], &mut out.codes);
}

/// As `Q4_K`, with 32 bytes of fifth bits before the nibbles: bit j of byte l belongs to value 32 j + l.
pub(super) const Q5_K: Format = Format {
    name: "Q5_K",
    number: 13,
    block_len: 256,
    block_bytes: 176,
    sub_block_len: 32,
    has_min: true,
    has_super_blocks: true,
    code_bits: 5,
    table: None,
    unpack: q5_k,
};

fn q5_k(b: &[u8], out: &mut BlockCodes) {
    scales_and_mins(b, out);
    four_bits(&b[48..176], &mut out.codes);
    for (bit, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (c, h) in codes.iter_mut().zip(&b[16..48]) {
            *c |= (((h >> bit) & 1) << 4) as i8;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, d f16; value = d * sc * (q - 32), sub-blocks of 16.
pub(super) const Q6_K: Format = Format {
    name: "Q6_K",
    number: 14,
    block_len: 256,
    block_bytes: 210,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: true,
    code_bits: 6,
    table: None,
    unpack: q6_k,
};

fn q6_k(b: &[u8], out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, 208);
    for (scale, s) in out.sub_block_scales[0].iter_mut().zip(&b[192..208]) {
        *scale = s.cast_signed();
    }
    out.multiply();
    for (half, codes) in out.codes.chunks_exact_mut(128).enumerate() {
        let (ql, qh) = (&b[64 * half..64 * half + 64], &b[128 + 32 * half..160 + 32 * half]);
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            let ql = &ql[32 * (j % 2)..32 * (j % 2) + 32];
            for (c, (l, h)) in codes.iter_mut().zip(ql.iter().zip(qh)) {
                *c = (((l >> (4 * (j / 2))) & 15) | (((h >> (2 * j)) & 3) << 4)) as i8 - 32;
            }
        }
    }
}
