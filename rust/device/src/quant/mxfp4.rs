//! MXFP4 (OCP Microscaling Formats 1.0; ggml's layout): 32 values e2m1 with one power-of-two scale.

use super::{BlockCodes, Format};

/// Twice the value of each e2m1 code, so that all are integers.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The exponent e, then 16 bytes of nibbles as in `Q4_0`; value = 2^(e - 128) * doubled code.
pub(super) const MXFP4: Format = Format {
    name: "MXFP4",
    number: 39,
    block_len: 32,
    block_bytes: 17,
    sub_block_len: 32,
    has_min: false,
    has_super_blocks: false,
    code_bits: 5,
    unpack: mxfp4,
};

fn mxfp4(b: &[u8], out: &mut BlockCodes) {
    let e = u32::from(b[0]);
    // 2^(e - 128) is subnormal for e of 0 and 1.
    out.scales[0] = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (i, q) in b[1..17].iter().enumerate() {
        out.codes[i] = DOUBLED[usize::from(q & 15)];
        out.codes[i + 16] = DOUBLED[usize::from(q >> 4)];
    }
}
