//! From bytes to pixels, with Pillow's `convert("RGB")` behind.

use std::{
    any::Any,
    fmt::Display,
    io::Cursor,
    num::NonZeroU64,
    panic::{AssertUnwindSafe, catch_unwind},
};

use image::{
    ColorType, ImageDecoder, ImageFormat,
    codecs::{bmp::BmpDecoder, png::PngDecoder},
};

use crate::{
    ImageError, RgbImage, jpeg,
    orientation::{orientation, upright},
};

/// What an image may take. It is checked before pixels are decoded. While it is decoded an image takes up to 15 bytes a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the file.
    pub max_bytes: usize,
    /// Width times height.
    pub max_pixels: u64,
}

impl Default for Limits {
    /// 32 MiB and 64 million pixels.
    fn default() -> Self {
        Self { max_bytes: 32 << 20, max_pixels: 64_000_000 }
    }
}

impl Limits {
    pub(crate) fn check(&self, width: u32, height: u32) -> Result<(), ImageError> {
        let (width, height, max_pixels) = (width.into(), height.into(), self.max_pixels);
        if width * height > max_pixels {
            return Err(ImageError::TooManyPixels { what: "an image", width, height, max_pixels });
        }
        Ok(())
    }

    /// Bytes that a decoder may take for metadata and its own buffers.
    fn decoder_bytes(&self) -> u64 {
        self.max_pixels.saturating_mul(8).max(1 << 20)
    }
}

type Decoder = fn(&[u8], &Limits) -> Result<RgbImage, ImageError>;

/// The pixels of a PNG, JPEG, WebP, GIF or BMP file, of an animation its first frame, turned upright.
///
/// They are what Pillow has after `ImageOps.exif_transpose` and `convert("RGB")`: alpha is dropped, not blended; of 16 bits the
/// upper eight stay, but grey of 16 bits is cut at 255.
///
/// # Errors
/// For files over the limits, of other formats, or broken.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let Limits { max_bytes, .. } = *limits;
    if bytes.len() > max_bytes {
        return Err(ImageError::TooManyBytes { bytes: bytes.len(), max_bytes });
    }
    let unknown = || ImageError::UnknownFormat { begin: bytes[..bytes.len().min(8)].to_vec() };
    let (name, decoder): (_, Decoder) = match image::guess_format(bytes) {
        Ok(ImageFormat::Png) => ("PNG", decode_png),
        Ok(ImageFormat::Jpeg) => ("JPEG", jpeg::decode),
        Ok(ImageFormat::WebP) => ("WebP", decode_webp),
        Ok(ImageFormat::Gif) => ("GIF", decode_gif),
        Ok(ImageFormat::Bmp) => ("BMP", decode_bmp),
        _ => return Err(unknown()),
    };
    // libjpeg's errors unwind by design; with the others it is the last resort.
    catch_unwind(AssertUnwindSafe(|| decoder(bytes, limits)))
        .unwrap_or_else(|panic| Err(malformed(name, panic_text(panic.as_ref()))))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the decoder failed")
}

#[allow(clippy::needless_pass_by_value, reason = "errors are made to be given away")]
pub(crate) fn malformed(format: &'static str, reason: impl Display) -> ImageError {
    ImageError::Malformed { format, reason: reason.to_string() }
}

fn decode_png(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    // An IHDR is the first chunk, or there is no image.
    let side = |at: usize| bytes.get(at..at + 4).map_or(0, |side| u32::from_be_bytes([side[0], side[1], side[2], side[3]]));
    limits.check(side(16), side(20))?;
    let mut decoder_limits = image::Limits::no_limits();
    decoder_limits.max_alloc = Some(limits.decoder_bytes());
    let mut decoder = PngDecoder::with_limits(Cursor::new(bytes), decoder_limits).map_err(|error| malformed("PNG", error))?;
    let exif = decoder.exif_metadata().ok().flatten();
    // XMP that is no text says nothing.
    let xmp = decoder.xmp_metadata().ok().flatten();
    // Depth and colour type of the IHDR. The decoder adds an alpha channel where one grey is transparent.
    let grey16 = bytes.get(24..26) == Some(&[16, 0]);
    let image = read(decoder, "PNG", limits, grey16)?;
    Ok(upright(image, orientation(exif.as_deref(), xmp.as_deref())))
}

