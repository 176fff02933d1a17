//! Where random blocks of weights need scales of an even size; the tests of two crates include this file.

use super::GgmlType;

/// Positions of the f16 scales in a block of a format: any other byte may have any value, but those of formats that have none.
pub fn f16_scales(format: GgmlType) -> &'static [usize] {
    match format {
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
        GgmlType::Tq1_0 => &[52],
        GgmlType::Tq2_0 => &[64],
        GgmlType::Mxfp4 | GgmlType::Nvfp4 | GgmlType::Iq1M => &[],
        _ => &[0],
    }
}
