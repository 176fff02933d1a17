//! CUDA graphs: the embedding and the layers of a step that decodes, with or without drafts, launched as one.
//!
//! A step of a padded size is recorded when it is first met. It runs twice on padding rows: once to make every buffer and
//! load every kernel, once to be recorded as a graph. What a real step adds is in lists at addresses that do not change
//! ([`PaddedLists`]).

use std::{
    any::Any,
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use crate::{StepGraphs, StepMetadata, kernel_args::DevicePtr};

use super::{
    CudaBackend, CudaError,
    backend::State,
    driver::Driver,
    graph_lists::PaddedLists,
    graph_plan::Bucket,
    lora::{KnownAdapters, Uses},
};

/// Bytes of the card that graphs may take; they are reserved before the KV pool is sized.
pub const RESERVED_BYTES: u64 = 256 << 20;

/// The graphs of a model.
#[derive(Default)]
pub struct Graphs {
    /// `None`: steps of this size run as they are.
    by_bucket: BTreeMap<Bucket, Option<Graph>>,
    /// Addresses that the graphs were recorded with.
    buffers: Vec<DevicePtr>,
    /// What those with adapters were recorded for.
    adapters: KnownAdapters,
    current: Option<Bucket>,
}

impl Graphs {
    /// Forgets what was recorded with buffers that are gone. One that is new was none, 0, before, and is in no recording.
    fn know(&mut self, buffers: Vec<DevicePtr>) {
        let mut pairs = self.buffers.iter().zip(&buffers);
        if self.buffers.len() == buffers.len() && pairs.all(|(known, now)| *known == 0 || known == now) {
            self.buffers = buffers;
        } else {
            *self = Self { buffers, adapters: std::mem::take(&mut self.adapters), ..Self::default() };
        }
    }
}

struct Graph {
    lists: PaddedLists,
    recorded: Recorded,
    /// Bytes that the card had less after recording.
    bytes: u64,
}

/// What a driver recorded, given back when it is dropped.
struct Recorded {
    driver: Arc<dyn Driver>,
    id: u64,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.driver.forget(self.id);
    }
}

/// Embeds tokens and runs the layers.
type Run<'a> = &'a mut dyn FnMut(&[u32], &StepMetadata);

impl CudaBackend {
    /// Puts the lists of a step where its graph expects them; whether it has one. See [`crate::StepRecorder::begin_recorded`].
    pub(super) fn try_begin_recorded(
        &self,
        graphs: &mut StepGraphs,
        token_ids: &[u32],
        step: &StepMetadata,
        run: Run<'_>,
    ) -> Result<bool, CudaError> {
        let max_rows = graphs.max_rows;
        let Some(bucket) = Bucket::of(step, max_rows, graphs.max_request_rows) else { return Ok(false) };
        let graphs: &mut Graphs = graphs.recorded();
        self.state().lists.reserve_tables(self.driver(), step)?;
        graphs.know(self.buffers());
        if graphs.adapters.add(&step.adapters) {
            graphs.by_bucket.retain(|bucket, _| !bucket.has_adapters);
        }
        if !graphs.by_bucket.contains_key(&bucket) {
            let taken: u64 = graphs.by_bucket.values().flatten().map(|graph| graph.bytes).sum();
            let uses = graphs.adapters.uses();
            let recorded = match self.record([bucket, Bucket::largest(max_rows)], (step, uses), run) {
                Ok(graph) if taken + graph.bytes <= RESERVED_BYTES => Some(graph),
                other => {
                    let why =
                        other.err().unwrap_or_else(|| "CUDA graphs have taken all the memory that was reserved for them".into());
                    tracing::warn!("steps of {} rows run without a CUDA graph: {why}", bucket.rows);
                    None
                }
            };
            {
                let State { constants, groups, .. } = &mut *self.state();
                constants.mark_recorded();
                groups.mark_recorded();
            }
            // Recording makes buffers, and graphs that knew smaller ones are no good.
            graphs.know(self.buffers());
            graphs.by_bucket.insert(bucket, recorded);
        }
        let Some(Some(graph)) = graphs.by_bucket.get_mut(&bucket) else { return Ok(false) };
        let State { lists, lora, .. } = &mut *self.state();
        lora.go_back(None);
        lists.upload_padded(&mut graph.lists, token_ids, step)?;
        graphs.current = Some(bucket);
        Ok(true)
    }

    /// Runs the step that was begun.
    pub(super) fn try_replay(&self, graphs: &mut StepGraphs) -> Result<(), CudaError> {
        let graphs: &mut Graphs = graphs.recorded();
        let bucket = graphs.current.take().expect("a step with a graph was begun");
        let graph = graphs.by_bucket[&bucket].as_ref().expect("the graph of the step that was begun");
        // SAFETY: the buffers are those of the recording, the model's own live as long as the graphs, and the lists were put in
        // place.
        unsafe { self.driver().replay(graph.recorded.id) }
    }

    fn record(
        &self,
        [bucket, largest]: [Bucket; 2],
        (step, uses): (&StepMetadata, &Arc<Uses>),
        run: Run<'_>,
    ) -> Result<Graph, String> {
        let text = |error: CudaError| error.to_string();
        let driver = self.driver();
        let rehearsal = bucket.rehearsal(step.groups.len(), !step.state_slots.is_empty());
        let token_ids = vec![0; bucket.rows];
        self.begin(&rehearsal).map_err(text)?;
        if bucket.has_adapters {
            let State { lists, lora, .. } = &mut *self.state();
            lora.rehearse(lists, bucket.rows, uses).map_err(text)?;
        }
        // What fails here fails as any step.
        run(&token_ids, &rehearsal);
        let lists = self.state().lists.padded(driver, bucket, largest).map_err(text)?;
        let free_before = driver.memory().map_err(text)?.free_bytes;
        {
            let State { lists: own, lora, .. } = &mut *self.state();
            own.begin_padded(&lists);
            lora.go_back(lists.adapters(uses));
        }
        driver.begin_recording().map_err(text)?;
        let ran = caught(|| run(&token_ids, &rehearsal));
        // Also after a failure, or everything would be recorded from then on.
        let recorded = driver.end_recording().map(|id| Recorded { driver: Arc::clone(driver), id });
        ran?;
        let recorded = recorded.map_err(text)?;
        let free = driver.memory().map_err(text)?.free_bytes;
        Ok(Graph { lists, recorded, bytes: free_before.saturating_sub(free) })
    }
}

/// Runs what can only panic with the driver's words.
fn caught(run: impl FnOnce()) -> Result<(), String> {
    let words = |panic: Box<dyn Any + Send>| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => other.downcast_ref::<&str>().map_or_else(|| "a panic".to_owned(), |text| (*text).to_owned()),
    };
    catch_unwind(AssertUnwindSafe(run)).map_err(words)
}
