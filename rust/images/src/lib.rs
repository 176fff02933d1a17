//! From the bytes of an image to the values that a vision encoder takes.
//!
//! [`decode`] makes pixels of a file, [`Processor`] makes tiles of pixels, as a model's `preprocessor_config.json` says. Both
//! copy Pillow and the image processors of Transformers 5.23, which most vision-language models were trained behind.
#![forbid(unsafe_code)]

mod config;
mod decode;
mod jpeg;
mod of_sounds;
mod orientation;
mod phi4;
mod process;
mod resize;
mod sizes;
mod tiling;
mod video;

use std::{io, path::PathBuf};

pub use config::{Processor, ProcessorKind, Size};
pub use decode::{Limits, decode};
pub use process::{Processed, Tile};
pub use resize::{Filter, resize};
pub use tiling::{Canvas, PanAndScan, Tiling};
pub use video::{VideoProcessor, VideoRules};

/// Why there is no image, or no processor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file is larger than [`Limits::max_bytes`].
    #[error("the image file has {bytes} bytes, more than the {max_bytes} that are allowed")]
    TooManyBytes {
        /// What the file has.
        bytes: usize,
        /// What is allowed.
        max_bytes: usize,
    },
    /// The image has more pixels than [`Limits::max_pixels`], or would have while it is processed.
    #[error("{what} of {width} x {height} pixels has more than the {max_pixels} that are allowed")]
    TooManyPixels {
        /// "an image", or a stage of its processing.
        what: &'static str,
        /// In pixels.
        width: u64,
        /// In pixels.
        height: u64,
        /// What is allowed.
        max_pixels: u64,
    },
    /// The bytes are of no known format.
    #[error("the image is no PNG, JPEG, WebP, GIF or BMP file; it begins with {begin:02x?}")]
    UnknownFormat {
        /// The first bytes, at most eight.
        begin: Vec<u8>,
    },
    /// The file breaks its format.
    #[error("the {format} file cannot be decoded: {reason}")]
    Malformed {
        /// "PNG" and so on.
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// Width, height and the number of pixel values do not go together.
    #[error("{values} values are not an RGB image of {width} x {height} pixels")]
    Shape {
        /// In pixels.
        width: u32,
        /// In pixels.
        height: u32,
        /// What there is; `3 * width * height` would fit.
        values: usize,
    },
    /// This processor makes nothing of an image of this shape.
    #[error("an image of {width} x {height} pixels cannot be processed: {reason}")]
    Unfit {
        /// In pixels.
        width: u32,
        /// In pixels.
        height: u32,
        /// Why not, and what would do.
        reason: String,
    },
    /// A processor's file says what this crate does not do.
    #[error("{what}: {reason}")]
    Config {
        /// The file.
        what: String,
        /// The key, and what would do.
        reason: String,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// An image: `[height, width, 3]` values of 8 bits, red first, the top row first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbImage {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl RgbImage {
    /// Of `3 * width * height` values.
    ///
    /// # Errors
    /// [`ImageError::Shape`] for another number of values, or none.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self, ImageError> {
        let values = u64::from(width) * u64::from(height);
        if values == 0 || values.checked_mul(3) != u64::try_from(pixels.len()).ok() {
            return Err(ImageError::Shape { width, height, values: pixels.len() });
        }
        Ok(Self { width, height, pixels })
    }

    /// In pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// In pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// `[height, width, 3]`.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// `[width, 3]` values of row `y`.
    pub(crate) fn row(&self, y: usize) -> &[u8] {
        let stride = self.width as usize * 3;
        &self.pixels[y * stride..][..stride]
    }

    /// Both in pixels, the height first.
    pub fn size(&self) -> (usize, usize) {
        (self.height as usize, self.width as usize)
    }

    /// An image of one colour. Its sides have been checked.
    pub(crate) fn filled((height, width): (usize, usize), value: [u8; 3]) -> Self {
        Self { width: width as u32, height: height as u32, pixels: value.repeat(width * height) }
    }

    /// The part from `top` and `left` on, of a size that lies inside.
    pub(crate) fn crop(&self, (top, left): (usize, usize), (height, width): (usize, usize)) -> Self {
        let rows = (top..top + height).flat_map(|y| &self.row(y)[left * 3..][..width * 3]);
        Self { width: width as u32, height: height as u32, pixels: rows.copied().collect() }
    }

    /// Lays `other` over this image, its upper left corner at `top` and `left`; it lies inside.
    pub(crate) fn paste(&mut self, other: &Self, (top, left): (usize, usize)) {
        let stride = self.width as usize * 3;
        for y in 0..other.height as usize {
            let row = other.row(y);
            self.pixels[(top + y) * stride + left * 3..][..row.len()].copy_from_slice(row);
        }
    }

    /// Rows become columns.
    pub(crate) fn transposed(&self) -> Self {
        let (height, width) = self.size();
        let mut pixels = Vec::with_capacity(self.pixels.len());
        for x in 0..width {
            for y in 0..height {
                pixels.extend_from_slice(&self.pixels[(y * width + x) * 3..][..3]);
            }
        }
        Self { width: self.height, height: self.width, pixels }
    }

    /// The left column becomes the right one.
    pub(crate) fn mirrored(mut self) -> Self {
        let stride = self.width as usize * 3;
        for row in self.pixels.chunks_exact_mut(stride) {
            let (mut left, mut right) = (0, stride - 3);
            while left < right {
                for channel in 0..3 {
                    row.swap(left + channel, right + channel);
                }
                left += 3;
                right -= 3;
            }
        }
        self
    }

    /// The top row becomes the bottom one.
    pub(crate) fn flipped(self) -> Self {
        let pixels = self.pixels.chunks_exact(self.width as usize * 3).rev().flatten().copied().collect();
        Self { pixels, ..self }
    }
}
