//! The model of a runner: loaded, or unloaded and ready to be loaded again.

use std::{
    mem,
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    task::Poll,
};

use engine::{Engine, EngineConfig, EngineError, Isq, ModelSource};
use pyo3::prelude::*;
use server::Host;

use crate::{
    detach::{POLL, enter, wait},
    exceptions::invalid,
    load::{load, with_progress},
    logger::log,
};

const LOADED: &str = "loaded";
const UNLOADED: &str = "unloaded";
const RELOADING: &str = "reloading";
const CLOSED: &str = "closed";
const CLOSED_FOR_GOOD: &str = "the runner is closed; make another one";

/// A model that can be loaded any number of times.
pub struct Model {
    id: String,
    source: ModelSource,
    config: EngineConfig,
    /// Known once it has been loaded.
    architecture: OnceLock<String>,
    /// What it was quantized to since.
    isq: Mutex<Option<Isq>>,
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Loaded(Engine),
    Unloaded,
    /// For good.
    Closed,
    /// A thread loads or unloads it; the status that is told meanwhile.
    Changing(&'static str),
}

impl Model {
    /// A model that is not loaded yet.
    pub fn new(id: String, source: ModelSource, config: EngineConfig) -> Self {
        Self {
            id,
            source,
            config,
            architecture: OnceLock::new(),
            isq: Mutex::default(),
            state: Mutex::new(State::Unloaded),
            changed: Condvar::new(),
        }
    }

    /// Its architecture, once it has been loaded.
    pub fn architecture(&self) -> Option<&str> {
        self.architecture.get().map(String::as_str)
    }

    /// "loaded", "unloaded", "reloading" or "closed".
    pub fn status(&self) -> &'static str {
        match *self.lock() {
            State::Loaded(_) => LOADED,
            State::Unloaded => UNLOADED,
            State::Closed => CLOSED,
            State::Changing(status) => status,
        }
    }

    /// Whether requests are served without loading it first.
    pub fn is_loaded(&self) -> bool {
        self.status() == LOADED
    }

    /// The engine of a loaded model; an error that names what to do otherwise.
    pub fn engine(&self) -> PyResult<Engine> {
        match &*self.lock() {
            State::Loaded(engine) => Ok(engine.clone()),
            State::Closed => Err(closed()),
            State::Unloaded | State::Changing(_) => {
                Err(invalid(format!("model `{}` is not loaded: `reload_model()`, or a request, loads it", self.id)))
            }
        }
    }

    /// The engine, after loading the model if it is unloaded. Waits for another thread that loads or unloads it.
    pub fn engine_or_reload(&self, py: Python<'_>) -> PyResult<Engine> {
        self.load(py, None)
    }

