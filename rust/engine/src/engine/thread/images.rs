//! The images of requests: their vectors, kept from step to step and from request to request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use paged::{EncoderCache, EncoderIndex, EncoderLease};

use super::EngineThread;
use crate::{
    EngineError, FinishReason,
    engine::output::{ActiveRequest, End, SubmittedRequest},
    error::caught,
    input_batch::ImageRows,
    model::decoder::VectorRows,
    model_runner::ModelRunner,
    vision::PromptImage,
};

/// What a model that sees has beside the scheduler.
pub(super) struct Sight {
    cache: ImageCache,
    /// Requests whose images are being encoded, an image a turn, so that others are answered meanwhile; the scheduler does not
    /// know of them yet.
    pub(super) waiting: VecDeque<Seeing>,
}

/// A request whose images are being encoded.
pub(super) struct Seeing {
    submitted: SubmittedRequest,
    held: HeldImages,
}

/// Outputs that stay for a request until its prompt is computed.
#[derive(Default)]
pub(super) struct HeldImages {
    leases: Vec<EncoderLease>,
    /// How many of them had to be encoded for it.
    pub(super) num_encoded: usize,
}

/// Outputs of the encoder within a budget. One that finds no room is made for the step that needs it, and forgotten: so nobody
/// waits for room.
struct ImageCache {
    books: EncoderCache,
    outputs: HashMap<EncoderIndex, Arc<Vec<f32>>>,
}

impl Sight {
    pub(super) fn new(budget_bytes: u64) -> Self {
        let books = EncoderCache::new(budget_bytes);
        let cache = ImageCache { books, outputs: HashMap::new() };
        Self { cache, waiting: VecDeque::new() }
    }

    /// The vectors of the images of a step, and which of them had to be encoded.
    pub(super) fn vectors(
        &mut self,
        runner: &mut ModelRunner,
        images: &[ImageRows],
    ) -> Result<(Vec<VectorRows>, Vec<bool>), EngineError> {
        self.cache.books.begin_step();
        let mut leases = Vec::new();
        let (mut vectors, mut encoded) = (Vec::with_capacity(images.len()), Vec::with_capacity(images.len()));
        for ImageRows { image, rows, .. } in images {
            let lease = self.cache.acquire(runner, image);
            let (output, is_new) = self.cache.output(runner, image, lease.as_ref())?;
            leases.extend(lease);
            vectors.push(VectorRows { vectors: output, num_planes: runner.num_planes(), rows: rows.clone() });
            encoded.push(is_new);
        }
        Ok((vectors, encoded))
    }

    /// Encodes the next image of a request; true when there is none left, or no room.
    fn encode_next(&mut self, runner: &mut ModelRunner, seeing: &mut Seeing) -> Result<bool, EngineError> {
        self.cache.books.begin_step();
        let Seeing { submitted, held } = seeing;
        let images = submitted.origin.images.as_deref().map_or(&[][..], |images| &images.images);
        while let Some(placed) = images.get(held.leases.len()) {
            let Some(lease) = self.cache.acquire(runner, &placed.image) else { return Ok(true) };
            let (_, is_new) = self.cache.output(runner, &placed.image, Some(&lease))?;
            held.leases.push(lease);
            if is_new {
                held.num_encoded += 1;
                return Ok(held.leases.len() == images.len());
            }
        }
        Ok(true)
    }
}

impl ImageCache {
    /// `None`: there is no room.
    fn acquire(&mut self, runner: &ModelRunner, image: &PromptImage) -> Option<EncoderLease> {
        let bytes = (image.layout.num_rows * runner.num_planes() * runner.config().hidden_size * size_of::<f32>()) as u64;
        let lease = self.books.acquire(image.key, bytes).unwrap_or_default();
        for dropped in self.books.drain_dropped() {
            self.outputs.remove(&dropped);
        }
        lease
    }

    /// An image's vectors, kept where there is a lease, and whether they had to be made.
    fn output(
        &mut self,
        runner: &mut ModelRunner,
        image: &PromptImage,
        lease: Option<&EncoderLease>,
    ) -> Result<(Arc<Vec<f32>>, bool), EngineError> {
        if let Some(lease) = lease.filter(|lease| self.books.is_encoded(lease))
            && let Some(output) = self.outputs.get(&lease.index())
        {
            return Ok((Arc::clone(output), false));
        }
        let output = Arc::new(runner.encode(image)?);
        if let Some(lease) = lease {
            self.outputs.insert(lease.index(), Arc::clone(&output));
            self.books.mark_encoded(lease);
        }
        Ok((output, true))
    }
}

impl EngineThread {
    /// Begins a request, at once or when its images are encoded.
    pub(super) fn receive_request(&mut self, submitted: SubmittedRequest) {
        let has_images = submitted.origin.images.as_ref().is_some_and(|images| !images.images.is_empty());
        match &mut self.sight {
            Some(sight) if has_images && !self.scheduler.is_draining() => {
                sight.waiting.push_back(Seeing { submitted, held: HeldImages::default() });
            }
            _ => self.submit(submitted, HeldImages::default()),
        }
    }

    /// Encodes an image of a request that waits for it, and begins the request once it has all.
    pub(super) fn see(&mut self) {
        let Some(sight) = &mut self.sight else { return };
        sight.waiting.retain(|seeing| !seeing.submitted.outbox.is_cancelled());
        let Some(mut seeing) = sight.waiting.pop_front() else { return };
        // One that is too late is told so by the scheduler.
        let is_late = seeing.submitted.service.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let runner = &mut self.runner;
        match caught(|| if is_late { Ok(true) } else { sight.encode_next(runner, &mut seeing) }) {
            Ok(Ok(true)) => self.submit(seeing.submitted, seeing.held),
            Ok(Ok(false)) => sight.waiting.push_front(seeing),
            Ok(Err(error)) => self.refuse(seeing, error),
            Err(why) => self.refuse(seeing, EngineError::Internal(why)),
        }
    }

    fn refuse(&mut self, seeing: Seeing, error: EngineError) {
        tracing::error!("an image could not be encoded: {error}");
        ActiveRequest::new(seeing.submitted).abandon(error);
        self.check_device();
    }

    /// Begins all requests that wait for images, which are then encoded in the steps that need them.
    pub(super) fn begin_seeing(&mut self) {
        let waiting = self.sight.as_mut().map(|sight| std::mem::take(&mut sight.waiting)).unwrap_or_default();
        for seeing in waiting {
            self.submit(seeing.submitted, seeing.held);
        }
    }

    /// Ends them.
    pub(super) fn cancel_seeing(&mut self) {
        let waiting = self.sight.as_mut().map(|sight| std::mem::take(&mut sight.waiting)).unwrap_or_default();
        for seeing in waiting {
            let mut request = ActiveRequest::new(seeing.submitted);
            request.begin();
            (0..request.num_choices()).for_each(|choice| request.finish(choice, End::new(FinishReason::Canceled)));
            self.ended.push(request);
        }
    }

    /// Requests that wait for images.
    pub(super) fn num_seeing(&self) -> usize {
        self.sight.as_ref().map_or(0, |sight| sight.waiting.len())
    }
}
