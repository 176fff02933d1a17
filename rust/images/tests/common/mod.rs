//! Images that tests/oracle.py generates as well.
#![allow(dead_code, reason = "each test has a use for a part")]

use std::fmt::Write;

use images::RgbImage;
use sha2::{Digest, Sha256};

/// 32 bits for each counter.
pub fn noise(at: usize, seed: usize) -> u32 {
    let mut value = (at as u32).wrapping_mul(2_654_435_761).wrapping_add((seed as u32).wrapping_mul(40_503)).wrapping_add(12_345);
    value ^= value >> 15;
    value = value.wrapping_mul(2_246_822_519);
    value ^= value >> 13;
    value = value.wrapping_mul(3_266_489_917);
    value ^ (value >> 16)
}

/// By the seed: noise, a gradient, both, or black and white.
pub fn image(seed: usize, width: usize, height: usize) -> RgbImage {
    let value = |at: usize| {
        let (pixel, channel) = (at / 3, at % 3);
        let gradient = pixel % width * 7 + pixel / width * 5 + channel * 60;
        let noise = noise(at, seed) as usize >> 24;
        [noise, gradient, gradient + (noise >> 4), (noise >> 7) * 255][seed % 4] as u8
    };
    RgbImage::new(width as u32, height as u32, (0..width * height * 3).map(value).collect()).unwrap()
}

/// SHA-256, the first sixteen digits.
pub fn digest(bytes: impl IntoIterator<Item = u8>) -> String {
    sha256(bytes)[..16].to_owned()
}

pub fn sha256(bytes: impl IntoIterator<Item = u8>) -> String {
    let bytes: Vec<u8> = bytes.into_iter().collect();
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

pub fn little_endian(values: &[f32]) -> impl Iterator<Item = u8> {
    values.iter().flat_map(|value| value.to_le_bytes())
}

/// Qwen2-VL's `[patches, 3 * frames * patch * patch]` of a tile: groups of `merge * merge` patches that become one token stand
/// together.
pub fn patches(pixels: &[f32], (height, width): (usize, usize), (patch, merge, frames): (usize, usize, usize)) -> Vec<f32> {
    let mut values = Vec::with_capacity(pixels.len() * frames);
    let group = patch * merge;
    for (top, left) in (0..height / group).flat_map(|row| (0..width / group).map(move |column| (row * group, column * group))) {
        for (y, x) in (0..merge).flat_map(|row| (0..merge).map(move |column| (top + row * patch, left + column * patch))) {
            for plane in pixels.chunks_exact(height * width) {
                for _ in 0..frames {
                    values.extend((y..y + patch).flat_map(|y| &plane[y * width + x..][..patch]));
                }
            }
        }
    }
    values
}
