//! Images from Python: pixels, files, and addresses.

use std::sync::Arc;

use engine::images::{self, Limits, decode};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyType},
};
use server::media::{Media, MediaError};

use crate::{
    arguments::{Integer, Text, text, within},
    exceptions::invalid,
    source::{self, Readable, value_methods},
};

/// An image as models get it: `[height, width, 3]` values of 8 bits, red first, the top row first.
///
/// `source` is a PIL image; a numpy array of uint8, `[height, width]`, `[height, width, 3]` or `[height, width, 4]`, whose alpha
/// is dropped; the bytes of a PNG, JPEG, WebP, GIF or BMP file; a path; or a `data:`, `file:`, `http:` or `https:` URL.
/// `allowed_media_domains`: hosts that URLs may name; none unless given.
///
/// It stands in messages as `{"type": "image", "image": ...}`, is equal to one of equal pixels, and can be copied and pickled.
///
/// Raises `ValueError` for what is no image, is over the limits (32 MiB a file, 64 million pixels) or may not be fetched,
/// `TypeError` for another kind of `source`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct RgbImage {
    image: Arc<images::RgbImage>,
}

/// What an image is made of.
pub type Source = source::Source<images::RgbImage>;

impl Readable for images::RgbImage {
    type Beside = ();

    fn max_bytes() -> usize {
        Limits::default().max_bytes
    }

    fn decode(bytes: Vec<u8>, (): ()) -> Result<Self, String> {
        decode(&bytes, &Limits::default()).map_err(|why| why.to_string())
    }

    fn fetch(media: &Media, url: &str, (): ()) -> Result<Self, String> {
        media.image(url, &Limits::default()).map_err(|why| why.to_string())
    }
}

/// The pixels of an image at most, as for files.
fn check_pixels(place: &str, width: u64, height: u64) -> PyResult<(u32, u32)> {
    let max_pixels = Limits::default().max_pixels;
    let is_fine = (1..=max_pixels).contains(&width.saturating_mul(height));
    match (u32::try_from(width), u32::try_from(height)) {
        (Ok(width), Ok(height)) if is_fine => Ok((width, height)),
        _ => Err(invalid(format!("`{place}` has {width} x {height} pixels; it must have 1 to {max_pixels}"))),
    }
}

/// What `object` is; errors name it as `place`.
pub fn source(place: &str, object: &Bound<'_, PyAny>) -> PyResult<Source> {
    if let Ok(image) = object.cast::<RgbImage>() {
        return Ok(Source::Whole(Arc::clone(&image.get().image)));
    }
    if let Some(source) = source::of_file(place, object)? {
        return Ok(source);
    }
    if object.hasattr("getexif")? && object.hasattr("convert")? {
        return pillow(place, object);
    }
    if object.hasattr("__array_interface__")? && object.hasattr("dtype")? {
        return array(place, object);
    }
    let kind = object.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "`{place}` must be a PIL image, a numpy array, a path, a URL or the bytes of a file, got {kind}"
    )))
}

/// An image of Pillow, turned upright as the decoder turns files.
fn pillow(place: &str, image: &Bound<'_, PyAny>) -> PyResult<Source> {
    let (width, height): (u64, u64) = image.getattr("size")?.extract()?;
    check_pixels(place, width, height)?;
    let upright = image.py().import("PIL.ImageOps")?.call_method1("exif_transpose", (image,))?;
    let rgb = upright.call_method1("convert", ("RGB",))?;
    let (width, height): (u32, u32) = rgb.getattr("size")?.extract()?;
    let pixels = rgb.call_method0("tobytes")?.cast::<PyBytes>()?.as_bytes().to_vec();
    Ok(of_pixels(width, height, pixels))
}

/// An array of numpy, or one that is like it.
fn array(place: &str, array: &Bound<'_, PyAny>) -> PyResult<Source> {
    let dtype = array.getattr("dtype")?.str()?.to_string();
    let shape: Vec<u64> = array.getattr("shape")?.extract()?;
    let (height, width, channels) = match shape[..] {
        [height, width] => (height, width, 1),
        [height, width, channels @ (3 | 4)] => (height, width, channels),
        _ => {
            return Err(invalid(format!("`{place}` is an array of shape {shape:?}; it must be [h, w], [h, w, 3] or [h, w, 4]")));
        }
    };
    if dtype != "uint8" {
        return Err(invalid(format!("`{place}` is an array of {dtype}; it must be uint8, 0 to 255")));
    }
    let (width, height) = check_pixels(place, width, height)?;
    let values = array.call_method0("tobytes")?;
    let values = values.cast::<PyBytes>()?.as_bytes();
    let pixels = match channels {
        1 => values.iter().flat_map(|&grey| [grey; 3]).collect(),
        4 => values.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        _ => values.to_vec(),
    };
    Ok(of_pixels(width, height, pixels))
}

fn of_pixels(width: u32, height: u32, pixels: Vec<u8>) -> Source {
    Source::Values(Box::new(move || images::RgbImage::new(width, height, pixels).map_err(|why| why.to_string())))
}

/// What may be fetched for a caller; `domains` is `allowed_media_domains`.
pub fn media(domains: Option<&[Text]>) -> PyResult<Arc<Media>> {
    let domains: Vec<String> = domains.unwrap_or_default().iter().map(|Text(text)| text.clone()).collect();
    Media::of_caller(&domains).map(Arc::new).map_err(|MediaError(why)| invalid(why))
}

#[pymethods]
#[allow(clippy::needless_pass_by_value, reason = "arguments come from Python as values")]
impl RgbImage {
    #[new]
    #[pyo3(signature = (source, *, allowed_media_domains=None))]
    fn new(
        source: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text::allowed_media_domains)] allowed_media_domains: Option<Vec<Text>>,
    ) -> PyResult<Self> {
        let media = media(allowed_media_domains.as_deref())?;
        Ok(Self { image: self::source("source", source)?.read(source.py(), "source", &media)? })
    }

    /// An image of `[height, width, 3]` values as bytes.
    #[staticmethod]
    fn frombytes(width: Integer, height: Integer, pixels: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let side = |name, value: &Integer| within(name, value, 1, u32::MAX as usize).map(|side| side as u64);
        let (width, height) = check_pixels("pixels", side("width", &width)?, side("height", &height)?)?;
        let image = images::RgbImage::new(width, height, pixels.as_bytes().to_vec());
        image.map(|image| Self { image: Arc::new(image) }).map_err(|why| invalid(format!("`pixels`: {why}")))
    }

    /// In pixels.
    #[getter]
    fn width(&self) -> u32 {
        self.image.width()
    }

    /// In pixels.
    #[getter]
    fn height(&self) -> u32 {
        self.image.height()
    }

    /// The `[height, width, 3]` values.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.image.pixels())
    }

    fn __repr__(&self) -> String {
        format!("RgbImage(width={}, height={})", self.image.width(), self.image.height())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let (py, image) = (slf.py(), slf.get());
        let arguments = ("frombytes", image.width(), image.height(), image.tobytes(py));
        Ok((py.import("operator")?.getattr("methodcaller")?.call1(arguments)?, (py.get_type::<Self>(),)))
    }
}

value_methods!(RgbImage, image);

impl From<Arc<images::RgbImage>> for RgbImage {
    fn from(image: Arc<images::RgbImage>) -> Self {
        Self { image }
    }
}
