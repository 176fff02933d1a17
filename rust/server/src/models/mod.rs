//! The models of a server: what each is called, and the engine that it has while it is loaded.

mod loading;
mod model;

use std::{sync::Arc, time::Instant};

use engine::{AdapterChoice, AdapterInfo, Engine, EngineError, Isq};
use openai::ApiError;
use tokio::sync::{Mutex, Notify, Semaphore};

use crate::{StartError, config::ServerConfig, errors::model_not_found, metrics::Metrics};

use loading::Pause;
pub use model::Model;

/// What a model is called where a request names none.
pub const DEFAULT: &str = "default";

/// Where a model lies that may be taken out of memory, and loaded again.
pub trait Host: Send + Sync {
    /// The engine, while it is loaded. At once.
    fn engine(&self) -> Option<Engine>;

    /// "loaded", "unloaded" or "reloading". At once.
    fn status(&self) -> &'static str;

    /// Aliases of the adapters that are loaded with it, also while it is not loaded.
    fn own_adapters(&self) -> Vec<String>;

    /// The engine, after loading the model where it is not loaded.
    fn load(&self) -> Result<Engine, EngineError>;

    /// Ends what runs, with the text that it has, and gives the memory back; nothing happens where it is not loaded.
    fn unload(&self) -> Result<(), EngineError>;

    /// Quantizes a loaded model anew; loaded again, it is quantized so.
    fn re_isq(&self, isq: Isq) -> Result<(), EngineError>;
}

/// An engine that stays loaded.
impl Host for Engine {
    fn engine(&self) -> Option<Engine> {
        Some(self.clone())
    }

    fn status(&self) -> &'static str {
        "loaded"
    }

    fn own_adapters(&self) -> Vec<String> {
        self.adapters().into_iter().map(|AdapterInfo { alias, .. }| alias).collect()
    }

    fn load(&self) -> Result<Engine, EngineError> {
        Ok(self.clone())
    }

    fn unload(&self) -> Result<(), EngineError> {
        Err(EngineError::NotSupported("the engine of this model is another's, who alone unloads it".into()))
    }

    fn re_isq(&self, isq: Isq) -> Result<(), EngineError> {
        Self::re_isq(self, isq, &|_| ())
    }
}

/// A model that a request names, and what it then is to run with.
#[derive(Clone)]
pub struct Target {
    pub model: Arc<Model>,
    pub adapter: Option<AdapterChoice>,
    /// When it was named: the time of a request counts from there.
    pub since: Instant,
}

/// All models of a server, in the order of its settings.
pub struct Models {
    all: Vec<Arc<Model>>,
    default: Arc<Model>,
    pause: Arc<Pause>,
    /// How many may be loaded at once, and the places of those that may be.
    max_loaded: Option<usize>,
    places: Option<Arc<Semaphore>>,
    /// One at a time looks for a place.
    making_room: Mutex<()>,
    /// A model may have become idle, or have given its place back.
    freed: Arc<Notify>,
    /// One at a time loads an adapter, lest two models get one of the same alias.
    pub(crate) naming: Arc<Mutex<()>>,
}

impl Models {
    /// Models, one for each of the settings. No two names, adapters' aliases among them, may be the same.
    pub(crate) fn new(hosts: Vec<Arc<dyn Host>>, config: &ServerConfig, metrics: &Metrics) -> Result<Self, StartError> {
        let default = config.check_models()?;
        if hosts.len() != config.models.len() {
            return Err(StartError(format!("there are {} models and settings of {}", hosts.len(), config.models.len())));
        }
        let freed = Arc::new(Notify::new());
        let all =
            hosts.into_iter().zip(&config.models).enumerate().map(|(number, (host, config))| {
                Model::new(host, config.clone(), number == default, metrics, &freed).map(Arc::new)
            });
        let all = all.collect::<Result<Vec<_>, _>>()?;
        // No more than there are, and a semaphore counts no further than it can.
        let max_loaded = config.max_loaded_models.map(|most| most.min(all.len()));
        let models = Self {
            default: Arc::clone(&all[default]),
            all,
            pause: Arc::default(),
            max_loaded,
            places: max_loaded.map(|most| Arc::new(Semaphore::new(most))),
            making_room: Mutex::default(),
            freed,
            naming: Arc::default(),
        };
        models.check_adapters()?;
        for model in models.iter().filter(|model| model.loaded().is_some()) {
            let Some(places) = &models.places else { break };
            let full = |_| StartError(format!("more models are loaded than the {} that may be", max_loaded.unwrap_or_default()));
            model.hold(Some(Arc::clone(places).try_acquire_owned().map_err(full)?));
        }
        Ok(models)
    }

