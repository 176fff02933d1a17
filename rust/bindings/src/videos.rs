//! Videos from Python: files, addresses, and frames.

use std::sync::Arc;

use engine::{
    images,
    video::{self, Limits},
};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{IntoPyDict, PyBytes, PyDict, PyList, PyTuple, PyType},
};
use server::media::Media;

use crate::{
    arguments::{Real, Text, named, text},
    exceptions::invalid,
    images::{RgbImage, media},
    source::{self, Readable, value_methods},
};

/// A video as models get it: which of its frames are taken, and in what size, is the model's choice.
///
/// `source` is the bytes of a file (MP4, QuickTime, Matroska, WebM, AVI, MPEG, Ogg, FLV, ASF or animated GIF); a path; a `data:`,
/// `file:`, `http:` or `https:` URL; a list of frames, each of which is all that an `RgbImage` is made of but an address; or a
/// numpy array of uint8, `[frames, height, width, 3]`. All but GIF, lists and arrays need the programs ffmpeg and ffprobe.
/// `fps`: of a file, how many frames a second are taken, the model's own number unless given; of frames that are given, how many
/// there are a second, 2 unless given. `allowed_media_domains`: hosts that URLs may name; none unless given.
///
/// It stands in messages as `{"type": "video", "video": ...}`, is equal to one of equal bytes or frames, and can be copied and
/// pickled. A file is looked at here, and its frames are decoded for each request.
///
/// Raises `ValueError` for what is no video, is over the limits (64 MiB a file, 36 million pixels a frame), cannot be decoded
/// because a program is missing, or may not be fetched, `TypeError` for another kind of `source`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct Video {
    video: Arc<video::Video>,
}

/// What a video is made of.
pub struct Source {
    source: source::Source<video::Video>,
    fps: Option<f64>,
}

impl Source {
    /// As [`source::Source::read`].
    pub fn read(self, py: Python<'_>, place: &str, media: &Arc<Media>) -> PyResult<Arc<video::Video>> {
        self.source.read_beside(py, place, media, self.fps)
    }
}

impl Readable for video::Video {
    type Beside = Option<f64>;

    fn max_bytes() -> usize {
        Limits::default().max_bytes
    }

    fn decode(bytes: Vec<u8>, fps: Option<f64>) -> Result<Self, String> {
        Self::of_file(bytes, fps, &Limits::default()).map_err(|why| why.to_string())
    }

    fn fetch(media: &Media, url: &str, fps: Option<f64>) -> Result<Self, String> {
        media.video(url, fps, &Limits::default()).map_err(|why| why.to_string())
    }
}

/// The `fps` of a part, or of the object within it that has a URL.
pub fn fps(dict: &Bound<'_, PyDict>) -> PyResult<Option<f64>> {
    let given = dict.get_item("fps")?.filter(|fps| !fps.is_none());
    given.map(|fps| named::<Real>("fps", &fps).and_then(|Real(fps)| checked(fps))).transpose()
}

fn checked(fps: f64) -> PyResult<f64> {
    if fps > 0.0 && fps <= 1000.0 {
        Ok(fps)
    } else {
        Err(invalid(format!("`fps` is {fps}; it must be over 0 and not over 1000")))
    }
}

