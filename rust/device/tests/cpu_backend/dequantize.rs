//! Dequantization, bit for bit against the values that gguf-py computes (tests/data: `TYPE_raw.bin`, `TYPE_f32.bin`).

use std::path::Path;

use device::{DType, GgmlType, quant::dequantize_row};

fn data(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_ggml_format_dequantizes_to_the_same_bits_as_gguf_py() {
    for format in GgmlType::ALL {
        let raw = data(&format!("{}_raw.bin", format.name()));
        let expected: Vec<u32> =
            data(&format!("{}_f32.bin", format.name())).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        assert_eq!(raw.len() / format.block_bytes() * format.block_len(), expected.len());
        let mut got = vec![f32::NAN; expected.len()];
        dequantize_row(DType::Ggml(format), &raw, &mut got);
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(g.to_bits(), *e, "{} value {i}: {g} instead of {}", format.name(), f32::from_bits(*e));
        }
    }
}

#[test]
fn every_f16_and_bf16_widens_exactly() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut out = vec![0.0; 1 << 16];
    dequantize_row(DType::BF16, &bytes, &mut out);
    assert!(out.iter().enumerate().all(|(i, v)| v.to_bits() == (i as u32) << 16));
    dequantize_row(DType::F16, &bytes, &mut out);
    for (i, v) in out.iter().enumerate() {
        let (exponent, mantissa) = ((i >> 10) & 31, (i & 1023) as f64);
        let magnitude = match exponent {
            0 => mantissa * 2f64.powi(-24),
            31 if mantissa == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            e => (1024.0 + mantissa) * 2f64.powi(e as i32 - 25),
        };
        let expected = if i >> 15 == 1 { -magnitude } else { magnitude };
        assert!(
            f64::from(*v).to_bits() == expected.to_bits() || (v.is_nan() && expected.is_nan()),
            "{i:#x}: {v} instead of {expected}"
        );
    }
}

#[test]
fn f32_rows_are_copied() {
    let values = [1.5f32, -0.0, f32::MIN_POSITIVE, f32::INFINITY];
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = [0.0; 4];
    dequantize_row(DType::F32, &bytes, &mut out);
    assert!(out.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
#[should_panic(expected = "Q8_0 row of 64 values")]
fn a_row_of_the_wrong_length_is_refused() {
    dequantize_row(DType::Ggml(GgmlType::Q8_0), &[0; 34], &mut [0.0; 64]);
}
