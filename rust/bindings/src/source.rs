//! What an image, a sound or a video is made of: files, addresses, and values.

use std::{path::PathBuf, sync::Arc};

use engine::EngineError;
use pyo3::{
    prelude::*,
    types::{PyByteArray, PyBytes, PyString},
};
use server::media::{Media, read_file};

use crate::{
    arguments::{Text, named},
    detach::enter_long,
};

/// Work that takes a while, in the terms of [`enter_long`].
const LONG: usize = usize::MAX;

/// What a file holds.
pub trait Readable: Send + Sync + Sized + 'static {
    /// What is told beside a file.
    type Beside: Copy + Default + Send;

    /// Bytes of a file at most.
    fn max_bytes() -> usize;

    /// Of a file's bytes.
    fn decode(bytes: Vec<u8>, beside: Self::Beside) -> Result<Self, String>;

    /// Of what lies at an address.
    fn fetch(media: &Media, url: &str, beside: Self::Beside) -> Result<Self, String>;
}

/// What the classes of images, sounds and videos have alike, which hold the value in that field and never change: they are equal
/// where the values are, and their own copies.
macro_rules! value_methods {
    ($class:ty, $field:ident) => {
        #[pymethods]
        impl $class {
            fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
                match other.cast::<Self>() {
                    Ok(other) => {
                        let (own, other) = (&self.$field, &other.get().$field);
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
        }
    };
}
pub(crate) use value_methods;

/// What one is made of.
pub enum Source<T> {
    Url(String),
    Path(PathBuf),
    File(Vec<u8>),
    /// Values that have yet to be checked.
    Values(Box<dyn FnOnce() -> Result<T, String> + Send>),
    Whole(Arc<T>),
}

impl<T: Readable> Source<T> {
    /// Reads, fetches and decodes without holding the interpreter; `place` is what errors name.
    pub fn read(self, py: Python<'_>, place: &str, media: &Arc<Media>) -> PyResult<Arc<T>> {
        self.read_beside(py, place, media, T::Beside::default())
    }

    /// The same with what is told beside a file.
    pub fn read_beside(self, py: Python<'_>, place: &str, media: &Arc<Media>, beside: T::Beside) -> PyResult<Arc<T>> {
        let (place, media) = (place.to_owned(), Arc::clone(media));
        let long = match &self {
            Self::File(bytes) => bytes.len(),
            Self::Url(_) | Self::Path(_) => LONG,
            Self::Values(_) => 0,
            Self::Whole(whole) => return Ok(Arc::clone(whole)),
        };
        enter_long(py, long, move || {
            let read = match self {
                Self::Url(url) => T::fetch(&media, &url, beside),
                Self::Path(path) => read_file(&path, T::max_bytes())
                    .map_err(|why| why.to_string())
                    .and_then(|bytes| T::decode(bytes, beside).map_err(|why| format!("{}: {why}", path.display()))),
                Self::File(bytes) => T::decode(bytes, beside),
                Self::Values(make) => make(),
                Self::Whole(whole) => return Ok(whole),
            };
            read.map(Arc::new).map_err(|why| EngineError::InvalidArgument(format!("`{place}`: {why}")))
        })
    }
}

/// Whether a text is a URL, and no path.
fn has_scheme(text: &str) -> bool {
    let begins = |scheme: &&str| text.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme));
    ["data:", "file:", "http:", "https:"].iter().any(begins)
}

/// The file, or its bytes, that `object` is; `None` for something else. Errors name it as `place`.
pub fn of_file<T>(place: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Source<T>>> {
    if object.is_instance_of::<PyString>() {
        let Text(text) = named(place, object)?;
        return Ok(Some(if has_scheme(&text) { Source::Url(text) } else { Source::Path(text.into()) }));
    }
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Some(Source::File(bytes.as_bytes().to_vec())));
    }
    if let Ok(bytes) = object.cast::<PyByteArray>() {
        return Ok(Some(Source::File(bytes.to_vec())));
    }
    if object.hasattr("__fspath__")? {
        let path = object.py().import("os")?.call_method1("fspath", (object,))?;
        let Text(path) = named(place, &path)?;
        return Ok(Some(Source::Path(path.into())));
    }
    if object.get_type().name()? == "memoryview" {
        return of_file(place, &object.call_method0("tobytes")?);
    }
    Ok(None)
}
