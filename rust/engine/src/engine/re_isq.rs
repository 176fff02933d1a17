//! Quantizing a loaded model anew, while it serves: the caller's side. The engine thread's is in `thread/re_isq.rs`.
//!
//! The new weights are made from the model's files, beside the old ones. Requests that were accepted before are answered by the
//! old ones to their end; later ones wait, and are answered by the new ones.

use std::sync::{Arc, TryLockError, mpsc};

use super::{
    Engine, LoadProgress, Loaded, ended,
    load::{describe, open_files, planned_bytes, runner_options},
    thread::{Command, NewWeights},
    tier,
};
use crate::{EngineError, Isq, model_weights::ModelWeights};

impl Engine {
    /// Quantizes the weights anew from the model's files, and returns when requests are answered by the new ones. Nothing that
    /// was cached before is served after: keys and values are those of other weights. `progress` is called on this thread.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] where the new weights do not fit beside the old ones, where the files have nothing to
    /// quantize or have changed, or while another thread does the same; [`EngineError::NotSupported`] with adapters; those of
    /// loading. The old weights then stay.
    pub fn re_isq(&self, isq: Isq, progress: &dyn Fn(LoadProgress)) -> Result<(), EngineError> {
        let shared = &*self.shared;
        let _one = match shared.re_isq.try_lock() {
            Ok(one) => one,
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(EngineError::InvalidArgument("the weights are being quantized already: wait for it".into()));
            }
        };
        let backend = shared.backend.upgrade().ok_or_else(ended)?;
        let refused = |text: String| Err(EngineError::NotSupported(text));
        if shared.adapters.is_some() || shared.has_own_adapters() {
            return refused("quantizing anew with adapters is not supported: load the model with in_situ_quant (--isq)".into());
        }
        let config = super::EngineConfig { in_situ_quant: Some(isq), ..shared.config.clone() };
        let files = open_files(&shared.source, &config)?;
        let old = shared.loaded();
        check_room(isq, planned_bytes(&files, &config, &*backend)?, self.available_bytes()?)?;
        let weights = ModelWeights::load(&files, &backend, runner_options(&config, &old.plan), progress)?;
        let digest = tier::digest(&files, &config, &*backend)?;
        let weight_bytes = weights.bytes + shared.draft_bytes;
        let plan = old.plan.with_weights(weight_bytes);
        let description = describe(&files, &config, &plan, &*backend);
        let (reply, answer) = mpsc::channel();
        let new = NewWeights { weights, files, config, digest, reply };
        drop((backend, old));
        shared.inbox.send(Command::ReIsq(Box::new(new))).map_err(|_| ended())?;
        let flush = answer.recv().map_err(|_| ended())??;
        shared.set_loaded(Arc::new(Loaded { plan, description, weight_bytes, _flush: flush }));
        Ok(())
    }
}

