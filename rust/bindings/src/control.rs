//! What a `Runner` tells of its pool, and how it is held and drained.

use std::{
    sync::{Mutex, PoisonError},
    task::Poll,
    time::{Duration, Instant},
};

use pyo3::{prelude::*, types::PyDict};

use engine::Isq;

use crate::{
    arguments::{Real, text},
    detach::{POLL, enter, wait},
    exceptions::raise,
    runner::Runner,
    service, stats,
};

#[pymethods]
impl Runner {
    /// Schedules nothing until `resume()`. Requests are accepted and wait, running ones keep their blocks, and deadlines pass.
    fn pause(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.engine()?;
        enter(py, || engine.pause())
    }

    /// Goes on after `pause()`, and accepts requests again after `drain()`.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.engine()?;
        enter(py, || engine.resume())
    }

    /// Accepts no more requests, which raise `DrainingError` from now on until `resume()`, and waits until those there are have
    /// ended, or `timeout` seconds, with 0 not at all; whether none is left. A pause ends.
    #[pyo3(signature = (timeout=None))]
    fn drain(&self, py: Python<'_>, timeout: Option<Real>) -> PyResult<bool> {
        let timeout =
            timeout.map(|Real(seconds)| if seconds == 0.0 { Ok(Duration::ZERO) } else { service::seconds("timeout", seconds) });
        let timeout = timeout.transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let engine = self.engine()?;
        let drain = enter(py, || {
            let drain = engine.drain()?;
            if timeout == Some(Duration::ZERO) {
                // Answered behind the drain, which has told by then if nobody is to be waited for.
                engine.kv_cache_stats()?;
            }
            Ok(Mutex::new(drain))
        })?;
        wait(py, || {
            let left = deadline.map_or(POLL, |deadline| deadline.saturating_duration_since(Instant::now()).min(POLL));
            let is_done = drain.lock().unwrap_or_else(PoisonError::into_inner).wait_timeout(left)?;
            Ok(if is_done || left.is_zero() { Poll::Ready(is_done) } else { Poll::Pending })
        })
    }

    /// Quantizes the weights anew from the model's files, to a type by its name as `in_situ_quant` takes it, and returns when
    /// requests are answered by the new ones. Those that were accepted before are answered by the old ones to their end; later
    /// ones wait for the new ones. Both weights are in memory meanwhile. No keys and values that were cached before are used
    /// after. `load_progress` is called with the bytes of weights done and in all.
    ///
    /// Raises `ValueError` where the new weights do not fit, or where the files are quantized already, and `NotImplementedError`
    /// with adapters or on a GPU; the old weights then go on.
    #[pyo3(signature = (dtype, model_id=None, *, load_progress=None))]
    fn send_re_isq(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text::dtype)] dtype: &str,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
        load_progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.check_model(model_id)?;
        let isq = Isq::named("dtype", dtype).map_err(raise)?;
        self.model()?.re_isq(py, isq, load_progress)
    }

    /// Figures of the KV pool as of the last step.
    ///
    /// - Blocks of `block_size` tokens and `block_bytes` bytes: `blocks_total`, `blocks_used` (held by a request),
    ///   `peak_blocks_used` (most while a step was computed), `blocks_cached` (free but findable by the prefix cache),
    ///   `blocks_free` (cached ones included), `blocks_shared` (held by more than one) and `blocks_saved` (that would be needed
    ///   on top if nothing were shared). `blocks_kept` are those of sequences at rest, which anybody may have (one that several
    ///   hold counts for each). `tokens_total` is what all blocks hold.
    /// - Prefix cache, in tokens: `prefix_queried_tokens`, `prefix_hit_tokens`, and `prefix_missed_tokens`, a dict by the reasons
    ///   that `PromptTokensDetails` names; `resumed_queried_tokens` and `resumed_hit_tokens` of requests that came back after a
    ///   preemption.
    /// - Requests: `requests_running`, `requests_waiting`, `requests_kept`, `peak_running` (most in one step),
    ///   `peak_running_before_preemption`, `preemptions`, `recomputed_tokens`, `deadlines_missed`; whether the runner is `paused`
    ///   or `draining`.
    /// - Waste: `slots_held` (of held blocks; a token takes one in each KV group), `slots_live` (of those with KV), and their
    ///   sums over the `steps` so far, `slots_held_sum` and `slots_live_sum`.
    /// - Speculation: `draft_rows`, how often later tokens were guessed, `draft_tokens`, how many of them, and
    ///   `accepted_draft_tokens`, how many were right: `accepted_draft_tokens_at` by their place in the guess, the last for all
    ///   further ones. A guess makes one token and those that are right.
    /// - `kv_tier`, or 0: `tier_blocks` there, of `tier_block_bytes` each; `tier_hit_tokens` that were fetched rather than
    ///   computed and `tier_declined_tokens` that were there and cheaper to compute; blocks that went out and in
    ///   (`tier_swapped_out_blocks`, `tier_swapped_in_blocks`), that could not be used (`tier_failed_blocks`), that were not kept
    ///   (`tier_dropped_blocks`).
    /// - `kv_events`, or 0: `kv_event_blocks` are full blocks that can be found, one for each KV group, as the events have told.
    fn kv_cache_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine()?;
        let stats = enter(py, || engine.kv_cache_stats())?;
        stats::dict(py, &stats, engine.block_bytes())
    }

    /// What was published by `kv_events`; `None` without.
    ///
    /// `address` and `replay_address` (or `None`), with the ports that were taken; `batches` that went out with their `events`;
    /// `dropped_batches`, which the runner dropped because the publisher lagged behind, and `listings`, how often all that is
    /// held was told anew; `subscribers` that are connected, and `subscriber_dropped_batches`, which single ones did not get
    /// because they lagged behind; `replays` that were asked for.
    fn kv_events_stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.engine()?.kv_events().map(|stats| stats::events_dict(py, &stats)).transpose()
    }
}
