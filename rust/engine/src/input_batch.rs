//! The rows of one step, flat: built from the scheduler's decision, reused from step to step.

use std::{ops::Range, sync::Arc};

use device::{KvGroupMetadata, StepMetadata};
use paged::{RequestId, Scheduler, SchedulerOutput};

use crate::{
    media::{PromptItem, prompt::PromptItems},
    model::RopeRows,
};

/// Token ids and metadata of all rows of a step.
#[derive(Default)]
pub struct InputBatch {
    /// `[num_tokens]`.
    pub token_ids: Vec<u32>,
    /// Positions, block tables and slots of the rows.
    pub step: StepMetadata,
    /// Rows that are those of images and sounds.
    pub(crate) items: Vec<ItemRows>,
    /// Time, row and column of each row, `[num_tokens]`; empty where positions are all there is.
    pub(crate) coordinates: Vec<[u32; 3]>,
}

/// What a request's rows depend on beside its tokens.
#[derive(Clone, Copy, Default)]
pub(crate) struct RequestRows<'a> {
    /// Which rows of the tables of positions it uses.
    pub(crate) rope: RopeRows,
    /// Its images and sounds.
    pub(crate) items: Option<&'a PromptItems>,
    /// Where its tokens of the second kind begin, of a model that tells them apart: their rows of those tables follow the
    /// others'.
    pub(crate) second: Option<usize>,
}

/// Rows of a step that are those of an image or a sound, or that look at it.
pub(crate) struct ItemRows {
    pub(crate) request: RequestId,
    pub(crate) item: Arc<PromptItem>,
    /// Which row is which of the item's, or how many of its vectors it sees.
    pub(crate) rows: Vec<(u32, u32)>,
}

impl InputBatch {
    /// Fills the batch from one scheduling decision.
    pub(crate) fn build<'a>(
        &mut self,
        scheduler: &Scheduler,
        output: &SchedulerOutput,
        layout: BlockLayout,
        of_request: impl Fn(RequestId) -> RequestRows<'a>,
    ) {
        self.token_ids.clear();
        let step = &mut self.step;
        step.positions.clear();
        step.rope_positions.clear();
        step.query_start_loc.clear();
        step.query_start_loc.push(0);
        step.seq_lens.clear();
        step.span_ends.clear();
        self.items.clear();
        self.coordinates.clear();
        let (mut num_drafts, mut has_items) = (0, false);
        for row in &output.rows {
            let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens);
            self.token_ids.extend_from_slice(&scheduler.token_ids(row.request_id)[start..end - row.num_drafts]);
            self.token_ids.extend_from_slice(&output.drafts[num_drafts..num_drafts + row.num_drafts]);
            num_drafts += row.num_drafts;
            step.positions.extend(start as u32..end as u32);
            let RequestRows { rope, items, second } = of_request(row.request_id);
            match items {
                None => {
                    let second = second.unwrap_or(usize::MAX);
                    step.rope_positions.extend((start..end).map(|at| rope.row(at) + u32::from(at >= second)));
                }
                Some(items) => {
                    has_items = true;
                    step.rope_positions.extend((start..end).map(|position| rope.row(items.shifted(position) as usize)));
                    let first_row = step.query_start_loc.last().copied().unwrap_or(0);
                    let positions = start as u32..end as u32;
                    // Instead of ids that no vocabulary has.
                    for placed in &items.items {
                        for position in placed.positions.iter().filter(|position| positions.contains(position)) {
                            self.token_ids[(first_row + position - positions.start) as usize] = placed.item.token_id;
                        }
                    }
                    if items.are_crossed {
                        self.items.extend(seen_rows((row.request_id, items), first_row, positions));
                    } else {
                        self.items.extend(item_rows((row.request_id, items), first_row, positions));
                    }
                }
            }
            step.query_start_loc.push(self.token_ids.len() as u32);
            step.seq_lens.push(end as u32);
        }
        if has_items {
            self.place(output, &of_request);
        }
        let step = &mut self.step;
        step.groups.resize_with(layout.num_groups, KvGroupMetadata::default);
        for (index, group) in step.groups.iter_mut().enumerate() {
            fill_group(group, index, scheduler, output, layout.block_size);
        }
    }

    /// What rows of images and sounds add to positions: coordinates, and spans whose rows see each other.
    fn place<'a>(&mut self, output: &SchedulerOutput, of_request: &impl Fn(RequestId) -> RequestRows<'a>) {
        let requests = || {
            output.rows.iter().map(|row| {
                let positions = row.num_computed_tokens..row.num_computed_tokens + row.num_scheduled_tokens;
                (positions, of_request(row.request_id).items)
            })
        };
        if requests().any(|(positions, items)| items.is_some_and(|items| items.has_coordinates_from(positions.start))) {
            for (positions, items) in requests() {
                let of = |position| items.map_or([position as u32; 3], |items| items.coordinates(position));
                self.coordinates.extend(positions.map(of));
            }
            self.step.rope_positions = (0..self.coordinates.len() as u32).collect();
        }
        if requests().any(|(_, items)| items.is_some_and(|items| !items.spans.is_empty())) {
            for (positions, items) in requests() {
                let end = |position: usize| items.map_or(position as u32 + 1, |items| items.end_of_span(position as u32));
                self.step.span_ends.extend(positions.map(end));
            }
        }
    }
}

/// The rows of a request's items among those of its positions, of which the first is in `first_row`.
fn item_rows(
    (request, items): (RequestId, &PromptItems),
    first_row: u32,
    positions: Range<u32>,
) -> impl Iterator<Item = ItemRows> {
    items.touched(positions.start, positions.end).map(move |placed| {
        let at = |position: u32| placed.positions.partition_point(|other| *other < position);
        let of_item = at(positions.start)..at(positions.end);
        let rows = of_item.map(|i| (first_row + placed.positions[i] - positions.start, i as u32)).collect();
        ItemRows { request, item: Arc::clone(&placed.item), rows }
    })
}

/// The rows of a request that look at its items.
fn seen_rows(
    (request, items): (RequestId, &PromptItems),
    first_row: u32,
    positions: Range<u32>,
) -> impl Iterator<Item = ItemRows> {
    let start = positions.start;
    items.seen(positions).map(move |(placed, rows)| {
        let rows = rows.into_iter().map(|(position, end)| (first_row + position - start, end)).collect();
        ItemRows { request, item: Arc::clone(&placed.item), rows }
    })
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
