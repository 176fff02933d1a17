//! The formats whose codes are a table of values (ggml's `ggml-common.h` and gguf-py's `quants.py`): 16 that follow the normal
//! distribution, those of e2m1, and the whole numbers about 0.

use super::{BlockCodes, Format, Table, f16_at};

const NORMAL: Table = Table { codes: [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], halvings: 0 };

/// Twice the value of each e2m1 code, so that all are integers.
const DOUBLED_E2M1: Table = Table { codes: [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], halvings: 0 };

/// Two bits less one; no quantizer writes the last.
const TERNARY: Table = Table { codes: [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], halvings: 0 };

/// The codes of `N / 2` values, then of as many more: byte i has those of value i and of value `N / 2 + i`.
fn nibbles(table: &Table, qs: &[u8], codes: &mut [i8]) {
    let (low, high) = codes.split_at_mut(qs.len());
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = table.codes[usize::from(q & 15)];
        *high = table.codes[usize::from(q >> 4)];
    }
}

/// d f16, 16 bytes of nibbles; value = d * table.
pub(super) const IQ4_NL: Format = Format {
    name: "IQ4_NL",
    number: 20,
    block_len: 32,
    block_bytes: 18,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 4,
    table: Some(&NORMAL),
    unpack: iq4_nl,
};

fn iq4_nl(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    nibbles(&NORMAL, &b[2..18], &mut out.codes[..32]);
}

/// d f16, 2 bytes of high and 4 of low bits of 6-bit scales, 128 bytes of nibbles; value = d * (sc - 32) * table, sub-blocks of
/// 32.
pub(super) const IQ4_XS: Format = Format {
    name: "IQ4_XS",
    number: 23,
    block_len: 256,
    block_bytes: 136,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&NORMAL),
    unpack: iq4_xs,
};

fn iq4_xs(b: &[u8], out: &mut BlockCodes) {
    let high = u16::from_le_bytes([b[2], b[3]]);
    out.super_block_scales[0] = f16_at(b, 0);
    for (g, (qs, codes)) in b[8..].chunks_exact(16).zip(out.codes.chunks_exact_mut(32)).enumerate() {
        let low = (b[4 + g / 2] >> (4 * (g % 2))) & 15;
        out.sub_block_scales[0][g] = (low | (((high >> (2 * g)) & 3) as u8) << 4) as i8 - 32;
        nibbles(&NORMAL, qs, codes);
    }
    out.multiply();
}

/// The OCP's: the exponent e, then 16 bytes of nibbles as in `Q4_0`; value = 2^(e - 128) * doubled code.
pub(super) const MXFP4: Format = Format {
    name: "MXFP4",
    number: 39,
    block_len: 32,
    block_bytes: 17,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 4,
    table: Some(&DOUBLED_E2M1),
    unpack: mxfp4,
};

fn mxfp4(b: &[u8], out: &mut BlockCodes) {
    let e = u32::from(b[0]);
    // 2^(e - 128) is subnormal for e of 0 and 1.
    out.scales[0] = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    nibbles(&DOUBLED_E2M1, &b[1..17], &mut out.codes[..32]);
}

/// Four scales e4m3 without a sign, then 8 bytes of nibbles for each; value = scale / 2 * doubled code, sub-blocks of 16.
pub(super) const NVFP4: Format = Format {
    name: "NVFP4",
    number: 40,
    block_len: 64,
    block_bytes: 36,
    sub_block_len: 16,
    has_min: false,
    has_super_blocks: false,
    code_bits: 4,
    table: Some(&DOUBLED_E2M1),
    unpack: nvfp4,
};

fn nvfp4(b: &[u8], out: &mut BlockCodes) {
    for (g, (qs, codes)) in b[4..36].chunks_exact(8).zip(out.codes.chunks_exact_mut(16)).enumerate() {
        out.scales[g] = half_of_e4m3(b[g]);
        nibbles(&DOUBLED_E2M1, qs, codes);
    }
}

/// Half of an e4m3 number; the code that is no number counts as 0.
fn half_of_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, f32::from(code & 7));
    match (code, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa / 1024.0,
        _ => (8.0 + mantissa) / 16.0 * 2f32.powi(i32::from(exponent) - 7),
    }
}

/// 48 bytes of five ternary digits, 4 bytes of four, d f16; value = d * (q - 1). A byte is a fraction of 256, whose digits come
/// out at the top as it is multiplied by 3.
pub(super) const TQ1_0: Format = Format {
    name: "TQ1_0",
    number: 34,
    block_len: 256,
    block_bytes: 54,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&TERNARY),
    unpack: tq1_0,
};

fn tq1_0(b: &[u8], out: &mut BlockCodes) {
    one_scale(b, 52, out);
    let mut at = 0;
    for (qs, digits) in [(&b[..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        let mut power = 1_u8;
        for _ in 0..digits {
            for q in qs {
                let q = q.wrapping_mul(power);
                out.codes[at] = ((u16::from(q) * 3) >> 8) as i8 - 1;
                at += 1;
            }
            power = power.wrapping_mul(3);
        }
    }
}

/// 64 bytes of 2-bit codes, d f16; value = d * (q - 1). Of 128 values, value 32 j + l is bits 2 j and 2 j + 1 of byte l.
pub(super) const TQ2_0: Format = Format {
    name: "TQ2_0",
    number: 35,
    block_len: 256,
    block_bytes: 66,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: true,
    code_bits: 4,
    table: Some(&TERNARY),
    unpack: tq2_0,
};

fn tq2_0(b: &[u8], out: &mut BlockCodes) {
    one_scale(b, 64, out);
    for (i, code) in out.codes.iter_mut().enumerate() {
        *code = (b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) as i8 - 1;
    }
}

/// The f16 at byte `at` is the scale of all sub-blocks.
fn one_scale(b: &[u8], at: usize, out: &mut BlockCodes) {
    out.super_block_scales[0] = f16_at(b, at);
    out.sub_block_scales[0].fill(1);
    out.multiply();
}

/// d f16, 16 bytes of bits; value = d where the bit is set, -d where it is not.
pub(super) const Q1_0: Format = Format {
    name: "Q1_0",
    number: 41,
    block_len: 128,
    block_bytes: 18,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 4,
    table: Some(&TERNARY),
    unpack: q1_0,
};

fn q1_0(b: &[u8], out: &mut BlockCodes) {
    out.scales[..4].fill(f16_at(b, 0));
    for (i, code) in out.codes[..128].iter_mut().enumerate() {
        *code = if b[2 + i / 8] >> (i % 8) & 1 == 1 { 1 } else { -1 };
    }
}
