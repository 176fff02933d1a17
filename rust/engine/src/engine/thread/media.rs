//! The images and sounds of requests: their vectors, kept from step to step and from request to request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use paged::{EncoderCache, EncoderIndex, EncoderLease};

use super::EngineThread;
use crate::{
    EngineError, FinishReason, MediaKind,
    engine::output::{ActiveRequest, End, SubmittedRequest},
    error::caught,
    input_batch::ItemRows,
    media::{PromptItem, prompt::PlacedItem},
    model::{cross::SeenRows, decoder::VectorRows},
    model_runner::{Encoded, ModelRunner},
};

/// What a model that sees or hears has beside the scheduler.
pub(super) struct Senses {
    cache: OutputCache,
    /// Requests whose images and sounds are being encoded, an image or a chunk a turn, so that others are answered meanwhile, and
    /// one of each in turn, so that nobody waits for a long sound of another; the scheduler does not know of them yet.
    pub(super) waiting: VecDeque<Waiting>,
}

/// A request whose images and sounds are being encoded.
pub(super) struct Waiting {
    submitted: SubmittedRequest,
    held: HeldOutputs,
}

/// Outputs that stay for a request until its prompt is computed, or, where layers look at images, for each choice to its end.
#[derive(Clone, Default)]
pub(super) struct HeldOutputs {
    leases: Vec<Arc<EncoderLease>>,
    /// Of those that had to be encoded for it, what they are.
    pub(super) encoded: Vec<MediaKind>,
}

/// Outputs of the encoder within a budget. One that finds no room is made for the step that needs it, and forgotten, so nobody
/// waits for room; but where layers look at images, all steps need them, and requests wait until there is room for all of theirs.
struct OutputCache {
    books: EncoderCache,
    outputs: HashMap<EncoderIndex, Encoded>,
}

/// What the items of a step are to its rows.
#[derive(Default)]
pub(super) struct StepMedia {
    pub(super) own: Vec<VectorRows>,
    pub(super) seen: Vec<SeenRows>,
    /// Of each item, how many images or sounds had to be encoded for it.
    pub(super) num_encoded: Vec<usize>,
}

impl Senses {
    pub(super) fn new(budget_bytes: u64) -> Self {
        let books = EncoderCache::new(budget_bytes);
        let cache = OutputCache { books, outputs: HashMap::new() };
        Self { cache, waiting: VecDeque::new() }
    }

    /// Forgets all outputs that no request holds.
    pub(super) fn forget(&mut self) {
        self.cache.books.clear();
        for dropped in self.cache.books.drain_dropped() {
            self.cache.outputs.remove(&dropped);
        }
    }

    /// What the items of a step are to its rows.
    pub(super) fn encoded(&mut self, runner: &mut ModelRunner, items: &[ItemRows]) -> Result<StepMedia, EngineError> {
        let (mut leases, mut media) = (Vec::new(), StepMedia::default());
        for ItemRows { item, rows, .. } in items {
            // Nobody waits here for one before it.
            self.cache.books.begin_step();
            let lease = self.cache.acquire(runner, item);
            let (output, is_new) = self.cache.output(runner, item, lease.as_ref())?;
            leases.extend(lease);
            match output {
                Encoded::Vectors(vectors) => {
                    media.own.push(VectorRows { vectors, num_planes: runner.num_planes(item.kind), rows: rows.clone() });
                }
                Encoded::Kept(kv) => media.seen.push(SeenRows { kv, rows: rows.clone() }),
            }
            media.num_encoded.push(if is_new { item.num_encoded() } else { 0 });
        }
        Ok(media)
    }

    /// Encodes the next item of a request; true when there is none left, or no room. Where layers look at images, a request that
    /// finds no room for all of its images takes none: what it would hold is another's meanwhile.
    fn encode_next(&mut self, runner: &mut ModelRunner, waiting: &mut Waiting) -> Result<bool, EngineError> {
        self.cache.books.begin_step();
        let Waiting { submitted, held } = waiting;
        let items = submitted.origin.items.as_deref().map_or(&[][..], |items| &items.items);
        if runner.config().is_crossed() && held.leases.is_empty() {
            let all: Option<Vec<_>> = items.iter().map(|placed| self.cache.acquire(runner, &placed.item).map(Arc::new)).collect();
            let Some(all) = all else { return Ok(false) };
            held.leases = all;
        }
        for (index, placed) in items.iter().enumerate() {
            if index == held.leases.len() {
                let Some(lease) = self.cache.acquire(runner, &placed.item) else { return Ok(true) };
                held.leases.push(Arc::new(lease));
            }
            let (_, is_new) = self.cache.output(runner, &placed.item, Some(&held.leases[index]))?;
            if is_new {
                held.encoded.extend(std::iter::repeat_n(placed.item.kind, placed.item.num_encoded()));
                return Ok(index + 1 == items.len());
            }
        }
        Ok(true)
    }

