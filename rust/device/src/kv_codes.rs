//! The one-byte element types of the KV cache: a head's vector as codes and one scale.
//!
//! An element is its code times the scale. The scale is the vector's largest magnitude over the largest code, as a bfloat16
//! rounded up, so that no element is beyond the largest code; it depends on the vector alone, never on what was cached before.
//! bfloat16 has the range of f32, so every finite vector has a scale, and rounding up costs at most 1/128 of the resolution. A
//! code is the quotient by that rounded scale, rounded to nearest even.
//!
//! An infinity counts as the largest finite f32 in the scale, and has the largest code. A NaN gives the whole vector a NaN scale,
//! so that it reads as NaN: a fault shows wherever it is read, as with floats. A vector whose scale would be below the least
//! normal f32 is stored as zeros.

#![allow(clippy::inline_always)] // Inlined into the kernels of every ISA, whose vectors these loops become.

use half::bf16;

/// The largest magnitude of an int8 code.
pub const INT8_MAX: f32 = 127.0;
/// The largest magnitude of an e4m3 code.
pub const E4M3_MAX: f32 = 448.0;

/// Values of the e4m3 codes: sign, 4 bits of exponent with bias 7, 3 bits of fraction; 0x7f and 0xff are NaN.
pub const E4M3_VALUES: [f32; 256] = e4m3_values();

/// 1.5 * 2^23: adding it to a float below 2^22 rounds to an integer, to nearest even, in the low bits of the sum.
const TO_INTEGER: f32 = 12_582_912.0;
const INFINITY_BITS: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

const fn e4m3_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, fraction) = ((code >> 3) & 15, code & 7);
        let magnitude = if code & 0x7f == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            // Steps of 2^-9.
            fraction as f32 / 512.0
        } else {
            f32::from_bits(((exponent + 127 - 7) << 23 | fraction << 20) as u32)
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
}

/// The scale of `values` for codes up to `max_code`.
#[inline(always)]
fn scale(values: &[f32], max_code: f32) -> bf16 {
    // Magnitudes compare as their bits; those of NaN are the greatest.
    let largest = values.iter().fold(0, |largest, x| (x.to_bits() & MAGNITUDE).max(largest));
    if largest > INFINITY_BITS {
        return bf16::NAN;
    }
    let exact = f32::from_bits(largest.min(f32::MAX.to_bits())) / max_code;
    if exact < f32::MIN_POSITIVE {
        return bf16::ZERO;
    }
    bf16::from_bits(((exact.to_bits() + 0xffff) >> 16) as u16)
}

/// Writes the codes of `values`, and returns their scale. `encode` takes a quotient within the largest code.
#[inline(always)]
fn quantize(values: &[f32], codes: &mut [u8], max_code: f32, encode: impl Fn(f32) -> u8) -> bf16 {
    let scale = scale(values, max_code);
    let divisor = scale.to_f32();
    if scale.is_nan() || divisor == 0.0 {
        codes.fill(0);
        return scale;
    }
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = encode((value / divisor).clamp(-max_code, max_code));
    }
    scale
}

/// Writes the int8 codes of `values`, as bytes, and returns their scale.
#[inline(always)]
pub(crate) fn quantize_int8(values: &[f32], codes: &mut [u8]) -> bf16 {
    quantize(values, codes, INT8_MAX, |x| (x + TO_INTEGER).to_bits() as u8)
}

/// Writes the e4m3 codes of `values`, and returns their scale.
#[inline(always)]
pub(crate) fn quantize_e4m3(values: &[f32], codes: &mut [u8]) -> bf16 {
    quantize(values, codes, E4M3_MAX, e4m3_from_f32)
}