/// That so many bytes of weights fit beside the old ones.
fn check_room(isq: Isq, bytes: u64, free: u64) -> Result<(), EngineError> {
    const MIB: u64 = 1 << 20;
    if bytes <= free {
        return Ok(());
    }
    Err(EngineError::InvalidArgument(format!(
        "the weights take {} MB as {isq}, beside those that serve until then, and {} MB are free: make the KV pool smaller \
         (pa_gpu_mem), or load the model anew with in_situ_quant (--isq)",
        bytes.div_ceil(MIB),
        free / MIB
    )))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use device::{
        Backend,
        cpu::{CpuBackend, Isa},
    };

    use super::*;
    use crate::{
        FinishReason, GenerationRequest, ModelDType, ModelSource, Prompt, SamplingParams,
        engine::{EngineConfig, load::load_with_backend, thread::EngineThread},
    };

    fn source() -> ModelSource {
        ModelSource::HuggingFace { path: goldens::dir().join("text/llama"), tokenizer_json: None }
    }

    fn start(isq: Option<&str>) -> (Engine, EngineThread) {
        let in_situ_quant = isq.map(|name| name.parse().unwrap());
        let config = EngineConfig { dtype: ModelDType::F32, max_num_seqs: 2, in_situ_quant, ..EngineConfig::default() };
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(Isa::detect(), 1).unwrap());
        let (shared, thread) = load_with_backend(&source(), &config, &backend, &|_| {}).unwrap();
        (Engine { shared: Arc::new(shared) }, thread)
    }

    fn request(max_tokens: usize) -> GenerationRequest {
        let sampling = SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            logprobs: Some(0),
            ..SamplingParams::default()
        };
        GenerationRequest::new(Prompt::TokenIds((10..50).collect()), sampling)
    }

    fn said(completion: &crate::Completion) -> Vec<(u32, Option<f32>)> {
        completion.choices[0].logprobs.iter().flatten().map(|token| (token.token_id, token.logprob)).collect()
    }

    /// What a model says that was loaded so.
    fn expected(isq: Option<&str>, max_tokens: usize) -> Vec<(u32, Option<f32>)> {
        let (engine, thread) = start(isq);
        let serving = thread::spawn(move || thread.run());
        let said = said(&engine.submit(request(max_tokens)).unwrap().wait().unwrap());
        drop(engine);
        serving.join().unwrap();
        said
    }

    /// A thread that has heard of new weights while it answers a request.
    fn asked(engine: &Engine, thread: &mut EngineThread) -> thread::JoinHandle<Result<(), EngineError>> {
        assert!(thread.turn());
        let asking = thread::spawn({
            let engine = engine.clone();
            move || engine.re_isq("Q8_0".parse().unwrap(), &|_| {})
        });
        while !thread.waits_for_weights() {
            assert!(thread.turn());
            thread::yield_now();
        }
        asking
    }

    #[test]
    fn requests_in_flight_are_answered_by_the_old_weights_and_later_ones_by_the_new() {
        let (engine, mut thread) = start(None);
        let first = engine.submit(request(400)).unwrap();
        let asking = asked(&engine, &mut thread);
        let second = engine.submit(request(5)).unwrap();
        let drain = engine.drain().unwrap();
        let serving = thread::spawn(move || thread.run());
        let completion = first.wait().unwrap();
        assert_eq!(completion.choices[0].finish_reason, FinishReason::Length);
        let old = expected(None, 400);
        assert_eq!(said(&completion), old);
        let new = expected(Some("Q8_0"), 5);
        assert_ne!(new, old[..5], "the weights make a difference");
        assert_eq!(said(&second.wait().unwrap()), new, "accepted before the drain, and so answered");
        asking.join().unwrap().unwrap();
        assert!(drain.wait_timeout(std::time::Duration::from_secs(60)).unwrap());
        drop(engine);
        serving.join().unwrap();
    }

    #[test]
    fn unloading_ends_the_wait_for_weights_and_those_who_wait_for_them() {
        let (engine, mut thread) = start(None);
        let first = engine.submit(request(400)).unwrap();
        let asking = asked(&engine, &mut thread);
        let second = engine.submit(request(5)).unwrap();
        let unloading = thread::spawn({
            let engine = engine.clone();
            move || engine.unload()
        });
        thread.run();
        unloading.join().unwrap().unwrap();
        for stream in [first, second] {
            assert_eq!(stream.wait().unwrap().choices[0].finish_reason, FinishReason::Canceled);
        }
        let error = asking.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("unloaded"), "{error}");
    }

    #[test]
    fn weights_without_room_are_refused_with_what_they_take() {
        let isq: Isq = "Q4K".parse().unwrap();
        check_room(isq, 5 << 20, 5 << 20).unwrap();
        let error = check_room(isq, (5 << 20) + 1, 5 << 20).unwrap_err().to_string();
        assert!(error.contains("take 6 MB as Q4_K") && error.contains("5 MB are free"), "{error}");
    }
}