    /// # Errors
    /// [`EngineError::InvalidArgument`] where layers look at images and all of a request cannot be there at once.
    fn check(&self, runner: &ModelRunner, items: &[PlacedItem]) -> Result<(), EngineError> {
        if !runner.config().is_crossed() {
            return Ok(());
        }
        let bytes = items.iter().map(|placed| runner.encoded_bytes(&placed.item)).fold(0, u64::saturating_add);
        self.cache.books.check(bytes).map_err(|why| EngineError::InvalidArgument(format!("the images of a request: {why}")))
    }
}

impl OutputCache {
    /// `None`: there is no room.
    fn acquire(&mut self, runner: &ModelRunner, item: &PromptItem) -> Option<EncoderLease> {
        let lease = self.books.acquire(item.key, runner.encoded_bytes(item)).unwrap_or_default();
        for dropped in self.books.drain_dropped() {
            self.outputs.remove(&dropped);
        }
        lease
    }

    /// What an item becomes, kept where there is a lease, and whether it had to be made.
    fn output(
        &mut self,
        runner: &mut ModelRunner,
        item: &PromptItem,
        lease: Option<&EncoderLease>,
    ) -> Result<(Encoded, bool), EngineError> {
        if let Some(lease) = lease.filter(|lease| self.books.is_encoded(lease))
            && let Some(output) = self.outputs.get(&lease.index())
        {
            return Ok((output.clone(), false));
        }
        let output = runner.encode(item)?;
        if let Some(lease) = lease {
            self.outputs.insert(lease.index(), output.clone());
            self.books.mark_encoded(lease);
        }
        Ok((output, true))
    }
}

impl EngineThread {
    /// Begins a request, at once or when its images and sounds are encoded.
    pub(super) fn receive_request(&mut self, submitted: SubmittedRequest) {
        let items = submitted.origin.items.as_deref().map_or(&[][..], |items| &items.items);
        let has_media = !items.is_empty();
        if let Some(Err(error)) = self.senses.as_ref().map(|senses| senses.check(&self.runner, items)) {
            return ActiveRequest::new(submitted).abandon(error);
        }
        match &mut self.senses {
            Some(senses) if has_media && !self.scheduler.is_draining() => {
                senses.waiting.push_back(Waiting { submitted, held: HeldOutputs::default() });
            }
            _ => self.submit(submitted, HeldOutputs::default()),
        }
    }

    /// Encodes an item of a request that waits for it, and begins the request once it has all.
    pub(super) fn see(&mut self) {
        let Some(senses) = &mut self.senses else { return };
        senses.waiting.retain(|waiting| !waiting.submitted.outbox.is_cancelled());
        let Some(mut waiting) = senses.waiting.pop_front() else { return };
        // One that is too late is told so by the scheduler.
        let is_late = waiting.submitted.service.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let runner = &mut self.runner;
        match caught(|| if is_late { Ok(true) } else { senses.encode_next(runner, &mut waiting) }) {
            Ok(Ok(true)) => self.submit(waiting.submitted, waiting.held),
            Ok(Ok(false)) => senses.waiting.push_back(waiting),
            Ok(Err(error)) => self.refuse(waiting, error),
            Err(why) => self.refuse(waiting, EngineError::Internal(why)),
        }
    }

    fn refuse(&mut self, waiting: Waiting, error: EngineError) {
        tracing::error!("an image or a sound could not be encoded: {error}");
        ActiveRequest::new(waiting.submitted).abandon(error);
        self.check_device();
    }

    /// Begins all requests that wait for images and sounds, which are then encoded in the steps that need them.
    pub(super) fn begin_waiting(&mut self) {
        let waiting = self.senses.as_mut().map(|senses| std::mem::take(&mut senses.waiting)).unwrap_or_default();
        for waiting in waiting {
            self.submit(waiting.submitted, waiting.held);
        }
    }

    /// Ends them.
    pub(super) fn cancel_waiting(&mut self) {
        let waiting = self.senses.as_mut().map(|senses| std::mem::take(&mut senses.waiting)).unwrap_or_default();
        for waiting in waiting {
            let mut request = ActiveRequest::new(waiting.submitted);
            request.begin();
            (0..request.num_choices()).for_each(|choice| request.finish(choice, End::new(FinishReason::Canceled)));
            self.ended.push(request);
        }
    }

    /// Requests that wait for images and sounds.
    pub(super) fn num_waiting_for_media(&self) -> usize {
        self.senses.as_ref().map_or(0, |senses| senses.waiting.len())
    }
}
