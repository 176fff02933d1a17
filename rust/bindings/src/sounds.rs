//! Sounds from Python: samples, files, and addresses.

use std::{path::PathBuf, sync::Arc};

use engine::{
    EngineError,
    audio::{self, Limits, RATES, decode},
};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyByteArray, PyBytes, PyString, PyType},
};
use server::media::{Media, read_file};

use crate::{
    arguments::{Integer, Text, named, text, within},
    detach::enter_long,
    exceptions::invalid,
    images::{LONG, has_scheme, media},
};

/// A sound of one channel, as models get it before they bring it to their own rate.
///
/// `source` is a numpy array of float32 or float64 samples from -1 to 1, `[samples]`, with `rate` of them a second; the bytes of
/// a WAV, FLAC, MP3 or Ogg Vorbis file, whose channels become their mean; a path; or a `data:`, `file:`, `http:` or `https:` URL.
/// `allowed_media_domains`: hosts that URLs may name; none unless given.
///
/// It stands in messages as `{"type": "audio", "audio": ...}`, is equal to one of equal samples, and can be copied and pickled.
///
/// Raises `ValueError` for what is no sound, is over the limits (64 MiB a file, 40 minutes, 115 million samples) or may not be
/// fetched, `TypeError` for another kind of `source`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct Sound {
    sound: Arc<audio::Sound>,
}

/// What a sound is made of.
pub enum Source {
    Url(String),
    Path(PathBuf),
    File(Vec<u8>),
    Samples(u32, Vec<f32>),
    Sound(Arc<audio::Sound>),
}

impl Source {
    /// Reads, fetches and decodes without holding the interpreter; `place` is what errors name.
    pub fn sound(self, py: Python<'_>, place: &str, media: &Arc<Media>) -> PyResult<Arc<audio::Sound>> {
        if let Self::Sound(sound) = self {
            return Ok(sound);
        }
        let (place, media) = (place.to_owned(), Arc::clone(media));
        let long = match &self {
            Self::File(bytes) => bytes.len(),
            Self::Url(_) | Self::Path(_) => LONG,
            Self::Samples(..) | Self::Sound(_) => 0,
        };
        enter_long(py, long, move || {
            let refused = |why: &dyn std::fmt::Display| EngineError::InvalidArgument(format!("`{place}`: {why}"));
            let limits = Limits::default();
            let sound = match self {
                Self::Url(url) => media.sound(&url, &limits).map_err(|why| refused(&why))?,
                Self::Path(path) => {
                    let bytes = read_file(&path, limits.max_bytes).map_err(|why| refused(&why))?;
                    decode(&bytes, &limits).map_err(|why| refused(&format!("{}: {why}", path.display())))?
                }
                Self::File(bytes) => decode(&bytes, &limits).map_err(|why| refused(&why))?,
                Self::Samples(rate, samples) => audio::Sound::new(rate, samples).map_err(|why| refused(&why))?,
                Self::Sound(sound) => return Ok(sound),
            };
            Ok(Arc::new(sound))
        })
    }
}

/// What `object` is; errors name it as `place`. An array needs `rate`, and nothing else has one.
pub fn source(place: &str, object: &Bound<'_, PyAny>, rate: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    if object.hasattr("__array_interface__")? && object.hasattr("dtype")? {
        return array(place, object, rate);
    }
    if rate.is_some() {
        return Err(invalid(format!("`{place}` stands beside a 'rate', which is that of an array: leave it out")));
    }
    if let Ok(sound) = object.cast::<Sound>() {
        return Ok(Source::Sound(Arc::clone(&sound.get().sound)));
    }
    if object.is_instance_of::<PyString>() {
        let Text(text) = named(place, object)?;
        return Ok(if has_scheme(&text) { Source::Url(text) } else { Source::Path(text.into()) });
    }
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Source::File(bytes.as_bytes().to_vec()));
    }
    if let Ok(bytes) = object.cast::<PyByteArray>() {
        return Ok(Source::File(bytes.to_vec()));
    }
    if object.hasattr("__fspath__")? {
        let path = object.py().import("os")?.call_method1("fspath", (object,))?;
        let Text(path) = named(place, &path)?;
        return Ok(Source::Path(path.into()));
    }
    if object.get_type().name()? == "memoryview" {
        return source(place, &object.call_method0("tobytes")?, None);
    }
    let kind = object.get_type().name()?;
    Err(PyTypeError::new_err(format!("`{place}` must be a numpy array, a path, a URL or the bytes of a file, got {kind}")))
}

