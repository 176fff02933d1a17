//! The lists of a step at addresses that do not change, padded to the size of a graph, and copied at once.
//!
//! ```text
//!         | token ids | positions | rope positions | states | adapters | slots of each group | attention of each kind of layer |
//! smaller sizes begin later                                                                               they all end here: ^
//! | block table of group 0, request 0 | group 0, request 1 | ... | group 1, request 0 | ...
//! ```
//!
//! Kernels find a request's block table by `request * max_blocks`. Here `max_blocks` is 1, and `request` is where the table
//! begins, so that tables of any length may follow each other.

use std::sync::Arc;

use crate::{
    StepMetadata,
    kernel_args::{AttentionMerge, AttentionWork, DevicePtr, LoraRow, LoraTile, NO_SLOT, RecurrentRequest},
};

use super::{
    CudaError,
    attention::{DevicePlan, GroupLists, List},
    attention_plan::{AttentionPlan, PlanShape, Round},
    driver::{DeviceMemory, Driver, Plain, bytes_of},
    graph_plan::Bucket,
    lora::{AdaptedRows, LoraLists, Uses},
    recurrent::{RecurrentLists, requests, row_requests},
};

/// Lists begin at a multiple of this.
const ALIGNMENT: usize = 256;

/// Bytes of block tables that are made room for at first.
const TABLE_BYTES: usize = 1 << 20;

/// The memory that the lists of all buckets lie in, and behind them the block tables.
#[derive(Default)]
pub struct ListMemory {
    memory: Option<DeviceMemory>,
    /// Where the lists end and the block tables begin.
    tables: usize,
}

impl ListMemory {
    /// Makes room for so many bytes of lists and of tables.
    pub fn reserve(&mut self, driver: &Arc<dyn Driver>, lists: usize, tables: usize) -> Result<(), CudaError> {
        let room = self.memory.as_ref().map_or(0, |memory| memory.bytes() - self.tables);
        if self.tables >= lists && room >= tables && room > 0 {
            return Ok(());
        }
        self.tables = self.tables.max(lists).next_multiple_of(ALIGNMENT);
        let room = tables.next_power_of_two().max(TABLE_BYTES).max(room);
        self.memory = None;
        self.memory = Some(DeviceMemory::new(driver, self.tables + room)?);
        Ok(())
    }

    /// What graphs know of it.
    pub fn addresses(&self) -> [DevicePtr; 2] {
        let at = self.memory.as_ref().map_or(0, DeviceMemory::at);
        [at, at + self.tables as u64]
    }
}

/// Where the lists of one bucket lie.
pub struct PaddedLists {
    bucket: Bucket,
    /// The address of the first list.
    at: DevicePtr,
    /// Of all lists.
    bytes: usize,
    /// What is next copied: lists and block tables.
    staging: Vec<u8>,
    token_ids: Region,
    positions: Region,
    rope_positions: Region,
    /// Requests and those of rows, for recurrent layers; without entries where there are none.
    requests: Region,
    row_requests: Region,
    /// Rows with adapters, their tiles, and the rows by number; without entries where there are none.
    adapters: [Region; 3],
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
const NO_REQUEST: RecurrentRequest = RecurrentRequest { first_row: 0, num_rows: 0, slot: NO_SLOT, begins: 0 };
const NO_MERGE: AttentionMerge = AttentionMerge { row: 0, first_part: 0, num_parts: 0, part_stride: 0 };

impl PaddedLists {
    /// For these kinds of layers: KV group and shape; with lists for recurrent ones where there are such. Until [`Self::place`],
    /// they lie nowhere.
    pub fn new(bucket: Bucket, num_groups: usize, has_states: bool, kinds: &[(usize, PlanShape)]) -> Self {
        let mut end = 0;
        let mut region = |len: usize, size: usize| {
            let at = end;
            end = (end + len * size).next_multiple_of(ALIGNMENT);
            Region { at, len }
        };
        let rows = bucket.rows;
        let [token_ids, positions, rope_positions] = [(); 3].map(|()| region(rows, size_of::<u32>()));
        let with_states = if has_states { rows } else { 0 };
        let requests = region(with_states, size_of::<RecurrentRequest>());
        let row_requests = region(with_states, size_of::<u32>());
        let adapted = if bucket.has_adapters { rows } else { 0 };
        let adapters = [size_of::<LoraRow>(), size_of::<LoraTile>(), size_of::<LoraRow>()].map(|size| region(adapted, size));
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
        Self {
            bucket,
            at: 0,
            bytes: end,
            staging: Vec::new(),
            token_ids,
            positions,
            rope_positions,
            requests,
            row_requests,
            adapters,
            slots,
            plans,
        }
    }

