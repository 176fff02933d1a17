//! The lists of a step at addresses that do not change, padded to the size of a graph.
//!
//! ```text
//! positions | rope positions | slots of each group | work and merges of each kind of layer
//! block table of group 0, request 0 | group 0, request 1 | ... | group 1, request 0 | ...
//! ```
//!
//! Kernels find a request's block table by `request * max_blocks`. Here `max_blocks` is 1, and `request` is where the table
//! begins, so that tables of any length may follow each other.

use std::sync::Arc;

use crate::{
    StepMetadata,
    kernel_args::{AttentionMerge, AttentionWork, DevicePtr},
};

use super::{
    CudaError,
    attention::{DevicePlan, GroupLists, List},
    attention_plan::{AttentionPlan, PlanShape},
    driver::{DeviceMemory, Driver, Plain, bytes_of},
    graph_plan::Bucket,
};

/// Lists begin at a multiple of this.
const ALIGNMENT: usize = 256;

/// Where the lists of one bucket lie.
pub struct PaddedLists {
    bucket: Bucket,
    memory: DeviceMemory,
    /// What is next copied to `memory`.
    staging: Vec<u8>,
    positions: Region,
    rope_positions: Region,
    slots: Vec<Region>,
    plans: Vec<(usize, PlanShape, PlanLists)>,
}

#[derive(Clone, Copy)]
struct PlanLists {
    decode: Region,
    prefill: Region,
    merges: Region,
    num_parts: usize,
}

/// Bytes from the first list on, and entries.
#[derive(Clone, Copy)]
struct Region {
    at: usize,
    len: usize,
}

const NO_WORK: AttentionWork = AttentionWork { request: 0, first_row: 0, num_rows: 0, key_begin: 0, key_end: 0, part: -1 };
const NO_MERGE: AttentionMerge = AttentionMerge { row: 0, first_part: 0, num_parts: 0, part_stride: 0 };

impl PaddedLists {
    /// For these kinds of layers: KV group and shape.
    pub fn new(
        driver: &Arc<dyn Driver>,
        bucket: Bucket,
        num_groups: usize,
        kinds: &[(usize, PlanShape)],
    ) -> Result<Self, CudaError> {
        let mut end = 0;
        let mut region = |len: usize, size: usize| {
            let at = end;
            end = (end + len * size).next_multiple_of(ALIGNMENT);
            Region { at, len }
        };
        let rows = bucket.rows;
        let (positions, rope_positions) = (region(rows, size_of::<u32>()), region(rows, size_of::<u32>()));
        let slots = (0..num_groups).map(|_| region(rows, size_of::<i64>())).collect();
        let plans = kinds
            .iter()
            .map(|&(group, shape)| {
                let capacity = shape.capacity(bucket);
                let lists = PlanLists {
                    decode: region(capacity.decode, size_of::<AttentionWork>()),
                    prefill: region(capacity.prefill, size_of::<AttentionWork>()),
                    merges: region(capacity.merges, size_of::<AttentionMerge>()),
                    num_parts: capacity.num_parts,
                };
                (group, shape, lists)
            })
            .collect();
        let memory = DeviceMemory::new(driver, end)?;
        Ok(Self { bucket, memory, staging: vec![0; end], positions, rope_positions, slots, plans })
    }

    /// Requests of the padded step.
    pub fn num_reqs(&self) -> usize {
        self.bucket.rows
    }

    /// Addresses of positions and rope positions.
    pub fn positions(&self) -> [DevicePtr; 2] {
        [self.positions, self.rope_positions].map(|region| self.at(region))
    }

    /// The lists of each group; all block tables begin at `tables`.
    pub fn groups(&self, tables: DevicePtr) -> impl Iterator<Item = GroupLists> {
        self.slots.iter().map(move |slots| GroupLists { block_tables: tables, slot_mapping: self.at(*slots), max_blocks: 1 })
    }

    /// What attention works through, by kind of layer.
    pub fn plans(&self) -> impl Iterator<Item = ((usize, PlanShape), DevicePlan)> {
        let list = |region: Region| List { at: self.at(region), len: region.len };
        self.plans.iter().map(move |(group, shape, lists)| {
            let [decode, prefill, merges] = [lists.decode, lists.prefill, lists.merges].map(list);
            ((*group, *shape), DevicePlan { decode, prefill, merges, num_parts: lists.num_parts })
        })
    }

    fn at(&self, region: Region) -> DevicePtr {
        self.memory.at() + region.at as u64
    }

    /// Copies the lists of a step of this bucket, and its block tables to `tables`.
    pub fn upload(&mut self, step: &StepMetadata, tables: &DeviceMemory) -> Result<(), CudaError> {
        let starts: Vec<_> = step
            .groups
            .iter()
            .scan(0, |end, group| {
                let start = *end;
                *end += group.block_tables.len();
                Some(start)
            })
            .collect();
        self.fill(self.positions, &step.positions, 0);
        self.fill(self.rope_positions, &step.rope_positions, 0);
        for (region, group) in self.slots.clone().into_iter().zip(&step.groups) {
            self.fill(region, &group.slot_mapping, -1);
        }
        for (group, shape, lists) in self.plans.clone() {
            let mut plan = AttentionPlan::new(step, shape);
            for work in plan.decode.iter_mut().chain(&mut plan.prefill) {
                work.request = (starts[group] + work.request as usize * step.groups[group].max_blocks) as u32;
            }
            self.fill(lists.decode, &plan.decode, NO_WORK);
            self.fill(lists.prefill, &plan.prefill, NO_WORK);
            self.fill(lists.merges, &plan.merges, NO_MERGE);
        }
        self.memory.upload(0, &self.staging)?;
        for (group, start) in step.groups.iter().zip(starts) {
            tables.upload(start * size_of::<u32>(), &group.block_tables)?;
        }
        Ok(())
    }

    /// Writes a list, and `rest` where the padded one is longer.
    fn fill<T: Plain>(&mut self, region: Region, values: &[T], rest: T) {
        assert!(values.len() <= region.len, "{} entries in a list of {}", values.len(), region.len);
        let padded = values.iter().copied().chain(std::iter::repeat_n(rest, region.len - values.len()));
        let to = self.staging[region.at..].chunks_exact_mut(size_of::<T>());
        for (value, to) in padded.zip(to) {
            to.copy_from_slice(bytes_of(&[value]));
        }
    }
}
