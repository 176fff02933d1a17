//! The adapters that a model has, by alias.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use device::{Adapter, DeviceError, cuda::CudaError, mmap::Bytes};

use super::{AdapterBuilder, AdapterChoice, AdapterOptions, Sites, gguf, peft};
use crate::{EngineError, json::read_bounded};

/// Characters of an alias at most.
const MAX_ALIAS_CHARS: usize = 128;

/// Weights of an adapter, as they were when it was loaded.
pub(crate) struct Generation {
    /// The BLAKE3 of its files, in hexadecimal.
    pub(crate) id: String,
    pub(crate) adapter: Arc<Adapter>,
    /// Requests with it of whose prompts no step had tokens.
    pub(crate) num_waiting: AtomicUsize,
    rank: usize,
    bytes: u64,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.id)
    }
}

/// An adapter that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// What requests call it.
    pub alias: String,
    /// The BLAKE3 of its files, 64 hexadecimal digits.
    pub generation: String,
    /// Where it came from.
    pub source: PathBuf,
    /// Its largest rank.
    pub rank: usize,
    /// Bytes that it keeps.
    pub bytes: u64,
}

/// Adapters, and how many more there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterStatus {
    /// Aliases.
    pub num_adapters: usize,
    /// At most.
    pub max_adapters: usize,
    /// The largest rank that is taken.
    pub max_rank: usize,
    /// Bytes of all generations that are there, those included that only running requests still use.
    pub bytes: u64,
    /// At most.
    pub max_bytes: u64,
}

/// Adapters by alias, for whoever sends requests where their adapters are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTraffic {
    /// Aliases at most.
    pub max_adapters: usize,
    /// Aliases that are loaded, in order. All of them can be in one step.
    pub loaded: Vec<String>,
    /// Those of them that a request waits for, of whose prompt no step had tokens.
    pub waiting: Vec<String>,
}

/// How an adapter is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadAdapter {
    /// In the place of another with the same alias.
    pub in_place: bool,
    /// Only where the alias stands for this generation.
    pub expected_generation: Option<String>,
}

struct Entry {
    generation: Arc<Generation>,
    source: PathBuf,
}

impl Entry {
    fn info(&self, alias: &str) -> AdapterInfo {
        let Generation { id, rank, bytes, .. } = &*self.generation;
        AdapterInfo { alias: alias.to_owned(), generation: id.clone(), source: self.source.clone(), rank: *rank, bytes: *bytes }
    }
}

#[derive(Default)]
struct State {
    aliases: BTreeMap<String, Entry>,
    /// Of requests that name none.
    active: Option<String>,
    /// All that may still be in use.
    generations: Vec<Weak<Generation>>,
}

impl State {
    fn bytes(&mut self) -> u64 {
        self.generations.retain(|generation| generation.strong_count() > 0);
        self.generations.iter().filter_map(Weak::upgrade).map(|generation| generation.bytes).sum()
    }
}

/// The aliases of a model. Any thread may ask; one at a time loads.
pub(crate) struct Registry {
    options: AdapterOptions,
    /// `None` once the model is unloaded.
    sites: Mutex<Option<Arc<Sites>>>,
    loading: Mutex<()>,
    state: Mutex<State>,
}

