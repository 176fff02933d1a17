//! The formats with one scale for 32 values: `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0` (ggml's `ggml-common.h`).
//!
//! In the 4- and 5-bit ones, byte i of the nibbles holds value i in its low half and value i + 16 in its high half; bit i of the
//! 32-bit word of fifth bits belongs to value i.

use super::{BlockCodes, Format, f16_at};

fn nibbles(qs: &[u8], zero: i8, codes: &mut [i8]) {
    for (i, q) in qs.iter().enumerate() {
        codes[i] = (q & 15) as i8 - zero;
        codes[i + 16] = (q >> 4) as i8 - zero;
    }
}

fn fifth_bits(qh: &[u8], codes: &mut [i8]) {
    for (i, c) in codes.iter_mut().enumerate() {
        *c += ((qh[i / 8] >> (i % 8)) & 1) as i8 * 16;
    }
}

/// d f16, 16 bytes of nibbles; value = d * (q - 8).
pub(super) const Q4_0: Format = Format {
    name: "Q4_0",
    number: 2,
    block_len: 32,
    block_bytes: 18,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 4,
    table: None,
    unpack: q4_0,
};

fn q4_0(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    nibbles(&b[2..18], 8, &mut out.codes);
}

/// d f16, m f16, 16 bytes of nibbles; value = d * q + m.
pub(super) const Q4_1: Format = Format {
    name: "Q4_1",
    number: 3,
    block_len: 32,
    block_bytes: 20,
    sub_block_len: 32,
    has_min: true,
    has_super_blocks: false,
    code_bits: 4,
    table: None,
    unpack: q4_1,
};

fn q4_1(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    out.mins[0] = f16_at(b, 2);
    nibbles(&b[4..20], 0, &mut out.codes);
}

/// d f16, 4 bytes of fifth bits, 16 bytes of nibbles; value = d * (q - 16).
pub(super) const Q5_0: Format = Format {
    name: "Q5_0",
    number: 6,
    block_len: 32,
    block_bytes: 22,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 5,
    table: None,
    unpack: q5_0,
};

fn q5_0(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    nibbles(&b[6..22], 16, &mut out.codes);
    fifth_bits(&b[2..6], &mut out.codes[..32]);
}

/// d f16, m f16, 4 bytes of fifth bits, 16 bytes of nibbles; value = d * q + m.
pub(super) const Q5_1: Format = Format {
    name: "Q5_1",
    number: 7,
    block_len: 32,
    block_bytes: 24,
    sub_block_len: 32,
    has_min: true,
    has_super_blocks: false,
    code_bits: 5,
    table: None,
    unpack: q5_1,
};

fn q5_1(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    out.mins[0] = f16_at(b, 2);
    nibbles(&b[8..24], 0, &mut out.codes);
    fifth_bits(&b[4..8], &mut out.codes[..32]);
}

/// d f16, 32 signed bytes; value = d * q.
pub(super) const Q8_0: Format = Format {
    name: "Q8_0",
    number: 8,
    block_len: 32,
    block_bytes: 34,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 8,
    table: None,
    unpack: q8_0,
};

fn q8_0(b: &[u8], out: &mut BlockCodes) {
    out.scales[0] = f16_at(b, 0);
    for (c, q) in out.codes.iter_mut().zip(&b[2..34]) {
        *c = *q as i8;
    }
}