/// What `object` is; errors name it as `place`.
pub fn source(place: &str, object: &Bound<'_, PyAny>, fps: Option<f64>) -> PyResult<Source> {
    if let Ok(video) = object.cast::<Video>() {
        if fps.is_some() {
            return Err(invalid(format!("`{place}` is a Video beside an 'fps': give it to the Video")));
        }
        return Ok(Source { source: source::Source::Whole(Arc::clone(&video.get().video)), fps });
    }
    if let Some(source) = source::of_file(place, object)? {
        return Ok(Source { source, fps });
    }
    let frames: Vec<Bound<'_, PyAny>> = if object.hasattr("__array_interface__")? && object.hasattr("dtype")? {
        let shape: Vec<u64> = object.getattr("shape")?.extract()?;
        if shape.len() != 4 {
            return Err(invalid(format!("`{place}` is an array of shape {shape:?}; it must be [frames, height, width, 3]")));
        }
        object.try_iter()?.collect::<PyResult<_>>()?
    } else if let Ok(list) = object.cast::<PyList>() {
        list.iter().collect()
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        tuple.iter().collect()
    } else {
        let kind = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "`{place}` must be a path, a URL, the bytes of a file, a list of frames or a numpy array, got {kind}"
        )));
    };
    // Frames reach no address.
    let (nowhere, py) = (media(None)?, object.py());
    let mut images = Vec::with_capacity(frames.len());
    let mut left = Limits::default().max_kept_pixels;
    for (number, frame) in frames.iter().enumerate() {
        let place = format!("{place}[{number}]");
        let image = crate::images::source(&place, frame)?.read(py, &place, &nowhere)?;
        let pixels = image.pixels().len() as u64 / 3;
        left = left.checked_sub(pixels).ok_or_else(|| {
            invalid(format!("`{place}`: frames may have {} pixels together", Limits::default().max_kept_pixels))
        })?;
        images.push(images::RgbImage::clone(&image));
    }
    let make = move || video::Video::of_frames(images, fps, &Limits::default()).map_err(|why| why.to_string());
    Ok(Source { source: source::Source::Values(Box::new(make)), fps })
}

#[pymethods]
#[allow(clippy::needless_pass_by_value, reason = "arguments come from Python as values")]
impl Video {
    #[new]
    #[pyo3(signature = (source, *, fps=None, allowed_media_domains=None))]
    fn new(
        source: &Bound<'_, PyAny>,
        fps: Option<Real>,
        #[pyo3(from_py_with = text::allowed_media_domains)] allowed_media_domains: Option<Vec<Text>>,
    ) -> PyResult<Self> {
        let media = media(allowed_media_domains.as_deref())?;
        let fps = fps.map(|Real(fps)| checked(fps)).transpose()?;
        Ok(Self { video: self::source("source", source, fps)?.read(source.py(), "source", &media)? })
    }

    /// How many frames there are.
    #[getter]
    fn num_frames(&self) -> usize {
        self.video.num_frames()
    }

    /// How many frames there are a second.
    #[getter]
    fn fps(&self) -> f64 {
        self.video.fps()
    }

    /// Of a frame, in pixels.
    #[getter]
    fn width(&self) -> usize {
        self.video.size().1
    }

    /// Of a frame, in pixels.
    #[getter]
    fn height(&self) -> usize {
        self.video.size().0
    }

    fn __repr__(&self) -> String {
        let (height, width) = self.video.size();
        let (num_frames, fps) = (self.video.num_frames(), self.video.fps());
        format!("Video(num_frames={num_frames}, fps={fps:.3}, width={width}, height={height})")
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyAny>,))> {
        let (py, video) = (slf.py(), &slf.get().video);
        let source = if let Some(bytes) = video.file() {
            PyBytes::new(py, bytes).into_any()
        } else {
            let frames = video.given().unwrap_or_default().iter();
            let frames = frames.map(|frame| Py::new(py, RgbImage::from(Arc::new(frame.clone()))));
            PyList::new(py, frames.collect::<PyResult<Vec<_>>>()?)?.into_any()
        };
        let fps = if video.given().is_some() { Some(video.fps()) } else { video.wanted_fps() };
        let class: Bound<'py, PyType> = py.get_type::<Self>();
        let make = py.import("functools")?.getattr("partial")?.call((class,), Some(&[("fps", fps)].into_py_dict(py)?))?;
        Ok((make, (source,)))
    }
}

value_methods!(Video, video);

impl From<Arc<video::Video>> for Video {
    fn from(video: Arc<video::Video>) -> Self {
        Self { video }
    }
}
