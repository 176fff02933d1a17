//! Pillow's resizing of 8-bit images, bit for bit: `ImagingResample` of libImaging's Resample.c, `ImagingScaleAffine` of its
//! Geometry.c, and `Image.resize`, all of Pillow 12.3.
//!
//! Rows first, then columns, each a weighted sum in integers and cut to 8 bits. The weights have 22 bits behind the point. Where
//! an image is made smaller, a filter is as much wider.

use std::f64::consts::PI;

use serde::Serialize;

use crate::{ImageError, RgbImage};

/// Bits behind the point: 32, less 8 of a value and 2 for sums over 1.
const PRECISION: u32 = 22;

/// Pixels of a result, and of what lies between the two passes.
const MAX_PIXELS: u64 = 1 << 26;

/// How pixels are weighed. The numbers are Pillow's and those of `resample` in a processor's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Filter {
    /// 0: the nearest pixel.
    Nearest,
    /// 1: a windowed sinc over three pixels on each side.
    Lanczos,
    /// 2: a triangle over one pixel on each side.
    Bilinear,
    /// 3: Keys's cubic with a = -0.5, over two pixels on each side.
    Bicubic,
    /// 4: the mean of the pixels that a result covers.
    Box,
    /// 5: a windowed sinc over one pixel on each side.
    Hamming,
}

impl Filter {
    /// Of Pillow's number.
    pub fn from_number(number: u64) -> Option<Self> {
        [Self::Nearest, Self::Lanczos, Self::Bilinear, Self::Bicubic, Self::Box, Self::Hamming]
            .get(usize::try_from(number).ok()?)
            .copied()
    }

    /// How far a weight reaches, in pixels.
    fn support(self) -> f64 {
        match self {
            Self::Nearest => 0.0,
            Self::Box => 0.5,
            Self::Bilinear | Self::Hamming => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// The weight at a distance of `x` pixels.
    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
        let distance = x.abs();
        match self {
            Self::Box if x > -0.5 && x <= 0.5 => 1.0,
            Self::Bilinear if distance < 1.0 => 1.0 - distance,
            Self::Hamming if distance == 0.0 => 1.0,
            Self::Hamming if distance < 1.0 => {
                sinc(distance) * (f64::from(0.54_f32) + f64::from(0.46_f32) * (distance * PI).cos())
            }
            Self::Bicubic if distance < 1.0 => ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0,
            Self::Bicubic if distance < 2.0 => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * A,
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            _ => 0.0,
        }
    }
}

/// The inputs of one output pixel along one axis: from `start` on, one weight each.
struct Window {
    start: usize,
    weights: Vec<i32>,
}

/// `[output]` windows.
fn windows(input: usize, output: usize, filter: Filter) -> Vec<Window> {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    let window = |x: usize| {
        let center = (x as f64 + 0.5) * scale;
        let start = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(input);
        let inverse = 1.0 / stretch;
        let weights: Vec<_> = (start..end).map(|at| filter.weight((at as f64 - center + 0.5) * inverse)).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: f64| {
            let weight = if sum == 0.0 { weight } else { weight / sum };
            (weight * f64::from(1 << PRECISION) + 0.5_f64.copysign(weight)) as i32
        };
        Window { start, weights: weights.into_iter().map(fixed).collect() }
    };
    (0..output).map(window).collect()
}

/// Rounds and cuts a sum to 8 bits.
fn clip(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (PRECISION - 1);

fn resize_rows(image: &RgbImage, width: usize, filter: Filter) -> RgbImage {
    let windows = windows(image.width as usize, width, filter);
    let mut pixels = Vec::with_capacity(width * image.height as usize * 3);
    for y in 0..image.height as usize {
        let row = image.row(y);
        for window in &windows {
            let mut sums = [HALF; 3];
            let (inputs, _) = row[window.start * 3..].as_chunks::<3>();
            for (input, &weight) in inputs.iter().zip(&window.weights) {
                for (sum, &value) in sums.iter_mut().zip(input) {
                    *sum = sum.wrapping_add(i32::from(value).wrapping_mul(weight));
                }
            }
            pixels.extend(sums.map(clip));
        }
    }
    RgbImage { width: width as u32, height: image.height, pixels }
}

fn resize_columns(image: &RgbImage, height: usize, filter: Filter) -> RgbImage {
    let windows = windows(image.height as usize, height, filter);
    let stride = image.width as usize * 3;
    let mut pixels = Vec::with_capacity(height * stride);
    let mut sums = vec![HALF; stride];
    for window in &windows {
        sums.fill(HALF);
        for (y, &weight) in (window.start..).zip(&window.weights) {
            for (sum, &value) in sums.iter_mut().zip(image.row(y)) {
                *sum = sum.wrapping_add(i32::from(value).wrapping_mul(weight));
            }
        }
        pixels.extend(sums.iter().map(|&sum| clip(sum)));
    }
    RgbImage { width: image.width, height: height as u32, pixels }
}

/// The input of each output along one axis. The positions are added up, as Pillow does, and not multiplied.
fn nearest(input: usize, output: usize) -> Vec<usize> {
    let step = input as f64 / output as f64;
    let mut position = step * 0.5;
    let mut next = || {
        let at = position as usize;
        position += step;
        at.min(input - 1)
    };
    (0..output).map(|_| next()).collect()
}

fn resize_nearest(image: &RgbImage, (height, width): (usize, usize)) -> RgbImage {
    let columns = nearest(image.width as usize, width);
    let mut pixels = Vec::with_capacity(height * width * 3);
    for y in nearest(image.height as usize, height) {
        let row = image.row(y);
        pixels.extend(columns.iter().flat_map(|&x| &row[x * 3..][..3]));
    }
    RgbImage { width: width as u32, height: height as u32, pixels }
}

/// Refuses images that are too large to be made on the way.
pub(crate) fn check_pixels(height: usize, width: usize) -> Result<(), ImageError> {
    let (height, width, max_pixels) = (height as u64, width as u64, MAX_PIXELS);
    if height.saturating_mul(width) > max_pixels {
        return Err(ImageError::TooManyPixels { what: "an intermediate image", width, height, max_pixels });
    }
    Ok(())
}

/// Images that are at least so much taller than wide are made lower first, and only then narrower or wider.
const TALL: usize = 100;

/// The image in another size, `(height, width)` in pixels, as `Image.resize` of Pillow 12.3 makes it.
///
/// # Errors
/// [`ImageError::Unfit`] for a side of 0; [`ImageError::TooManyPixels`] where the result, or what lies between the passes, has
/// more than 2^26 pixels.
pub fn resize(image: &RgbImage, (height, width): (usize, usize), filter: Filter) -> Result<RgbImage, ImageError> {
    if height == 0 || width == 0 {
        let reason = format!("it would become {width} x {height}");
        return Err(ImageError::Unfit { width: image.width, height: image.height, reason });
    }
    check_pixels(height, width)?;
    if image.size() == (height, width) {
        return Ok(image.clone());
    }
    if filter == Filter::Nearest {
        return Ok(resize_nearest(image, (height, width)));
    }
    let (old_height, old_width) = image.size();
    if width == old_width {
        return Ok(resize_columns(image, height, filter));
    }
    if height == old_height {
        return Ok(resize_rows(image, width, filter));
    }
    if old_height > old_width * TALL && height < old_height {
        return Ok(resize_rows(&resize_columns(image, height, filter), width, filter));
    }
    check_pixels(old_height, width)?;
    Ok(resize_columns(&resize_rows(image, width, filter), height, filter))
}