/// An array of numpy, or one that is like it.
fn array(place: &str, array: &Bound<'_, PyAny>, rate: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    let rate: Integer =
        rate.ok_or_else(|| invalid(format!("`{place}` is an array: give its 'rate', in samples a second")))?.extract()?;
    let rate = within("rate", &rate, *RATES.start() as usize, *RATES.end() as usize)? as u32;
    let shape: Vec<u64> = array.getattr("shape")?.extract()?;
    match shape[..] {
        [len] => check_len(place, rate, len)?,
        _ => return Err(invalid(format!("`{place}` is an array of shape {shape:?}; it must be [samples], of one channel"))),
    }
    let dtype = array.getattr("dtype")?.str()?.to_string();
    if !matches!(&dtype[..], "float32" | "float64") {
        return Err(invalid(format!("`{place}` is an array of {dtype}; it must be float32, from -1 to 1")));
    }
    let values = array.call_method1("astype", ("<f4",))?.call_method0("tobytes")?;
    Ok(Source::Samples(rate, samples(values.cast::<PyBytes>()?.as_bytes())))
}

/// Whether a sound may have so many samples, `rate` a second.
fn check_len(place: &str, rate: u32, len: u64) -> PyResult<()> {
    let Limits { max_seconds, max_samples, .. } = Limits::default();
    let most = (u64::from(rate) * u64::from(max_seconds)).min(max_samples as u64);
    if len <= most {
        return Ok(());
    }
    Err(invalid(format!("`{place}` has more than {most} samples, {max_seconds} s at a usual rate")))
}

/// Samples of their bytes, the lowest first.
fn samples(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[pymethods]
#[allow(clippy::needless_pass_by_value, reason = "arguments come from Python as values")]
impl Sound {
    #[new]
    #[pyo3(signature = (source, *, rate=None, allowed_media_domains=None))]
    fn new(
        source: &Bound<'_, PyAny>,
        rate: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = text::allowed_media_domains)] allowed_media_domains: Option<Vec<Text>>,
    ) -> PyResult<Self> {
        let media = media(allowed_media_domains.as_deref())?;
        Ok(Self { sound: self::source("source", source, rate.as_ref())?.sound(source.py(), "source", &media)? })
    }

    /// A sound of samples as the bytes of float32, the lowest byte first.
    #[staticmethod]
    fn frombytes(rate: Integer, samples: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let rate = within("rate", &rate, *RATES.start() as usize, *RATES.end() as usize)? as u32;
        if !samples.as_bytes().len().is_multiple_of(4) {
            return Err(invalid(format!("`samples` has {} bytes, and a sample has 4", samples.as_bytes().len())));
        }
        check_len("samples", rate, samples.as_bytes().len() as u64 / 4)?;
        let (py, bytes) = (samples.py(), samples.as_bytes());
        let sound = py.detach(|| audio::Sound::new(rate, self::samples(bytes)));
        sound.map(|sound| Self { sound: Arc::new(sound) }).map_err(|why| invalid(format!("`samples`: {why}")))
    }

    /// Samples a second.
    #[getter]
    fn rate(&self) -> u32 {
        self.sound.rate()
    }

    /// How long it is.
    #[getter]
    fn seconds(&self) -> f64 {
        self.sound.seconds()
    }

    /// The samples as float32, the lowest byte first.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = self.sound.samples().iter().flat_map(|sample| sample.to_le_bytes()).collect();
        PyBytes::new(py, &bytes)
    }

    fn __repr__(&self) -> String {
        format!("Sound(rate={}, seconds={:.3})", self.sound.rate(), self.sound.seconds())
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<Self>() {
            Ok(other) => {
                let (own, other) = (&self.sound, &other.get().sound);
                (Arc::ptr_eq(own, other) || py.detach(|| own == other)).into_py_any(py)
            }
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let (py, sound) = (slf.py(), slf.get());
        let arguments = ("frombytes", sound.rate(), sound.tobytes(py));
        Ok((py.import("operator")?.getattr("methodcaller")?.call1(arguments)?, (py.get_type::<Self>(),)))
    }
}

impl From<Arc<audio::Sound>> for Sound {
    fn from(sound: Arc<audio::Sound>) -> Self {
        Self { sound }
    }
}