    /// The same; `progress` is called with the bytes of weights done and in all.
    pub fn load(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Engine> {
        loop {
            match &*self.lock() {
                State::Loaded(engine) => return Ok(engine.clone()),
                State::Closed => return Err(closed()),
                State::Unloaded | State::Changing(_) => {}
            }
            if let Some(mut change) = self.change(py, State::is_unloaded, RELOADING)? {
                let engine = start(py, &self.source, &self.config_now(), progress)?;
                return Ok(change.set_loaded(engine));
            }
        }
    }

    /// Quantizes a loaded model anew; loaded again, it is quantized so.
    pub fn re_isq(&self, py: Python<'_>, isq: Isq, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let engine = self.engine()?;
        with_progress(py, "mistral_paged-re-isq", progress, move |step| engine.re_isq(isq, step))?;
        *self.isq.lock().unwrap_or_else(PoisonError::into_inner) = Some(isq);
        Ok(())
    }

    /// Ends what runs, with the text that it has, and gives the memory back; an error if it is unloaded already.
    pub fn unload(&self, py: Python<'_>) -> PyResult<()> {
        match self.change(py, State::is_loaded, UNLOADED)? {
            Some(change) => enter(py, move || {
                change.free(State::Unloaded);
                Ok(())
            }),
            None if matches!(&*self.lock(), State::Closed) => Err(closed()),
            None => Err(invalid(format!("model `{}` is unloaded already", self.id))),
        }
    }

    /// As [`Self::unload`], for good; nothing happens if it is closed already.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        let change = self.change(py, |state| !matches!(state, State::Closed), CLOSED)?;
        change.map_or(Ok(()), |change| {
            enter(py, move || {
                change.free(State::Closed);
                Ok(())
            })
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to change a state that is as wanted, once no other thread has it; `None` when the state is another.
    fn change(&self, py: Python<'_>, is_wanted: fn(&State) -> bool, status: &'static str) -> PyResult<Option<Change<'_>>> {
        wait(py, || Ok(self.poll_change(is_wanted, status)))
    }

    /// The same beside the interpreter.
    fn change_beside(&self, is_wanted: fn(&State) -> bool, status: &'static str) -> Option<Change<'_>> {
        loop {
            if let Poll::Ready(change) = self.poll_change(is_wanted, status) {
                return change;
            }
        }
    }

    /// The same within [`POLL`].
    fn poll_change(&self, is_wanted: fn(&State) -> bool, status: &'static str) -> Poll<Option<Change<'_>>> {
        let is_changing = |state: &mut State| matches!(state, State::Changing(_));
        let waited = self.changed.wait_timeout_while(self.lock(), POLL, is_changing);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Poll::Pending;
        }
        let change = is_wanted(&state).then(|| Change { model: self, state: mem::replace(&mut *state, State::Changing(status)) });
        Poll::Ready(change)
    }

    /// How it is loaded again.
    fn config_now(&self) -> EngineConfig {
        let isq = self.isq.lock().unwrap_or_else(PoisonError::into_inner).or(self.config.in_situ_quant);
        EngineConfig { in_situ_quant: isq, ..self.config.clone() }
    }
}

/// For a server, whose threads are not the interpreter's.
impl Host for Model {
    fn engine(&self) -> Option<Engine> {
        match &*self.lock() {
            State::Loaded(engine) => Some(engine.clone()),
            State::Unloaded | State::Closed | State::Changing(_) => None,
        }
    }

    fn status(&self) -> &'static str {
        self.status()
    }

    fn own_adapters(&self) -> Vec<String> {
        let adapters = self.config.adapters.iter().flat_map(|options| &options.adapters);
        adapters.map(|(alias, _)| alias.clone()).collect()
    }

    fn load(&self) -> Result<Engine, EngineError> {
        loop {
            match &*self.lock() {
                State::Loaded(engine) => return Ok(engine.clone()),
                State::Closed => return Err(EngineError::InvalidArgument(CLOSED_FOR_GOOD.into())),
                State::Unloaded | State::Changing(_) => {}
            }
            if let Some(mut change) = self.change_beside(State::is_unloaded, RELOADING) {
                let engine = Engine::load(&self.source, &self.config_now(), &|_| ())?;
                return Ok(change.set_loaded(engine));
            }
        }
    }

    fn unload(&self) -> Result<(), EngineError> {
        if let Some(change) = self.change_beside(State::is_loaded, UNLOADED) {
            change.free(State::Unloaded);
        }
        Ok(())
    }

    fn re_isq(&self, isq: Isq) -> Result<(), EngineError> {
        let unloaded = || EngineError::InvalidArgument(format!("model `{}` is not loaded: reload it first", self.id));
        Host::engine(self).ok_or_else(unloaded)?.re_isq(isq, &|_| ())?;
        *self.isq.lock().unwrap_or_else(PoisonError::into_inner) = Some(isq);
        Ok(())
    }
}

impl State {
    fn is_loaded(&self) -> bool {
        matches!(self, Self::Loaded(_))
    }

    fn is_unloaded(&self) -> bool {
        matches!(self, Self::Unloaded)
    }
}

/// The state of a model while one thread changes it; in place again at the end.
struct Change<'a> {
    model: &'a Model,
    state: State,
}

impl Change<'_> {
    /// The model then has this engine, which is returned.
    fn set_loaded(&mut self, engine: Engine) -> Engine {
        self.model.architecture.get_or_init(|| engine.architecture().to_owned());
        self.state = State::Loaded(engine.clone());
        engine
    }

    /// Ends what runs and gives the memory back; the model is then in the state `after`.
    fn free(mut self, after: State) {
        if let State::Loaded(engine) = mem::replace(&mut self.state, after) {
            // An engine whose thread has ended has given its memory back.
            engine.unload().unwrap_or_default();
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        *self.model.lock() = mem::replace(&mut self.state, State::Unloaded);
        self.model.changed.notify_all();
    }
}

fn closed() -> PyErr {
    invalid(CLOSED_FOR_GOOD)
}

/// Loads the model and logs what it is.
fn start(py: Python<'_>, source: &ModelSource, config: &EngineConfig, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Engine> {
    let engine = load(py, source.clone(), config.clone(), progress)?;
    for line in engine.description() {
        log(py, "info", &line)?;
    }
    Ok(engine)
}
