//! Objects that show their fields, give them back, and can be compared, copied and pickled.

use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

/// `Name(field=value, ...)`, each value as Python writes it.
pub fn shown(name: &str, fields: &[(&str, Bound<'_, PyAny>)]) -> PyResult<String> {
    let fields = fields.iter().map(|(name, value)| Ok(format!("{}={}", name.trim_start_matches("r#"), value.repr()?)));
    Ok(format!("{name}({})", fields.collect::<PyResult<Vec<_>>>()?.join(", ")))
}

/// A class whose fields are all that it is: it is made of them (by a signature, where one is given), shows them, and is equal to
/// another of equal fields.
macro_rules! record {
    ($(#[$attribute:meta])* pub struct $class:ident $(($($signature:tt)*))? { $($visible:vis $field:ident: $type:ty),+ $(,)? }) => {
        $(#[$attribute])*
        #[pyclass(frozen, get_all, module = "mistral_paged")]
        pub struct $class {
            $($visible $field: $type),+
        }

        #[pymethods]
        impl $class {
            #[new]
            $(#[pyo3(signature = ($($signature)*))])?
            #[allow(clippy::too_many_arguments, reason = "one an own field")]
            fn new($($field: $type),+) -> Self {
                Self { $($field),+ }
            }

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                $crate::fields::shown(stringify!($class), &[$((stringify!($field), (&self.$field).into_bound_py_any(py)?)),+])
            }

            fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
                match other.cast::<Self>() {
                    Ok(other) => {
                        let own = [$((&self.$field).into_bound_py_any(py)?),+];
                        let others = [$((&other.get().$field).into_bound_py_any(py)?),+];
                        PyTuple::new(py, own)?.eq(PyTuple::new(py, others)?)?.into_py_any(py)
                    }
                    Err(_) => Ok(py.NotImplemented()),
                }
            }

            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
                let fields = [$((&slf.get().$field).into_bound_py_any(slf.py())?),+];
                Ok((slf.py().get_type::<Self>(), PyTuple::new(slf.py(), fields)?))
            }
        }
    };
}
pub(crate) use record;

/// The fields that a request was given, without those at their defaults.
pub struct Fields(Py<PyDict>);

/// The fields of these names, in order.
macro_rules! given {
    ($py:expr, $($field:ident),+) => {{
        let fields = PyDict::new($py);
        $(fields.set_item(stringify!($field), &$field)?;)+
        fields
    }};
}
pub(crate) use given;

/// Getters of these fields.
macro_rules! getters {
    ($class:ident: $($field:ident),+) => {
        #[pymethods]
        impl $class {
            $(
                #[getter]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.fields.get(py, stringify!($field))
                }
            )+
        }
    };
}
pub(crate) use getters;

/// What a field is when it is left out.
fn default_of<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    match name {
        "n_choices" => 1.into_bound_py_any(py),
        "priority" | "public_messages" | "public_prefix_len" => 0.into_bound_py_any(py),
        "stream" | "truncate_sequence" | "ignore_eos" | "keep" | "echo_prompt" | "fill_in_middle" => false.into_bound_py_any(py),
        _ => Ok(py.None().into_bound(py)),
    }
}

impl Fields {
    /// Of all fields of a request.
    pub fn of(all: &Bound<'_, PyDict>) -> PyResult<Self> {
        let py = all.py();
        let fields = PyDict::new(py);
        for (name, value) in all {
            // Not `==`: False is not 0, and 1.0 is not 1.
            if !value.is_none() && !value.repr()?.as_any().eq(default_of(py, name.extract()?)?.repr()?)? {
                fields.set_item(name, value)?;
            }
        }
        Ok(Self(fields.unbind()))
    }

    /// One of them, a list or a dict as a copy.
    pub fn get<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let Some(value) = self.0.bind(py).get_item(name)? else { return default_of(py, name) };
        if let Ok(dict) = value.cast::<PyDict>() {
            return Ok(dict.copy()?.into_any());
        }
        match value.cast::<PyList>() {
            Ok(list) => Ok(list.get_slice(0, list.len()).into_any()),
            Err(_) => Ok(value),
        }
    }

    /// These, behind what every request of a kind has.
    pub fn behind<'py, const N: usize>(
        &self,
        py: Python<'py>,
        first: [(&str, Bound<'py, PyAny>); N],
    ) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (name, value) in first {
            all.set_item(name, value)?;
        }
        all.update(self.0.bind(py).as_mapping())?;
        Ok(all)
    }
}

/// `Name(field=value, ...)` of a dict.
pub fn shown_dict(name: &str, fields: &Bound<'_, PyDict>) -> PyResult<String> {
    let fields: Vec<(String, Bound<'_, PyAny>)> =
        fields.iter().map(|(name, value)| Ok((name.extract()?, value))).collect::<PyResult<_>>()?;
    let fields: Vec<(&str, Bound<'_, PyAny>)> = fields.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    shown(name, &fields)
}

/// What `__reduce__` gives for a class that is called with keywords.
pub fn reduced<'py>(
    class: &Bound<'py, PyAny>,
    fields: &Bound<'py, PyDict>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
    let call = class.py().import("functools")?.getattr("partial")?.call((class,), Some(fields))?;
    Ok((call, PyTuple::empty(class.py())))
}
