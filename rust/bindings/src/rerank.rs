//! Requests for scores of pairs of texts.

use engine::Truncation;
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyFrozenSet, PySet, PyString, PyTuple},
};

use crate::{
    arguments::{Real, Text, named, named_text},
    fields::{Fields, getters, given, reduced, shown_dict},
    service::{ServiceFields, check_priority},
};

/// Texts to be scored, each by how well it answers a query.
///
/// - `query`: a str. `documents`: an iterable of strs, in an order.
/// - `truncate_sequence`: where a query and a document together are too long, cut the longer of both at its end instead of
///   raising.
/// - `priority`: -2^31 to 2^31 - 1; lower goes first. `deadline`: seconds from submission, above 0, after which the request
///   raises. `tenant`: whom the request belongs to.
///
/// A request gives back its fields, is equal to one of equal fields, and can be copied and pickled. A value out of range raises
/// `ValueError`, here or when the request is sent.
#[pyclass(frozen, module = "mistral_paged")]
pub struct RerankRequest {
    /// As the engine takes it.
    pub request: engine::RerankRequest,
    fields: Fields,
}

#[pymethods]
impl RerankRequest {
    #[new]
    #[pyo3(signature = (query, documents, truncate_sequence=false, *, priority=0, deadline=None, tenant=None))]
    #[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
    fn new(
        py: Python<'_>,
        query: &Bound<'_, PyString>,
        documents: &Bound<'_, PyAny>,
        truncate_sequence: bool,
        #[pyo3(from_py_with = check_priority)] priority: i32,
        deadline: Option<Real>,
        tenant: Option<Bound<'_, PyString>>,
    ) -> PyResult<Self> {
        let fields = given!(py, truncate_sequence, priority, deadline, tenant);
        let request = engine::RerankRequest {
            query: named_text("query", query)?,
            documents: texts(documents)?,
            truncation: if truncate_sequence { Truncation::ToModel } else { Truncation::Refuse },
            service: ServiceFields { priority, deadline, tenant, cache_salt: None, public_prefix: 0, keep: false }.check()?,
        };
        fields.set_item("query", &request.query)?;
        fields.set_item("documents", &request.documents)?;
        Ok(Self { request, fields: Fields::of(&fields)? })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        shown_dict("RerankRequest", &self.all(py)?)
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

impl RerankRequest {
    /// The keywords that make an equal one.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.fields.behind(
            py,
            [
                ("query", self.fields.get(py, "query")?),
                ("documents", self.fields.get(py, "documents")?),
                ("truncate_sequence", self.fields.get(py, "truncate_sequence")?),
            ],
        )
    }
}

getters! {
    RerankRequest: query, documents, truncate_sequence, priority, deadline, tenant
}

fn texts(documents: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let wrong = || PyTypeError::new_err("`documents` must be strs in order");
    let is_text = documents.is_instance_of::<PyString>() || documents.is_instance_of::<PyBytes>();
    let has_no_order = documents.is_instance_of::<PySet>() || documents.is_instance_of::<PyFrozenSet>();
    if is_text || has_no_order || documents.is_instance_of::<PyDict>() {
        return Err(wrong());
    }
    let text = |text: PyResult<Bound<'_, PyAny>>| {
        let text = text?;
        if !text.is_instance_of::<PyString>() {
            return Err(wrong());
        }
        named("documents", &text).map(|Text(text)| text)
    };
    documents.try_iter().map_err(|_| wrong())?.map(text).collect()
}