/// The e4m3 code of a value: rounded to nearest even, cut to ±448. NaN has no code: the result is any.
#[inline(always)]
pub fn e4m3_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = f32::from_bits(bits & MAGNITUDE).min(E4M3_MAX);
    let kept = magnitude.to_bits();
    // From 2^-6 on the format has a leading one: drop 20 bits of fraction and change the bias.
    let normal = ((kept + 0x7_ffff + ((kept >> 20) & 1)) >> 20).wrapping_sub((127 - 7) << 3);
    // Below, codes count steps of 2^-9.
    let subnormal = (magnitude * 512.0 + TO_INTEGER).to_bits() & 0xf;
    let code = if magnitude < 1.0 / 64.0 { subnormal } else { normal };
    (code | (bits >> 31) << 7) as u8
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // Conversions are exact.
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_code_is_the_code_of_its_value() {
        assert_eq!((E4M3_VALUES[0x7e], E4M3_VALUES[0x01], E4M3_VALUES[0x08]), (448.0, 1.0 / 512.0, 1.0 / 64.0));
        assert_eq!((E4M3_VALUES[0x38], E4M3_VALUES[0xb9], E4M3_VALUES[0x77]), (1.0, -1.125, 240.0));
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(e4m3_from_f32(E4M3_VALUES[usize::from(code)]), code, "{code:#x}");
        }
        assert!(E4M3_VALUES[0x7f].is_nan() && E4M3_VALUES[0xff].is_nan());
    }

    #[test]
    fn e4m3_rounds_to_nearest_even_and_saturates() {
        // Between any two neighbours: the middle goes to the even one, a little to each side to the nearer.
        for code in 0..0x7eu8 {
            let (low, high) = (E4M3_VALUES[usize::from(code)], E4M3_VALUES[usize::from(code + 1)]);
            let middle = f32::midpoint(low, high);
            let even = code + (code & 1);
            for (x, expected) in [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)] {
                assert_eq!(e4m3_from_f32(x), expected, "{x} between {low} and {high}");
                assert_eq!(e4m3_from_f32(-x), expected | 0x80, "{x} between {low} and {high}");
            }
        }
        for x in [448.0, 464.0, 1e9, f32::INFINITY] {
            assert_eq!((e4m3_from_f32(x), e4m3_from_f32(-x)), (0x7e, 0xfe));
        }
        for x in [0.0, 1e-30, 1.0 / 1024.0] {
            assert_eq!((e4m3_from_f32(x), e4m3_from_f32(-x)), (0, 0x80));
        }
    }

    #[test]
    fn int8_rounds_to_nearest_even_by_the_rounded_scale() {
        // 127 * 2^-3 has the scale 2^-3 exactly; 0.5, 1.5 and 2.5 steps are ties.
        let mut codes = [0; 6];
        let scale = quantize_int8(&[15.875, -15.875, 0.0625, 0.1875, -0.3125, 0.0], &mut codes);
        assert_eq!((scale.to_f32(), codes.map(|c| c as i8)), (0.125, [127, -127, 0, 2, -2, 0]));
        // A hair more: the scale is the next bfloat16, by which the codes are computed.
        let scale = quantize_int8(&[15.876, 1.0], &mut codes[..2]).to_f32();
        assert_eq!(scale, 0.125 * (1.0 + 1.0 / 128.0));
        assert_eq!(codes[..2], [(15.876f32 / scale).round() as u8, (1.0f32 / scale).round() as u8]);
        assert_eq!(codes[0], 126);
    }

    #[test]
    fn the_largest_element_uses_the_range_and_none_leaves_it() {
        for exponent in -116..=127 {
            for fraction in [1.0, 1.003, 1.25, 1.78, 1.99] {
                let largest = fraction * 2f32.powi(exponent);
                let values = [largest, -largest, largest / 3.0, 0.0];
                let mut codes = [0; 4];
                let scale = quantize_int8(&values, &mut codes).to_f32();
                assert!((codes[0] == 126 || codes[0] == 127) && codes[1] == codes[0].wrapping_neg(), "{largest}: {codes:?}");
                for (code, value) in codes.iter().zip(values) {
                    let error = f64::from(*code as i8) * f64::from(scale) - f64::from(value);
                    assert!(error.abs() <= f64::from(scale) * 0.5001, "{value} of {largest}");
                }
                let scale = quantize_e4m3(&values, &mut codes).to_f32();
                assert_eq!((codes[0], codes[1]), (0x7e, 0xfe), "{largest}");
                for (code, value) in codes.iter().zip(values) {
                    let error = f64::from(E4M3_VALUES[usize::from(*code)]) * f64::from(scale) - f64::from(value);
                    assert!(error.abs() <= f64::from(value.abs()) / 16.0, "{value} of {largest}");
                }
            }
        }
    }

    #[test]
    fn extreme_vectors_have_the_documented_codes() {
        let mut codes = [9; 2];
        for quantize in [quantize_int8, quantize_e4m3] {
            assert_eq!((quantize(&[0.0, -0.0], &mut codes), codes), (bf16::ZERO, [0, 0]));
            assert_eq!((quantize(&[1e-37, 1e-40], &mut codes), codes), (bf16::ZERO, [0, 0]));
            let largest = quantize(&[f32::MAX, 1.0], &mut codes);
            assert_eq!((quantize(&[f32::INFINITY, 1.0], &mut codes), codes[1]), (largest, 0));
            assert!(largest.to_f32().is_finite() && [0x7e, 0x7f].contains(&codes[0]), "{largest} {codes:?}");
            assert!(quantize(&[1.0, f32::NAN], &mut codes).is_nan());
        }
    }
}