    /// Whether the aliases of adapters that are loaded with models are names of nothing else.
    fn check_adapters(&self) -> Result<(), StartError> {
        for (number, model) in self.all.iter().enumerate() {
            let aliases = model.host.own_adapters();
            for (place, alias) in aliases.iter().enumerate() {
                if aliases[..place].contains(alias) {
                    return Err(StartError(format!(
                        "two adapters of {:?} have the alias {alias:?}: give one another",
                        model.id()
                    )));
                }
                let others = self.all.iter().take(number).find(|other| other.is_loaded_with(alias));
                if let Some(other) = self.named(alias).or(others) {
                    let whose = if Arc::ptr_eq(other, model) { "the model itself" } else { other.id() };
                    return Err(StartError(format!(
                        "the adapter's alias {alias:?} of {:?} is a name of {whose} already: give it another",
                        model.id()
                    )));
                }
            }
        }
        Ok(())
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<Model>> {
        self.all.iter()
    }

    /// The one that serves requests that name none.
    pub fn default(&self) -> &Arc<Model> {
        &self.default
    }

    /// The model with this name.
    pub fn named(&self, name: &str) -> Option<&Arc<Model>> {
        self.all.iter().find(|model| model.is_named(name))
    }

    /// The model with this name, or with an adapter that goes by it; an error that says what there is.
    pub fn find(&self, name: Option<&str>) -> Result<Target, ApiError> {
        let target = |model, adapter| Target { model: Arc::clone(model), adapter, since: Instant::now() };
        let Some(name) = name else { return Ok(target(&self.default, None)) };
        if let Some(model) = self.named(name) {
            return Ok(target(model, None));
        }
        let adapted = self.with_adapter(name).ok_or_else(|| self.unknown(name))?;
        Ok(target(adapted, Some(AdapterChoice::Alias(name.to_owned()))))
    }

    /// What a client is told of a name that no model has.
    pub fn unknown(&self, name: &str) -> ApiError {
        model_not_found(name, &self.default, self.iter().map(|model| model.id()))
    }

    /// The model with an adapter of this alias.
    pub fn with_adapter(&self, alias: &str) -> Option<&Arc<Model>> {
        self.all.iter().find(|model| model.has_adapter(alias))
    }

    /// Whether a model may have an adapter of this alias that is loaded later: whose it is otherwise. What is loaded with another
    /// model is that one's, though it may not be there now: it comes again with it.
    pub fn check_alias(&self, alias: &str, of: &Arc<Model>) -> Result<(), ApiError> {
        let refused = |why: String| Err(ApiError::value("lora_name", why));
        if let Some(other) = self.named(alias) {
            let whose =
                if Arc::ptr_eq(other, of) { "the model itself".into() } else { format!("another model, `{}`", other.id()) };
            return refused(format!("is a name of {whose}"));
        }
        let has = |model: &Model| model.has_adapter(alias) || model.is_loaded_with(alias);
        match self.all.iter().find(|model| !Arc::ptr_eq(model, of) && has(model)) {
            Some(other) => refused(format!("is an adapter of another model, `{}`", other.id())),
            None => Ok(()),
        }
    }
}
