//! The rows of one step, flat: built from the scheduler's decision, reused from step to step.

use device::{KvGroupMetadata, StepMetadata};
use paged::{RequestId, Scheduler, SchedulerOutput};

use crate::model::RopeRows;

/// Token ids and metadata of all rows of a step.
#[derive(Default)]
pub struct InputBatch {
    /// `[num_tokens]`.
    pub token_ids: Vec<u32>,
    /// Positions, block tables and slots of the rows.
    pub step: StepMetadata,
}

impl InputBatch {
    /// Fills the batch from one scheduling decision. `rope_of` tells which rows of the rope table a request
    /// uses.
    pub fn build(
        &mut self,
        scheduler: &Scheduler,
        output: &SchedulerOutput,
        layout: BlockLayout,
        rope_of: impl Fn(RequestId) -> RopeRows,
    ) {
        self.token_ids.clear();
        let step = &mut self.step;
        step.positions.clear();
        step.rope_positions.clear();
        step.query_start_loc.clear();
        step.query_start_loc.push(0);
        step.seq_lens.clear();
        let mut num_drafts = 0;
        for row in &output.rows {
            let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens);
            self.token_ids.extend_from_slice(&scheduler.token_ids(row.request_id)[start..end - row.num_drafts]);
            self.token_ids.extend_from_slice(&output.drafts[num_drafts..num_drafts + row.num_drafts]);
            num_drafts += row.num_drafts;
            step.positions.extend(start as u32..end as u32);
            let rope = rope_of(row.request_id);
            step.rope_positions.extend((start..end).map(|position| rope.row(position)));
            step.query_start_loc.push(self.token_ids.len() as u32);
            step.seq_lens.push(end as u32);
        }
        step.groups.resize_with(layout.num_groups, KvGroupMetadata::default);
        for (index, group) in step.groups.iter_mut().enumerate() {
            fill_group(group, index, scheduler, output, layout.block_size);
        }
    }
}

/// How the pool is cut.
#[derive(Clone, Copy, Debug)]
pub struct BlockLayout {
    /// Tokens a block.
    pub block_size: usize,
    /// KV groups.
    pub num_groups: usize,
}

fn fill_group(group: &mut KvGroupMetadata, index: usize, scheduler: &Scheduler, output: &SchedulerOutput, block_size: usize) {
    let table = |id| scheduler.block_table(id, index);
    group.max_blocks = output.rows.iter().map(|r| table(r.request_id).len()).max().unwrap_or(0);
    group.block_tables.clear();
    group.slot_mapping.clear();
    for (i, row) in output.rows.iter().enumerate() {
        let blocks = table(row.request_id);
        group.block_tables.extend(blocks.iter().map(|b| b.0));
        group.block_tables.resize((i + 1) * group.max_blocks, 0);
        let positions = row.num_computed_tokens..row.num_computed_tokens + row.num_scheduled_tokens;
        group
            .slot_mapping
            .extend(positions.map(|p| i64::from(blocks[p / block_size].0) * block_size as i64 + (p % block_size) as i64));
    }
}
