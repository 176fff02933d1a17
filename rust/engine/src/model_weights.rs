//! The weights of a model in the form that a backend computes with.

use std::{cell::Cell, sync::Arc};

use device::{Backend, mmap::FileWatch};

use crate::{
    EngineError, LoadProgress,
    embedding::{Embedder, Heads},
    lora::{Recorder, Sites},
    media::{Encoders, MediaEncoder, TowerWeights},
    model::{Decoder, ModelFiles, decoder::Head as MtpHead, loader::Loader},
    model_runner::{RunnerOptions, max_logit_rows},
};

/// All weights of a model.
pub struct ModelWeights {
    pub(crate) decoder: Decoder,
    /// As they are kept, those of files where they are used in place.
    pub(crate) bytes: u64,
    /// Of the files that weights are read from where they lie.
    watches: Vec<FileWatch>,
    /// Of models that make embeddings.
    pub(crate) embedder: Option<Embedder>,
    /// Of models that see or hear.
    pub(crate) encoders: Encoders<MediaEncoder>,
    /// What adapters may change.
    pub(crate) sites: Arc<Sites>,
}

impl ModelWeights {
    /// Loads them; `progress` is called as they are done.
    ///
    /// # Errors
    /// [`EngineError::Load`] for files that cannot be honoured, [`EngineError::Device`] where the backend takes no such weights.
    pub fn load(
        files: &ModelFiles,
        backend: &Arc<dyn Backend>,
        options: RunnerOptions,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Self, EngineError> {
        let total_bytes = files.weight_bytes();
        let done = Cell::new(0);
        let count = |bytes: u64| {
            done.set((done.get() + bytes).min(total_bytes));
            progress(LoadProgress { done_bytes: done.get(), total_bytes });
        };
        let mut loader = Loader {
            weights: files.weights(),
            isq: files.isq(),
            importance: files.importance(),
            config: files.config(),
            backend: &**backend,
            precision: options.precision,
            progress: &count,
            bytes: 0,
        };
        let mut recorder = Recorder::new(&mut loader);
        let decoder = Decoder::new(&mut recorder, files.config())?;
        let sites = Arc::new(recorder.sites(backend));
        let heads = files.embedding().map(|embedding| Heads::new(&mut loader, embedding)).transpose()?;
        let mut bytes = loader.bytes;
        let mut encoders = Encoders::default();
        if let Some(media) = files.media() {
            let mut weights = TowerWeights::load(files.encoder_weights(), &**backend, options.precision, &count)?;
            encoders = media.try_map(|config| MediaEncoder::new(&mut weights, config, options.precision))?;
            bytes += weights.bytes;
        }
        progress(LoadProgress { done_bytes: total_bytes, total_bytes });
        let rows = max_logit_rows(options.max_num_seqs);
        let embedder = files.embedding().zip(heads).map(|(config, heads)| Embedder::new(&**backend, config, heads, rows));
        Ok(Self { decoder, bytes, watches: files.watches().cloned().collect(), embedder: embedder.transpose()?, encoders, sites })
    }

    /// Loads a head that predicts further tokens, which shares the rest with its model.
    ///
    /// # Errors
    /// As those of [`Self::load`].
    pub(crate) fn load_head(
        files: &ModelFiles,
        model: &Self,
        backend: &Arc<dyn Backend>,
        options: RunnerOptions,
    ) -> Result<Self, EngineError> {
        let mut loader = Loader {
            weights: files.weights(),
            isq: files.isq(),
            importance: None,
            config: files.config(),
            backend: &**backend,
            precision: options.precision,
            progress: &|_| (),
            bytes: 0,
        };
        let mut recorder = Recorder::new(&mut loader);
        let decoder = MtpHead::new(&mut recorder, files.config())?.beside(&model.decoder);
        let sites = Arc::new(recorder.sites(backend));
        let (bytes, watches) = (loader.bytes, files.watches().cloned().collect());
        Ok(Self { decoder, bytes, watches, embedder: None, encoders: Encoders::default(), sites })
    }

    /// That no file has changed.
    ///
    /// # Errors
    /// [`EngineError::Device`] that names the file.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        Ok(self.watches.iter().try_for_each(FileWatch::check)?)
    }
}
