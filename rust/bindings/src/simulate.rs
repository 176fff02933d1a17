//! The simulator: NumPy columns in, NumPy columns out. `mistral_paged/simulator.py` gives them their names and types.

use std::{collections::HashMap, sync::Mutex, sync::PoisonError, task::Poll};

use engine::EngineError;
use numpy::{IntoPyArray, PyReadonlyArray1};
use pyo3::{IntoPyObjectExt, conversion::FromPyObjectOwned, exceptions::PyTypeError, prelude::*, types::PyDict};
use simulator::{
    CostModel, Ending, Fleet, Interval, MemoryByKind, PRESETS, ReplicaResult, RequestRecord, RouterPolicy, SimulationConfig,
    SimulationError, Totals, Trace, TraceColumns, TraceRequest, policies_of_names,
};

use crate::{
    arguments::{Integer, Real, Text, at_least, at_least_if_given, shorten},
    detach::wait,
    exceptions::raise,
};

/// Steps between two looks at Ctrl-C: some milliseconds.
const STEPS_A_POLL: usize = 1000;

/// The keyword arguments of `mistral_paged.simulate`.
pub struct Settings {
    policy: Vec<Text>,
    allocator: Text,
    blocks: Integer,
    block_size: Integer,
    device: Device,
    max_num_seqs: Integer,
    max_num_batched_tokens: Integer,
    max_step_latency: Option<Real>,
    max_model_len: Option<Integer>,
    prefix_caching: bool,
    windows: Vec<Option<Integer>>,
    num_intervals: Integer,
    replicas: Integer,
    router: Text,
}

/// A device by name, or the four times of a cost model.
#[derive(FromPyObject)]
enum Device {
    Name(Text),
    Times(Real, Real, Real, Real),
}

impl Device {
    fn cost(&self) -> PyResult<CostModel> {
        match self {
            Self::Name(Text(name)) => CostModel::preset(name).map_err(error),
            Self::Times(step, weights, token, kv_token) => Ok(CostModel {
                step_seconds: step.0,
                weights_seconds: weights.0,
                token_seconds: token.0,
                kv_token_seconds: kv_token.0,
            }),
        }
    }
}

/// An argument of its type; a `TypeError` that names it otherwise.
fn argument<'py, T: FromPyObjectOwned<'py>>(settings: &Bound<'py, PyAny>, name: &str, needed: &str) -> PyResult<T> {
    let value = settings.get_item(name)?;
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        if !error.is_instance_of::<PyTypeError>(settings.py()) {
            return error;
        }
        match value.repr() {
            Ok(shown) => PyTypeError::new_err(format!("`{name}` must be {needed}, got {}", shorten(&shown.to_string_lossy()))),
            Err(error) => error,
        }
    })
}

impl Settings {
    fn read(settings: &Bound<'_, PyAny>) -> PyResult<Self> {
        const INTEGER: &str = "an integer";
        Ok(Self {
            policy: argument(settings, "policy", "the name of a policy or a list of names")?,
            allocator: argument(settings, "allocator", "the name of an allocator")?,
            blocks: argument(settings, "blocks", INTEGER)?,
            block_size: argument(settings, "block_size", INTEGER)?,
            device: argument(settings, "device", "the name of a device, or a Device of four times")?,
            max_num_seqs: argument(settings, "max_num_seqs", INTEGER)?,
            max_num_batched_tokens: argument(settings, "max_num_batched_tokens", INTEGER)?,
            max_step_latency: argument(settings, "max_step_latency", "seconds or None")?,
            max_model_len: argument(settings, "max_model_len", "an integer or None")?,
            prefix_caching: argument(settings, "prefix_caching", "a bool")?,
            windows: argument(settings, "windows", "a list of integers and None, one a layer")?,
            num_intervals: argument(settings, "num_intervals", INTEGER)?,
            replicas: argument(settings, "replicas", INTEGER)?,
            router: argument(settings, "router", "the name of a router")?,
        })
    }

    fn config(&self) -> PyResult<SimulationConfig> {
        let windows = self.windows.iter().map(|window| at_least_if_given("windows", window.as_ref(), 1));
        Ok(SimulationConfig {
            allocator: self.allocator.0.parse().map_err(error)?,
            policies: policies_of_names(self.policy.iter().map(|name| name.0.as_str())).map_err(error)?,
            num_blocks: at_least("blocks", &self.blocks, 1)?,
            block_size: at_least("block_size", &self.block_size, 1)?,
            max_num_seqs: at_least("max_num_seqs", &self.max_num_seqs, 1)?,
            max_num_batched_tokens: at_least("max_num_batched_tokens", &self.max_num_batched_tokens, 1)?,
            max_step_latency: self.max_step_latency.as_ref().map(|seconds| seconds.0),
            max_model_len: at_least_if_given("max_model_len", self.max_model_len.as_ref(), 2)?,
            enable_prefix_caching: self.prefix_caching,
            windows: windows.collect::<PyResult<_>>()?,
            cost: self.device.cost()?,
            max_intervals: at_least("num_intervals", &self.num_intervals, 2)?,
        })
    }
}

