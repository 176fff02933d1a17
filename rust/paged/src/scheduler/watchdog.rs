//! What happens when nothing can happen. The scheduler's argument for progress says never; should it be wrong, one
//! request ends with the figures instead of all of them waiting for ever.

use super::Scheduler;
use crate::output::{SchedulerOutput, StuckReport};
use crate::request::FinishReason;

impl Scheduler {
    /// Ends the request in the way if a step has come to nothing.
    pub(super) fn watch(&mut self, output: &mut SchedulerOutput) {
        if !output.rows.is_empty() || !output.finished.is_empty() || output.swap_in.is_some() {
            return;
        }
        let Some(index) = self.running.first().copied().or_else(|| self.waiting.iter().next()) else { return };
        let request = self.request(index);
        let held = self.running.iter().map(|index| self.request(*index));
        output.stuck = Some(StuckReport {
            request_id: request.id,
            status: request.status,
            num_tokens: request.num_tokens(),
            num_computed_tokens: request.num_computed_tokens,
            needed_blocks: self
                .peak_blocks(request.num_tokens(), request.num_uncomputed_tokens())
                .saturating_sub(request.blocks.num_held_blocks()),
            free_blocks: self.manager.pool().num_free_blocks(),
            admission_closed_below: self.admission_closed_below,
            holders: held.map(|request| (request.id, request.blocks.num_held_blocks())).collect(),
        });
        self.finish(index, FinishReason::Stuck, output);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;
    use crate::kv_cache_config::KvCacheConfig;
    use crate::kv_groups::KvGroups;
    use crate::request::{NewRequest, RequestStatus};
    use crate::scheduler::{AdmissionPolicy, SchedulerConfig};

    fn scheduler(admission: AdmissionPolicy) -> Scheduler {
        let config = SchedulerConfig { admission, ..SchedulerConfig::new(4, 8, 64) };
        let groups = KvGroups::from_layers(&[None]);
        let kv = KvCacheConfig { num_blocks: 8, block_size: 4, groups, enable_prefix_caching: true, hash_key: [0; 32] };
        Scheduler::new(config, kv).unwrap()
    }

    #[test]
    fn a_request_that_nobody_lets_in_is_named_and_ended_alone() {
        let mut scheduler = scheduler(AdmissionPolicy::Nobody);
        for id in [7, 8] {
            scheduler.add_request(NewRequest::new(RequestId(id), vec![1; 10], 4)).unwrap();
        }
        let output = scheduler.schedule();
        assert_eq!(output.finished, [(RequestId(7), FinishReason::Stuck)]);
        let report = output.stuck.unwrap();
        assert_eq!((report.request_id, report.status), (RequestId(7), RequestStatus::Waiting));
        assert_eq!((report.needed_blocks, report.free_blocks, report.holders.len()), (3, 8, 0));
        let text = report.to_string();
        assert!(text.starts_with("request 7 (Waiting, 0 of 10 tokens computed)") && text.ends_with("held: none"), "{text}");
        assert_eq!(scheduler.status(RequestId(8)), Some(RequestStatus::Waiting));
        scheduler.check_integrity().unwrap();
        assert_eq!(scheduler.schedule().finished, [(RequestId(8), FinishReason::Stuck)]);
        assert_eq!(scheduler.schedule().stuck, None, "nothing to do is nothing to report");
    }

    #[test]
    fn a_pause_is_not_reported() {
        let mut scheduler = scheduler(AdmissionPolicy::Nobody);
        scheduler.add_request(NewRequest::new(RequestId(1), vec![1; 10], 4)).unwrap();
        scheduler.pause();
        assert_eq!(scheduler.schedule(), SchedulerOutput::default());
        assert_eq!(scheduler.num_waiting(), 1);
    }
}
