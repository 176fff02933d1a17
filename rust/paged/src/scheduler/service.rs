//! Time, and whether requests are taken and served.

use super::Scheduler;
use crate::ids::RequestId;
use crate::output::SchedulerOutput;
use crate::request::FinishReason;

impl Scheduler {
    /// Tells the time, in ticks of the caller's choice; it does not go back. Requests whose deadline is not later
    /// end in the next [`Self::schedule_into`].
    pub fn set_now(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Schedules nothing from now on. Requests are accepted and wait, running ones keep their blocks, and deadlines
    /// pass.
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Serves again after [`Self::pause`], and accepts again after [`Self::drain`].
    pub fn resume(&mut self) {
        (self.paused, self.draining) = (false, false);
    }

    /// Accepts no requests from now on, nor forks of kept ones, and serves those there are, with their forks, to their end;
    /// a pause ends.
    pub fn drain(&mut self) {
        (self.paused, self.draining) = (false, true);
    }

    /// Whether [`Self::pause`] holds.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether [`Self::drain`] holds.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Ends a request in whatever state it is and frees its blocks; what they cache stays findable. `false` if there
    /// is no such request. Its row of a step in flight, if any, is ignored by the update.
    pub fn abort_request(&mut self, request_id: RequestId) -> bool {
        let Some(&index) = self.indices.get(&request_id) else { return false };
        self.remove(index);
        true
    }

    /// Ends a request that the engine found to be complete. The same as [`Self::abort_request`] for the books.
    pub fn finish_request(&mut self, request_id: RequestId) -> bool {
        self.abort_request(request_id)
    }

    pub(super) fn finish_those_too_late(&mut self, output: &mut SchedulerOutput) {
        while let Some(&(deadline, index)) = self.deadlines.first()
            && deadline <= self.now
        {
            self.totals.deadlines_missed += 1;
            self.finish(index, FinishReason::Deadline, output);
        }
    }
}
