//! The tier beside the steps.

use paged::SchedulerOutput;

use super::EngineThread;
use crate::{EngineError, error::caught};

impl EngineThread {
    /// Tells the scheduler what became of the blocks that went out.
    pub(super) fn poll_tier(&mut self) {
        if let Some(swapper) = &mut self.swapper {
            swapper.report(&mut self.scheduler, self.pacer.prompt_rate());
        }
    }

    /// Copies out the blocks that the scheduler offers. Nothing may have been written to the pool since it offered them.
    pub(super) fn swap_out(&mut self) {
        let Some(swapper) = &mut self.swapper else { return };
        let swapped = caught(|| self.runner.cache().map(|cache| swapper.swap_out(&mut self.scheduler, cache)));
        if let Some(why) = failure(swapped) {
            tracing::error!("kv_tier: no more blocks are kept: {why}");
            self.swapper = None;
            self.scheduler.detach_tier();
        }
    }

    /// Copies in the blocks that a request is to begin with.
    pub(super) fn swap_in(&mut self, output: &SchedulerOutput) {
        let Some(swap_in) = &output.swap_in else { return };
        let ids = || swap_in.blocks.iter().map(|block| block.id).collect();
        let mut failed = ids();
        if let Some(swapper) = &mut self.swapper {
            let swapped = caught(|| self.runner.cache().map(|cache| failed = swapper.swap_in(&swap_in.blocks, cache)));
            if let Some(why) = failure(swapped) {
                tracing::error!("kv_tier: blocks are computed instead of fetched: {why}");
                failed = ids();
            }
        }
        self.scheduler.swapped_in(swap_in, &failed);
    }
}

fn failure(result: Result<Result<(), EngineError>, String>) -> Option<String> {
    match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(why) => Some(why),
    }
}