/// Runs the production scheduler and pool in virtual time, in as many replicas as the settings say.
///
/// `trace` has the columns of the requests by name; those that are left out have defaults. Returns for each replica its `rows` of
/// the trace by arrival, `requests`, `timeline` and `totals` as columns, and `rejected` as row and reason.
#[pyfunction]
pub fn simulate<'py>(
    py: Python<'py>,
    trace: &Bound<'py, PyAny>,
    settings: &Bound<'py, PyAny>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let settings = Settings::read(settings)?;
    let config = settings.config()?;
    let num_replicas = at_least("replicas", &settings.replicas, 1)?;
    let router: RouterPolicy = settings.router.0.parse().map_err(error)?;
    let trace = read(&trace.extract()?)?;
    let requests = trace.requests().to_vec();
    let fleet = Fleet::new(trace, &config, num_replicas, router).map_err(error)?;
    // The mutex is only so that the simulation may wait outside the interpreter.
    let fleet = Mutex::new(fleet);
    wait(py, || {
        let mut fleet = fleet.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..STEPS_A_POLL {
            if !fleet.advance().map_err(|error| engine_error(&error))? {
                return Ok(Poll::Ready(()));
            }
        }
        Ok(Poll::Pending)
    })?;
    let results = fleet.into_inner().unwrap_or_else(PoisonError::into_inner).into_results();
    results.iter().map(|result| write(py, &requests, result)).collect()
}

/// Seconds: a step, its weights, a token, a KV token.
type Times = (f64, f64, f64, f64);

/// Names, times and sources of the devices that can be named.
#[pyfunction]
pub fn simulator_devices() -> Vec<(&'static str, Times, &'static str)> {
    let times = |cost: CostModel| (cost.step_seconds, cost.weights_seconds, cost.token_seconds, cost.kv_token_seconds);
    PRESETS.iter().map(|preset| (preset.name, times(preset.cost), preset.source)).collect()
}

fn read(columns: &HashMap<String, PyReadonlyArray1<'_, f64>>) -> PyResult<Trace> {
    let column = |name: &str| columns.get(name).map_or(Ok(&[][..]), |column| column.as_slice().map_err(PyErr::from));
    let trace = Trace::from_columns(&TraceColumns {
        arrival: column("arrival")?,
        prompt_tokens: column("prompt_tokens")?,
        output_tokens: column("output_tokens")?,
        prefix_id: column("prefix_id")?,
        prefix_tokens: column("prefix_tokens")?,
        tenant: column("tenant")?,
        priority: column("priority")?,
        deadline: column("deadline")?,
    });
    trace.map_err(error)
}

fn write<'py>(py: Python<'py>, trace: &[TraceRequest], replica: &ReplicaResult) -> PyResult<Bound<'py, PyDict>> {
    let ReplicaResult { rows, result } = replica;
    let requests = PyDict::new(py);
    let floats = |name, value: fn(&TraceRequest, &RequestRecord) -> f64| {
        let values: Vec<_> = rows.iter().zip(&result.requests).map(|(row, record)| value(&trace[*row], record)).collect();
        requests.set_item(name, values.into_pyarray(py))
    };
    floats("time_to_first_token", |request, record| record.first_token - request.arrival)?;
    floats("inter_token_latency_mean", |_, record| record.mean_gap())?;
    floats("inter_token_latency_max", |_, record| record.max_gap)?;
    floats("end_time", |_, record| record.end)?;
    let counts = |name, value: fn(&RequestRecord) -> usize| {
        let values: Vec<_> = result.requests.iter().map(|record| value(record) as i64).collect();
        requests.set_item(name, values.into_pyarray(py))
    };
    counts("output_tokens", |record| record.output_tokens)?;
    counts("preemptions", |record| record.preemptions)?;
    counts("cached_tokens", |record| record.cached_tokens)?;
    counts("ending", |record| record.ending as usize)?;

    let timeline = PyDict::new(py);
    let series = |name, value: &dyn Fn(&Interval) -> f64| {
        timeline.set_item(name, result.timeline.iter().map(value).collect::<Vec<_>>().into_pyarray(py))
    };
    series("time", &|interval| interval.start)?;
    series("seconds", &|interval| interval.seconds)?;
    series("running", &|interval| interval.running)?;
    series("waiting", &|interval| interval.waiting)?;
    for (kind, name) in MemoryByKind::NAMES.into_iter().enumerate() {
        series(name, &|interval| interval.memory.values()[kind])?;
    }

    let all = PyDict::new(py);
    all.set_item("rows", rows.iter().map(|row| *row as i64).collect::<Vec<_>>().into_pyarray(py))?;
    all.set_item("requests", requests)?;
    all.set_item("endings", Ending::NAMES)?;
    let reasons = rows.iter().zip(&result.requests).filter_map(|(row, record)| Some((*row, record.rejection.as_ref()?)));
    all.set_item("rejected", reasons.collect::<HashMap<_, _>>())?;
    all.set_item("timeline", timeline)?;
    all.set_item("memory_kinds", MemoryByKind::NAMES)?;
    all.set_item("totals", totals(py, &result.totals)?)?;
    Ok(all)
}

fn totals<'py>(py: Python<'py>, totals: &Totals) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("steps", totals.steps)?;
    dict.set_item("seconds", totals.seconds)?;
    dict.set_item("output_tokens", totals.output_tokens)?;
    dict.set_item("computed_tokens", totals.computed_tokens)?;
    dict.set_item("recomputed_tokens", totals.recomputed_tokens)?;
    dict.set_item("preemptions", totals.preemptions)?;
    dict.set_item("prefix_queried_tokens", totals.prefix_queried_tokens)?;
    dict.set_item("prefix_hit_tokens", totals.prefix_hit_tokens)?;
    dict.set_item("normalized_latency", totals.normalized_latency)?;
    for (name, means) in [("overall", totals.overall), ("saturated", totals.saturated)] {
        let means = means.map(|means| (means.seconds, means.running, means.waiting, means.memory.values()));
        dict.set_item(name, means.into_py_any(py)?)?;
    }
    Ok(dict)
}

fn engine_error(error: &SimulationError) -> EngineError {
    match error {
        SimulationError::Stuck { .. } | SimulationError::Update(_) => EngineError::Internal(error.to_string()),
        _ => EngineError::InvalidArgument(error.to_string()),
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn error(error: SimulationError) -> PyErr {
    raise(engine_error(&error))
}