    /// Bytes of all lists.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Has them end where the tables begin.
    ///
    /// # Panics
    /// When no room was made for them.
    pub fn place(&mut self, memory: &ListMemory) {
        assert!(self.bytes <= memory.tables, "{} bytes of lists in memory for {}", self.bytes, memory.tables);
        self.at = memory.addresses()[1] - self.bytes as u64;
    }

    /// Requests of the padded step.
    pub fn num_reqs(&self) -> usize {
        self.bucket.rows
    }

    /// The address of the token ids.
    pub fn token_ids(&self) -> DevicePtr {
        self.at(self.token_ids)
    }

    /// Addresses of positions and rope positions.
    pub fn positions(&self) -> [DevicePtr; 2] {
        [self.positions, self.rope_positions].map(|region| self.at(region))
    }

    /// The lists for recurrent layers.
    pub fn recurrent(&self) -> RecurrentLists {
        if self.requests.len == 0 {
            return RecurrentLists::default();
        }
        RecurrentLists { requests: self.at(self.requests), row_requests: self.at(self.row_requests) }
    }

    /// The lists of rows with adapters, of which these are all; `None`: there are none.
    pub fn adapters(&self, uses: &Arc<Uses>) -> Option<LoraLists> {
        self.bucket.has_adapters.then(|| LoraLists::padded(self.adapters.map(|region| self.at(region)), self.bucket.rows, uses))
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
            let rounds = vec![Round { decode: 0..decode.len, merges: 0..merges.len }];
            ((*group, *shape), DevicePlan { decode, prefill, merges, rounds, num_parts: lists.num_parts, ends: 0 })
        })
    }

    fn at(&self, region: Region) -> DevicePtr {
        self.at + region.at as u64
    }

    /// Copies the lists of a step of this bucket, and its block tables behind them.
    ///
    /// # Panics
    /// When they are not placed in this memory, or no room was made for the tables.
    pub fn upload(&mut self, token_ids: &[u32], step: &StepMetadata, memory: &ListMemory) -> Result<(), CudaError> {
        assert_eq!(self.at + self.bytes as u64, memory.addresses()[1], "where the lists were placed");
        let starts: Vec<_> = step
            .groups
            .iter()
            .scan(0, |end, group| {
                let start = *end;
                *end += group.block_tables.len();
                Some(start)
            })
            .collect();
        self.staging.resize(self.bytes, 0);
        self.fill(self.token_ids, token_ids, 0);
        self.fill(self.positions, &step.positions, 0);
        self.fill(self.rope_positions, &step.rope_positions, 0);
        self.fill(self.requests, &requests(step), NO_REQUEST);
        if self.row_requests.len > 0 {
            // There are as many requests as rows: where rows pad, so does the last request.
            self.fill(self.row_requests, &row_requests(step), self.row_requests.len as u32 - 1);
        }
        if self.bucket.has_adapters {
            let AdaptedRows { rows, tiles, by_number } = AdaptedRows::of(&step.adapters);
            let [of_rows, of_tiles, of_numbers] = self.adapters;
            self.fill(of_rows, &rows, LoraRow::default());
            self.fill(of_tiles, &tiles, LoraTile::default());
            self.fill(of_numbers, &by_number, LoraRow::default());
        }
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
        for group in &step.groups {
            self.staging.extend_from_slice(bytes_of(&group.block_tables));
        }
        let memory = memory.memory.as_ref().expect("room was made for the tables");
        memory.upload((self.at - memory.at()) as usize, &self.staging)
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