fn error(code: &'static str, message: String) -> EngineError {
    EngineError::Adapter { code, message }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// A registry with the adapters of `options`.
    pub(crate) fn new(options: AdapterOptions, sites: Arc<Sites>) -> Result<Self, EngineError> {
        let adapters = options.adapters.clone();
        let registry = Self { options, sites: Mutex::new(Some(sites)), loading: Mutex::default(), state: Mutex::default() };
        for (alias, source) in adapters {
            registry.load(&alias, &source, &LoadAdapter::default(), u64::MAX)?;
        }
        Ok(registry)
    }

    /// What requests call a generation; the first of its aliases.
    pub(crate) fn alias_of(&self, generation: &str) -> Option<String> {
        let state = locked(&self.state);
        state.aliases.iter().find(|(_, entry)| entry.generation.id == generation).map(|(alias, _)| alias.clone())
    }

    /// Gives the model's weights back; nothing is loaded any more.
    pub(crate) fn close(&self) {
        *locked(&self.sites) = None;
        *locked(&self.state) = State::default();
    }

    /// Loads an adapter, of which `available` bytes may come on top of what there is.
    pub(crate) fn load(&self, alias: &str, source: &Path, how: &LoadAdapter, available: u64) -> Result<AdapterInfo, EngineError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
        if alias.is_empty() || alias.len() > MAX_ALIAS_CHARS || !alias.chars().all(is_plain) {
            let message =
                format!("the alias {alias:?} must have 1 to {MAX_ALIAS_CHARS} letters, digits, or characters of - _ . : /");
            return Err(error("invalid_lora_name", message));
        }
        let _loading = match self.loading.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(error("lora_load_busy", "another adapter is being loaded: try again when it is there".into()));
            }
        };
        check_alias(&locked(&self.state), &self.options, alias, how)?;
        let sites = locked(&self.sites).clone().ok_or_else(unloaded)?;
        let used = locked(&self.state).bytes();
        let left = self.options.max_bytes.saturating_sub(used);
        let planned = planned_bytes(source).map_err(|why| named(source, why))?;
        if planned > available {
            let message = format!("{} takes {planned} bytes, and {available} are free", source.display());
            return Err(error("lora_byte_limit_exceeded", message));
        }
        let generation = Arc::new(self.open(source, &sites)?);
        let shared = locked(&self.state).generations.iter().filter_map(Weak::upgrade).find(|other| other.id == generation.id);
        let new_bytes = if shared.is_some() { 0 } else { generation.bytes };
        if new_bytes > left {
            let Generation { bytes, .. } = &*generation;
            let message = format!(
                "{} takes {bytes} bytes, and others have {used} of the {} of max_bytes: unload one, or raise it",
                source.display(),
                self.options.max_bytes
            );
            return Err(error("lora_byte_limit_exceeded", message));
        }
        let is_new = shared.is_none();
        let entry = Entry { generation: shared.unwrap_or(generation), source: source.to_owned() };
        let info = entry.info(alias);
        let (sites, mut state) = (locked(&self.sites), locked(&self.state));
        // Much may have happened while the files were read.
        check_alias(&state, &self.options, alias, how)?;
        if sites.is_none() {
            return Err(unloaded());
        }
        if is_new {
            state.generations.push(Arc::downgrade(&entry.generation));
        }
        state.aliases.insert(alias.to_owned(), entry);
        Ok(info)
    }

    fn open(&self, source: &Path, sites: &Arc<Sites>) -> Result<Generation, EngineError> {
        let builder = AdapterBuilder::new(sites, self.options.max_rank);
        read(builder, source, self.options.max_bytes).map_err(|why| named(source, why))
    }

    /// Takes an alias away; requests in flight keep what it stood for.
    pub(crate) fn unload(&self, alias: &str, expected: Option<&str>) -> Result<AdapterInfo, EngineError> {
        let mut state = locked(&self.state);
        let Some(entry) = state.aliases.get(alias) else { return Err(not_found(alias, &state)) };
        expect(alias, entry, expected)?;
        let info = entry.info(alias);
        state.aliases.remove(alias);
        state.active.take_if(|active| active == alias);
        Ok(info)
    }

    /// Makes an alias that of requests which name none.
    pub(crate) fn activate(&self, alias: Option<&str>) -> Result<(), EngineError> {
        let mut state = locked(&self.state);
        if let Some(alias) = alias.filter(|alias| !state.aliases.contains_key(*alias)) {
            return Err(not_found(alias, &state));
        }
        state.active = alias.map(str::to_owned);
        Ok(())
    }

    /// What requests run with that name none.
    pub(crate) fn active(&self) -> Option<Arc<Generation>> {
        let state = locked(&self.state);
        Some(Arc::clone(&state.aliases.get(state.active.as_ref()?)?.generation))
    }

    /// What a request is to run with.
    pub(crate) fn find(&self, choice: &AdapterChoice) -> Result<Arc<Generation>, EngineError> {
        let state = locked(&self.state);
        match choice {
            AdapterChoice::Alias(alias) => {
                state.aliases.get(alias).map(|entry| Arc::clone(&entry.generation)).ok_or_else(|| not_found(alias, &state))
            }
            AdapterChoice::Base => Err(error("lora_adapter_not_found", "the model itself has no generation".into())),
            AdapterChoice::Generation(id) => {
                let found = state.aliases.values().find(|entry| entry.generation.id == *id);
                found.map(|entry| Arc::clone(&entry.generation)).ok_or_else(|| not_found(id, &state))
            }
        }
    }

    /// All aliases, in order.
    pub(crate) fn list(&self) -> Vec<AdapterInfo> {
        locked(&self.state).aliases.iter().map(|(alias, entry)| entry.info(alias)).collect()
    }

    pub(crate) fn traffic(&self) -> AdapterTraffic {
        let state = locked(&self.state);
        let is_waited_for = |entry: &Entry| entry.generation.num_waiting.load(Ordering::Relaxed) > 0;
        let waiting = state.aliases.iter().filter(|(_, entry)| is_waited_for(entry));
        AdapterTraffic {
            max_adapters: self.options.max_adapters,
            loaded: state.aliases.keys().cloned().collect(),
            waiting: waiting.map(|(alias, _)| alias.clone()).collect(),
        }
    }

    pub(crate) fn status(&self) -> AdapterStatus {
        let mut state = locked(&self.state);
        let AdapterOptions { max_adapters, max_rank, max_bytes, .. } = self.options;
        AdapterStatus { num_adapters: state.aliases.len(), max_adapters, max_rank, bytes: state.bytes(), max_bytes }
    }
}

