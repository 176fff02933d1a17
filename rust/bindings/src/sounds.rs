//! Sounds from Python: samples, files, and addresses.

use std::sync::Arc;

use engine::audio::{self, Limits, RATES, decode};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyType},
};
use server::media::Media;

use crate::{
    arguments::{Integer, Text, text, within},
    exceptions::invalid,
    images::media,
    source::{self, Readable, value_methods},
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
pub type Source = source::Source<audio::Sound>;

impl Readable for audio::Sound {
    type Beside = ();

    fn max_bytes() -> usize {
        Limits::default().max_bytes
    }

    fn decode(bytes: Vec<u8>, (): ()) -> Result<Self, String> {
        decode(&bytes, &Limits::default()).map_err(|why| why.to_string())
    }

    fn fetch(media: &Media, url: &str, (): ()) -> Result<Self, String> {
        media.sound(url, &Limits::default()).map_err(|why| why.to_string())
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
        return Ok(Source::Whole(Arc::clone(&sound.get().sound)));
    }
    if let Some(source) = source::of_file(place, object)? {
        return Ok(source);
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
    let samples = samples(values.cast::<PyBytes>()?.as_bytes());
    Ok(Source::Values(Box::new(move || audio::Sound::new(rate, samples).map_err(|why| why.to_string()))))
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
        Ok(Self { sound: self::source("source", source, rate.as_ref())?.read(source.py(), "source", &media)? })
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

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let (py, sound) = (slf.py(), slf.get());
        let arguments = ("frombytes", sound.rate(), sound.tobytes(py));
        Ok((py.import("operator")?.getattr("methodcaller")?.call1(arguments)?, (py.get_type::<Self>(),)))
    }
}

value_methods!(Sound, sound);

impl From<Arc<audio::Sound>> for Sound {
    fn from(sound: Arc<audio::Sound>) -> Self {
        Self { sound }
    }
}