/// Checks the sizes of all frames in a row of RIFF chunks. The decoder compares them with the canvas only when it has memory for
/// them.
fn check_frames(mut chunks: &[u8], inside_frame: bool, limits: &Limits) -> Result<(), ImageError> {
    while let Some((header, rest)) = chunks.split_first_chunk::<8>() {
        let [a, b, c, d, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        let data = &rest[..length.min(rest.len())];
        match (&[a, b, c, d], data) {
            (b"VP8 ", [_, _, _, _, _, _, w0, w1, h0, h1, ..]) => {
                let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
                limits.check(side(*w0, *w1), side(*h0, *h1))?;
            }
            (b"VP8L", [_, b0, b1, b2, b3, ..]) => {
                let bits = u32::from_le_bytes([*b0, *b1, *b2, *b3]);
                limits.check((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)?;
            }
            (b"ANMF", data) if !inside_frame => check_frames(data.get(16..).unwrap_or_default(), true, limits)?,
            _ => {}
        }
        chunks = rest.get(length.saturating_add(length & 1)..).unwrap_or_default();
    }
    Ok(())
}

fn decode_webp(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let failed = |error| malformed("WebP", error);
    check_frames(bytes.get(12..).unwrap_or_default(), false, limits)?;
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).map_err(failed)?;
    let (width, height) = decoder.dimensions();
    limits.check(width, height)?;
    // A chunk may say that it is longer than the file.
    decoder.set_memory_limit(bytes.len());
    let exif = decoder.exif_metadata().ok().flatten();
    let xmp = decoder.xmp_metadata().ok().flatten();
    let size = decoder.output_buffer_size().ok_or_else(|| malformed("WebP", "it is too large"))?;
    let color = if decoder.has_alpha() { ColorType::Rgba8 } else { ColorType::Rgb8 };
    let mut values = vec![0; size];
    decoder.read_image(&mut values).map_err(failed)?;
    let pixels = rgb(values, color, false).unwrap_or_default();
    Ok(upright(RgbImage::new(width, height, pixels)?, orientation(exif.as_deref(), xmp.as_deref())))
}

fn decode_bmp(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let decoder = BmpDecoder::new(Cursor::new(bytes)).map_err(|error| malformed("BMP", error))?;
    read(decoder, "BMP", limits, false)
}

/// All pixels. `grey16`: the file has grey of 16 bits, perhaps with a transparent one.
fn read(decoder: impl ImageDecoder, format: &'static str, limits: &Limits, grey16: bool) -> Result<RgbImage, ImageError> {
    let (width, height) = decoder.dimensions();
    limits.check(width, height)?;
    let color = decoder.color_type();
    let total = usize::try_from(decoder.total_bytes()).map_err(|error| malformed(format, error))?;
    let mut values = vec![0; total];
    decoder.read_image(&mut values).map_err(|error| malformed(format, error))?;
    RgbImage::new(width, height, rgb(values, color, grey16).ok_or_else(|| malformed(format, format!("{color:?} is not known")))?)
}

/// Pillow's `convert("RGB")`. `None` for colours that no decoder here makes.
fn rgb(values: Vec<u8>, color: ColorType, grey16: bool) -> Option<Vec<u8>> {
    let high = |sample: &[u8]| u16::from_ne_bytes([sample[0], sample[1]]).to_be_bytes()[0];
    let clipped = |sample: &[u8]| u16::from_ne_bytes([sample[0], sample[1]]).min(255) as u8;
    let thrice = |value: u8| [value; 3];
    Some(match color {
        ColorType::Rgb8 => values,
        ColorType::L8 => values.iter().flat_map(|&value| thrice(value)).collect(),
        ColorType::La8 => values.chunks_exact(2).flat_map(|pixel| thrice(pixel[0])).collect(),
        ColorType::Rgba8 => values.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        ColorType::L16 | ColorType::La16 if grey16 => {
            values.chunks_exact(color.bytes_per_pixel().into()).flat_map(|pixel| thrice(clipped(pixel))).collect()
        }
        ColorType::La16 => values.chunks_exact(4).flat_map(|pixel| thrice(high(pixel))).collect(),
        ColorType::Rgb16 | ColorType::Rgba16 => values
            .chunks_exact(color.bytes_per_pixel().into())
            .flat_map(|pixel| [high(pixel), high(&pixel[2..]), high(&pixel[4..])])
            .collect(),
        _ => return None,
    })
}

/// The first frame on its canvas. A transparent pixel has the colour of its palette entry, as in Pillow.
fn decode_gif(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let failed = |error: gif::DecodingError| malformed("GIF", error);
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::Indexed);
    options.set_memory_limit(gif::MemoryLimit::Bytes(NonZeroU64::new(limits.decoder_bytes()).unwrap_or(NonZeroU64::MIN)));
    let mut decoder = options.read_info(bytes).map_err(failed)?;
    let canvas = (u32::from(decoder.width()), u32::from(decoder.height()));
    limits.check(canvas.0, canvas.1)?;
    let global = decoder.global_palette().map(<[u8]>::to_vec);
    let no_frame = || malformed("GIF", "it has no frame");
    let frame = decoder.next_frame_info().map_err(failed)?.ok_or_else(no_frame)?;
    // Pillow's canvas grows with the frame.
    let width = canvas.0.max(u32::from(frame.left) + u32::from(frame.width));
    let height = canvas.1.max(u32::from(frame.top) + u32::from(frame.height));
    limits.check(width, height)?;
    let frame = frame.clone();
    let mut indices = vec![0; usize::from(frame.width) * usize::from(frame.height)];
    decoder.read_into_buffer(&mut indices).map_err(failed)?;
    let palette = frame.palette.as_deref().or(global.as_deref());
    let color = |index: u8| match palette {
        Some(palette) => {
            palette.get(usize::from(index) * 3..).and_then(|rest| rest.first_chunk::<3>()).copied().unwrap_or_default()
        }
        None => [index; 3],
    };
    let mut image = RgbImage::filled((height as usize, width as usize), color(frame.transparent.unwrap_or(0)));
    let pixels = indices.iter().flat_map(|&index| color(index)).collect();
    let frame_image = RgbImage::new(frame.width.into(), frame.height.into(), pixels)?;
    image.paste(&frame_image, (frame.top.into(), frame.left.into()));
    Ok(image)
}