/// Whether an alias may stand for another adapter.
fn check_alias(state: &State, options: &AdapterOptions, alias: &str, how: &LoadAdapter) -> Result<(), EngineError> {
    let Some(entry) = state.aliases.get(alias) else {
        if let Some(expected) = &how.expected_generation {
            return Err(error("lora_adapter_not_found", format!("{alias:?} is not loaded, so not as {expected}")));
        }
        if state.aliases.len() >= options.max_adapters {
            let message = format!("{} adapters are loaded, as many as max_adapters allows: unload one", state.aliases.len());
            return Err(error("lora_adapter_limit_exceeded", message));
        }
        return Ok(());
    };
    if !how.in_place {
        let message = format!("{alias:?} is loaded already: unload it, or load in its place (load_inplace)");
        return Err(error("lora_adapter_already_loaded", message));
    }
    expect(alias, entry, how.expected_generation.as_deref())
}

/// An error of an adapter's files, which names them.
fn named(source: &Path, why: EngineError) -> EngineError {
    match why {
        EngineError::Adapter { code, message } => error(code, format!("{}: {message}", source.display())),
        EngineError::Device(DeviceError::Cuda(why @ CudaError::OutOfMemory { .. })) => {
            error("lora_byte_limit_exceeded", format!("{}: {why}", source.display()))
        }
        EngineError::Load(why) => error("invalid_lora_adapter", why),
        why => error("invalid_lora_adapter", format!("{}: {why}", source.display())),
    }
}

/// Reads an adapter's files.
pub(super) fn read(builder: AdapterBuilder<'_>, source: &Path, max_bytes: u64) -> Result<Generation, EngineError> {
    let mut hasher = blake3::Hasher::new();
    let built = if peft::is_in(source) {
        let files = peft::Files::read(source, max_bytes)?;
        hasher.update(serde_json::Value::Object(files.config.clone()).to_string().as_bytes());
        hasher.update(&files.weights);
        peft::build(builder, &files)?
    } else if source.is_file() {
        let bytes = read_bounded(source, max_bytes).map_err(|why| peft::unreadable(source, &why))?;
        hasher.update(&bytes);
        gguf::build(builder, &gguf::open(source, &Bytes::from_vec(bytes))?)?
    } else {
        return Err(no_adapter());
    };
    generation(built, &hasher)
}

/// What was put together of files that were hashed.
pub(super) fn generation(built: AdapterBuilder<'_>, hasher: &blake3::Hasher) -> Result<Generation, EngineError> {
    let (adapter, rank) = built.finish()?;
    let bytes = adapter.bytes();
    let id = hasher.finalize().to_hex().to_string();
    Ok(Generation { id, adapter: Arc::new(adapter), num_waiting: AtomicUsize::new(0), rank, bytes })
}

/// Bytes that an adapter will keep.
pub(super) fn planned_bytes(source: &Path) -> Result<u64, EngineError> {
    let values = if peft::is_in(source) {
        peft::num_values(source)?
    } else if source.is_file() {
        gguf::num_values(source)?
    } else {
        return Err(no_adapter());
    };
    Ok(values.saturating_mul(size_of::<f32>() as u64))
}

fn expect(alias: &str, entry: &Entry, expected: Option<&str>) -> Result<(), EngineError> {
    match expected {
        Some(expected) if expected != entry.generation.id => {
            let message = format!("{alias:?} is generation {}, not {expected}", entry.generation.id);
            Err(error("lora_generation_mismatch", message))
        }
        _ => Ok(()),
    }
}

fn not_found(name: &str, state: &State) -> EngineError {
    let aliases: Vec<_> = state.aliases.keys().map(String::as_str).collect();
    let there = if aliases.is_empty() { "none is loaded".to_owned() } else { format!("there are {}", aliases.join(", ")) };
    error("lora_adapter_not_found", format!("there is no adapter {name:?}; {there}"))
}

fn no_adapter() -> EngineError {
    error("adapter_file_not_found", "neither a folder with an adapter_config.json nor a GGUF file".to_owned())
}

fn unloaded() -> EngineError {
    error("lora_runtime_unavailable", "the model was unloaded".into())
}
