//! Requests for embeddings.

use engine::{EmbeddingInput, Truncation};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyFrozenSet, PyList, PySet, PyString, PyTuple},
};

use crate::{
    arguments::{Integer, Real, Text, at_least_if_given, named, named_text, token_ids},
    fields::{Fields, getters, given, reduced, shown_dict},
    service::{ServiceFields, check_priority},
};

/// Texts to be embedded, each by itself.
///
/// - `input`: a str, or token ids (a list, a tuple or an array of integers), or a list of strs or of token ids. The tokenizer
///   adds its special tokens to a str; token ids are taken as they are.
/// - `truncate_sequence`: cut what is too long instead of raising. Of a str the end goes, and what the tokenizer adds stays; of
///   token ids the last ones go.
/// - `dimensions`: the first so many values of each vector, 1 or more, which is then made of length 1 again; all unless given.
/// - `prompt_name`: one of the model's prompts, such as "query" or "document", which goes before each str.
/// - `priority`: -2^31 to 2^31 - 1; lower goes first. `deadline`: seconds from submission, above 0, after which the request
///   raises. `tenant`: whom the request belongs to. `cache_salt`: cached blocks are shared only with requests of the same salt.
///
/// A request gives back its fields, is equal to one of equal fields, and can be copied and pickled. A value out of range raises
/// `ValueError`, here or when the request is sent.
#[pyclass(frozen, module = "mistral_paged")]
pub struct EmbeddingRequest {
    /// As the engine takes it.
    pub request: engine::EmbeddingRequest,
    fields: Fields,
}

#[pymethods]
impl EmbeddingRequest {
    #[new]
    #[pyo3(signature = (
        input, truncate_sequence=false, *, dimensions=None, prompt_name=None, priority=0, deadline=None, tenant=None,
        cache_salt=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "mirrors a documented signature")]
    #[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
    fn new(
        py: Python<'_>,
        input: &Bound<'_, PyAny>,
        truncate_sequence: bool,
        dimensions: Option<Integer>,
        prompt_name: Option<Bound<'_, PyString>>,
        #[pyo3(from_py_with = check_priority)] priority: i32,
        deadline: Option<Real>,
        tenant: Option<Bound<'_, PyString>>,
        cache_salt: Option<Bound<'_, PyString>>,
    ) -> PyResult<Self> {
        let input = &listed(input)?;
        let fields = given!(py, truncate_sequence, dimensions, prompt_name, priority, deadline, tenant, cache_salt);
        let request = engine::EmbeddingRequest {
            inputs: inputs(input)?,
            prompt_name: prompt_name.map(|name| named_text("prompt_name", &name)).transpose()?,
            dimensions: at_least_if_given("dimensions", dimensions.as_ref(), 1)?,
            truncation: if truncate_sequence { Truncation::ToModel } else { Truncation::Refuse },
            service: ServiceFields { priority, deadline, tenant, cache_salt, public_prefix: 0, keep: false }.check()?,
        };
        fields.set_item("input", as_given(py, &request.inputs, is_one(input)?)?)?;
        Ok(Self { request, fields: Fields::of(&fields)? })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        shown_dict("EmbeddingRequest", &self.all(py)?)
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<Self>() {
            Ok(other) => self.all(py)?.eq(other.get().all(py)?)?.into_py_any(py),
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        reduced(&slf.get_type(), &slf.get().all(slf.py())?)
    }
}

impl EmbeddingRequest {
    /// The keywords that make an equal one.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.fields.behind(
            py,
            [("input", self.fields.get(py, "input")?), ("truncate_sequence", self.fields.get(py, "truncate_sequence")?)],
        )
    }
}

getters! {
    EmbeddingRequest: input, truncate_sequence, dimensions, prompt_name, priority, deadline, tenant, cache_salt
}

fn wrong() -> PyErr {
    PyTypeError::new_err("`input` must be a str, token ids (integers) in order, or a list of strs or of token ids")
}

/// A text as it is; all else as a list, for some can be gone through once.
fn listed<'py>(input: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if input.is_instance_of::<PyString>() {
        return Ok(input.clone());
    }
    let has_no_order = input.is_instance_of::<PySet>() || input.is_instance_of::<PyFrozenSet>();
    if has_no_order || input.is_instance_of::<PyBytes>() || input.is_instance_of::<PyDict>() {
        return Err(wrong());
    }
    let items = input.try_iter().map_err(|_| wrong())?.collect::<PyResult<Vec<_>>>()?;
    Ok(PyList::new(input.py(), items)?.into_any())
}

/// Whether it is one text or one list of token ids.
fn is_one(input: &Bound<'_, PyAny>) -> PyResult<bool> {
    if input.is_instance_of::<PyString>() {
        return Ok(true);
    }
    match input.try_iter()?.next() {
        Some(first) => Ok(first?.extract::<Integer>().is_ok()),
        None => Ok(false),
    }
}

fn inputs(input: &Bound<'_, PyAny>) -> PyResult<Vec<EmbeddingInput>> {
    let text = |text: &Bound<'_, PyAny>| named("input", text).map(|Text(text)| EmbeddingInput::Text(text));
    if input.is_instance_of::<PyString>() {
        return Ok(vec![text(input)?]);
    }
    let ids = |ids: &Bound<'_, PyAny>| {
        let is_type_error = |error: &PyErr| error.is_instance_of::<PyTypeError>(ids.py());
        token_ids("input", ids).map(EmbeddingInput::TokenIds).map_err(|error| if is_type_error(&error) { wrong() } else { error })
    };
    if is_one(input)? {
        return Ok(vec![ids(input)?]);
    }
    let of = |each: PyResult<Bound<'_, PyAny>>| {
        let each = each?;
        if each.is_instance_of::<PyString>() { text(&each) } else { ids(&each) }
    };
    input.try_iter()?.map(of).collect()
}

/// The inputs as the request gives them back.
fn as_given<'py>(py: Python<'py>, inputs: &[EmbeddingInput], is_one: bool) -> PyResult<Bound<'py, PyAny>> {
    let given = |input: &EmbeddingInput| match input {
        EmbeddingInput::Text(text) => text.into_bound_py_any(py),
        EmbeddingInput::TokenIds(ids) => ids.into_bound_py_any(py),
    };
    match inputs {
        [input] if is_one => given(input),
        _ => inputs.iter().map(given).collect::<PyResult<Vec<_>>>()?.into_bound_py_any(py),
    }
}
