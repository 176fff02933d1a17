//! How the attention of a step is cut into CTAs, once for all layers that see the same keys.
//!
//! A request with few rows (one that decodes, with or without drafts) is cut along its keys, at places that depend on its own
//! length alone, so that a row gets the same bits in any batch; the parts are merged afterwards. Many rows are cut into tiles of
//! rows, each of which sees all its keys. Over a cache in f32, and where results are to be deterministic, every row is a tile
//! that is not cut along its keys: it then has the same bits in chunks of any size.

use std::ops::Range;

use crate::{
    KvDType, Mask, StepMetadata,
    attention::{end_key, first_key},
    kernel_args::{AttentionMerge, AttentionWork},
};

use super::{graph_plan::Bucket, kernels::MAX_NARROW_HEAD_DIM};

/// Rows times query heads a KV head that one CTA of `attention_*` takes.
const DECODE_VECTORS: usize = 16;
/// The same of `prefill_*`.
const PREFILL_VECTORS: usize = 64;
/// The same for wide heads.
const WIDE_PREFILL_VECTORS: usize = 32;
/// The same of `latent_*`, whose CTAs may share the query heads.
pub const LATENT_VECTORS: usize = 32;
/// Rows of a request whose keys are cut, though they may be in several CTAs: one that decodes, and the 8 drafts that are made
/// unless it is said how many.
pub const FEW_ROWS: usize = 9;
/// A part of the keys begins at a multiple of this.
const KEY_TILE: usize = 64;
/// Keys of a part at least. Measured on an H100 with 64 query heads, 8 KV heads and D 128 in bf16, parts of 512 keys against
/// those of 256: 32 requests of 4096 keys 200 us against 204, 8 of 2048 31.5 against 33.9, 128 of 512 100 against 120, one of 512
/// as long, one of 4096 14.7 against 14.1.
pub const MIN_PART_KEYS: usize = 512;
/// Parts of a row at most: with its 8 KV heads, a request of 32,768 keys keeps all multiprocessors busy by itself.
pub const MAX_PARTS: usize = 64;
/// Parts whose results are kept at once: 129 MiB with 64 query heads of 128. A row has no more; what a step has beyond them
/// begins when they are merged.
pub const MAX_KEPT_PARTS: usize = 4096;

/// Query heads that may share a KV head; in f32 a CTA takes them one after the other.
pub fn max_queries_per_kv(dtype: KvDType, head_dim: usize) -> usize {
    if dtype == KvDType::F32 { usize::MAX } else { prefill_vectors(head_dim > MAX_NARROW_HEAD_DIM) }
}

fn prefill_vectors(is_wide: bool) -> usize {
    if is_wide { WIDE_PREFILL_VECTORS } else { PREFILL_VECTORS }
}

/// Entries of the lists of a padded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Of [`AttentionPlan::decode`].
    pub decode: usize,
    /// Of [`AttentionPlan::prefill`].
    pub prefill: usize,
    /// Of [`AttentionPlan::merges`].
    pub merges: usize,
    /// See [`AttentionPlan::num_parts`].
    pub num_parts: usize,
}

/// What decides the cut, apart from the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanShape {
    /// Query heads that share a KV head; of latent attention those of a CTA.
    pub queries_per_kv: usize,
    /// See [`AttentionParams::window`](crate::AttentionParams).
    pub window: Option<usize>,
    /// See [`AttentionParams::chunk`](crate::AttentionParams).
    pub chunk: Option<usize>,
    /// See [`AttentionParams::mask`](crate::AttentionParams).
    pub mask: Mask,
    /// How keys and values are stored: in f32, a CTA takes one row.
    pub dtype: KvDType,
    /// Of latent attention, the query heads of a CTA for rows of a prompt, by the kernels that take others as well.
    pub latent: Option<usize>,
    /// Whether heads are wide: a CTA takes fewer rows of a prompt.
    pub is_wide: bool,
    /// Whether every row is a tile of its own; so it is over f32.
    pub alone: bool,
    /// Whether the keys of few rows are cut; not those of rows that are alone.
    pub splits: bool,
}

impl PlanShape {
    /// Rows that a CTA of `attention_*` takes; 0: it takes none of such heads.
    fn decode_rows(self) -> usize {
        match self.dtype {
            KvDType::F32 => 1,
            _ if self.latent.is_some() => self.rows(LATENT_VECTORS),
            _ => self.rows(DECODE_VECTORS),
        }
    }

    /// Rows that a CTA takes of a prompt.
    fn prefill_rows(self) -> usize {
        self.latent.map_or_else(|| self.rows(prefill_vectors(self.is_wide)), |heads| LATENT_VECTORS / heads)
    }

    /// Rows of a request whose keys are cut, at most.
    fn few_rows(self) -> usize {
        match self.decode_rows() {
            0 => 0,
            _ if self.latent.is_some() => FEW_ROWS,
            rows => rows.max(FEW_ROWS),
        }
    }

    /// Rows with so many query vectors a KV head.
    fn rows(self, vectors: usize) -> usize {
        let rows = vectors / self.queries_per_kv;
        if self.alone { rows.min(1) } else { rows }
    }

    /// The keys that some rows of a request see, from a multiple of the tile on.
    fn visible_keys(self, step: &StepMetadata, request: usize, rows: Range<usize>) -> Range<usize> {
        let first = first_key(self.window, self.chunk, step.positions[rows.start] as usize);
        first / KEY_TILE * KEY_TILE..self.end_key(step, request, rows.end - 1)
    }

    /// One more than the position of the last key that a row of a request sees. No row behind it sees less.
    fn end_key(self, step: &StepMetadata, request: usize, row: usize) -> usize {
        let (position, seq_len) = (step.positions[row] as usize, step.seq_lens[request] as usize);
        end_key(self.mask, self.window, (row, position), seq_len, &step.span_ends)
    }

    /// The ends of what each row of a step sees, where it is not its own position.
    pub fn ends(self, step: &StepMetadata) -> Option<Vec<u32>> {
        if self.mask == Mask::Causal || self.mask == Mask::Spans && step.span_ends.is_empty() {
            return None;
        }
        let rows = |request: usize| step.query_start_loc[request]..step.query_start_loc[request + 1];
        let end = |request: usize, row: u32| self.end_key(step, request, row as usize) as u32;
        Some((0..step.num_reqs()).flat_map(|request| rows(request).map(move |row| end(request, row))).collect())
    }

    /// What every step of a bucket fits into.
    pub fn capacity(self, bucket: Bucket) -> Capacity {
        let Bucket { rows, parts, .. } = bucket;
        if self.decode_rows() == 0 {
            return Capacity { decode: 0, prefill: rows, merges: 0, num_parts: 0 };
        }
        if !bucket.has_parts() || !self.splits {
            return Capacity { decode: rows, prefill: 0, merges: 0, num_parts: 0 };
        }
        // What rows see of a window begins at a multiple of the tile, and the last of them sees further than the first.
        let reach = self.window.into_iter().chain(self.chunk).min();
        let most = reach.map_or(MAX_PARTS, |keys| max_parts(keys + KEY_TILE + FEW_ROWS));
        let decode = parts.min(rows * most);
        let num_parts = if most > 1 { decode } else { 0 };
        Capacity { decode, prefill: 0, merges: if most > 1 { rows } else { 0 }, num_parts }
    }
}

/// Entries that are launched together, and then merged: their parts lie side by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Of [`AttentionPlan::decode`].
    pub decode: Range<usize>,
    /// Of [`AttentionPlan::merges`].
    pub merges: Range<usize>,
}

/// Lists for the kernels; the field names of the entries are those of `kernels/args.h`.
#[derive(Clone, Debug, Default)]
pub struct AttentionPlan {
    /// For `attention_*`, or `latent_*`.
    pub decode: Vec<AttentionWork>,
    /// For `prefill_*`, or `latent_*`.
    pub prefill: Vec<AttentionWork>,
    /// For `attention_merge`: rows that come in parts.
    pub merges: Vec<AttentionMerge>,
    /// What of the two lists is launched together, in this order.
    pub rounds: Vec<Round>,
    /// Rows of the buffers of parts: those of the round with the most.
    pub num_parts: usize,
    /// Parts of the last round.
    round_parts: usize,
}

impl AttentionPlan {
    /// Cuts a step.
    ///
    /// # Panics
    /// When more than [`max_queries_per_kv`] query heads share a KV head.
    pub fn new(step: &StepMetadata, shape: PlanShape) -> Self {
        let decode_rows = shape.decode_rows();
        let prefill_rows = shape.prefill_rows();
        assert!(decode_rows > 0 || prefill_rows > 0, "{} query heads share a KV head", shape.queries_per_kv);
        let mut plan = Self { rounds: vec![Round::default()], ..Self::default() };
        for request in 0..step.num_reqs() {
            let rows = step.query_start_loc[request] as usize..step.query_start_loc[request + 1] as usize;
            let few = rows.len() <= shape.few_rows() || (shape.alone && decode_rows > 0);
            let tile = if few { decode_rows } else { prefill_rows };
            let mut first = rows.start;
            while first < rows.end {
                let end = rows.end.min(first + tile);
                let keys = shape.visible_keys(step, request, first..end);
                let work = AttentionWork {
                    request: request as u32,
                    first_row: first as u32,
                    num_rows: (end - first) as u32,
                    key_begin: keys.start as u32,
                    key_end: keys.end as u32,
                    part: -1,
                };
                match (few, shape.splits) {
                    (true, true) => plan.split(work),
                    (true, false) => plan.add(work),
                    (false, _) => plan.prefill.push(work),
                }
                first = end;
            }
        }
        plan
    }

    /// Adds an entry to the last round.
    fn add(&mut self, work: AttentionWork) {
        self.decode.push(work);
        self.last_round().decode.end = self.decode.len();
    }

    fn last_round(&mut self) -> &mut Round {
        self.rounds.last_mut().expect("a plan begins with a round")
    }

    /// Cuts a tile along its keys if they are many.
    fn split(&mut self, work: AttentionWork) {
        let (begin, end) = (work.key_begin as usize, work.key_end as usize);
        let (part_keys, num_parts) = (part_keys(end - begin), num_parts(end - begin));
        if num_parts <= 1 {
            self.add(work);
            return;
        }
        let rows = work.num_rows as usize;
        if self.round_parts + num_parts * rows > MAX_KEPT_PARTS {
            let (decode, merges) = (self.decode.len(), self.merges.len());
            self.rounds.push(Round { decode: decode..decode, merges: merges..merges });
            self.round_parts = 0;
        }
        let first_part = self.round_parts;
        for part in 0..num_parts {
            let key_begin = begin + part * part_keys;
            self.add(AttentionWork {
                key_begin: key_begin as u32,
                key_end: end.min(key_begin + part_keys) as u32,
                part: (first_part + part * rows) as i32,
                ..work
            });
        }
        self.merges.extend((0..rows).map(|row| AttentionMerge {
            row: work.first_row + row as u32,
            first_part: (first_part + row) as u32,
            num_parts: num_parts as u32,
            part_stride: rows as u32,
        }));
        self.last_round().merges.end = self.merges.len();
        self.round_parts += num_parts * rows;
        self.num_parts = self.num_parts.max(self.round_parts);
    }
}

// A tile has at most as many rows as query vectors.
const _: () = assert!(DECODE_VECTORS * MAX_PARTS <= MAX_KEPT_PARTS);

fn part_keys(num_keys: usize) -> usize {
    num_keys.div_ceil(MAX_PARTS).max(MIN_PART_KEYS).next_multiple_of(KEY_TILE)
}

/// Parts that so many keys are cut into.
pub fn num_parts(num_keys: usize) -> usize {
    num_keys.div_ceil(part_keys(num_keys))
}

/// Parts that the keys of one request are cut into at most.
pub fn max_parts(seq_len: usize) -> usize {
    seq_len.div_ceil(MIN_PART_KEYS).min(MAX_PARTS)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Requests of (computed tokens, rows).
    fn step(requests: &[(usize, usize)]) -> StepMetadata {
        let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
        for &(computed, rows) in requests {
            step.positions.extend((computed..computed + rows).map(|position| position as u32));
            step.query_start_loc.push(step.positions.len() as u32);
            step.seq_lens.push((computed + rows) as u32);
        }
        step
    }

    /// Of layers that see everything, whose keys are cut.
    fn plain(dtype: KvDType, queries_per_kv: usize) -> PlanShape {
        PlanShape {
            queries_per_kv,
            window: None,
            chunk: None,
            mask: Mask::Causal,
            dtype,
            latent: None,
            is_wide: false,
            alone: false,
            splits: true,
        }
    }

    fn shapes() -> impl Iterator<Item = PlanShape> {
        let dtypes = [(KvDType::F32, true), (KvDType::BF16, true), (KvDType::BF16, false)];
        let reaches = [
            (None, None),
            (Some(1), None),
            (Some(100), None),
            (Some(5000), None),
            (Some(4032), None),
            (None, Some(96)),
            (None, Some(8192)),
        ];
        dtypes.into_iter().flat_map(move |(dtype, alone)| {
            reaches.into_iter().flat_map(move |(window, chunk)| {
                let masks = [Mask::Causal, Mask::Full, Mask::Spans];
                masks.into_iter().flat_map(move |mask| {
                    let shape = move |queries_per_kv| PlanShape {
                        window,
                        chunk,
                        mask,
                        alone,
                        splits: !alone,
                        ..plain(dtype, queries_per_kv)
                    };
                    [1, 3, 7, 16, 40].into_iter().map(shape)
                })
            })
        })
    }

    #[test]
    fn every_row_sees_each_of_its_keys_once() {
        let mut step = step(&[(0, 1), (511, 1), (4095, 1), (10, 3), (0, 130), (1000, 40), (70_000, 2)]);
        // Rows 30 to 99 of the long prompt are a span.
        step.span_ends = step.positions.iter().map(|position| position + 1).collect();
        step.span_ends[36..106].fill(100);
        for shape in shapes() {
            let ends = shape.ends(&step);
            let plan = AttentionPlan::new(&step, shape);
            let mut keys: HashMap<u32, Vec<(u32, u32)>> = HashMap::new();
            let decode_vectors = if shape.dtype == KvDType::F32 { shape.queries_per_kv } else { DECODE_VECTORS };
            for (work, vectors) in
                plan.decode.iter().map(|w| (w, decode_vectors)).chain(plan.prefill.iter().map(|w| (w, PREFILL_VECTORS)))
            {
                assert!(work.num_rows as usize * shape.queries_per_kv <= vectors, "{work:?}");
                assert!(!shape.alone || (work.num_rows == 1 && work.part == -1));
                assert!(work.key_begin.is_multiple_of(64) && work.key_begin < work.key_end);
                for row in work.first_row..work.first_row + work.num_rows {
                    assert!(
                        step.query_start_loc[work.request as usize] <= row
                            && row < step.query_start_loc[work.request as usize + 1]
                    );
                    keys.entry(row).or_default().push((work.key_begin, work.key_end));
                }
            }
            for (row, position) in step.positions.iter().enumerate() {
                let mut ranges = keys.remove(&(row as u32)).expect("a row was left out");
                ranges.sort_unstable();
                assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "gaps or overlaps in {ranges:?}");
                let first = first_key(shape.window, shape.chunk, *position as usize);
                let end = ends.as_ref().map_or(position + 1, |ends| ends[row]);
                assert!(ranges[0].0 as usize <= first && ranges[ranges.len() - 1].1 >= end && end > *position);
            }
        }
    }

    /// Latent attention: the keys of few rows come in parts, and more rows are tiles with a share of the heads.
    #[test]
    fn rows_of_latent_attention_come_in_parts_or_tiles() {
        let step = step(&[(0, 40), (2000, 1), (2000, 9), (2000, 10), (5, 1)]);
        for (queries_per_kv, rows, latent, prompt_rows) in [(32, 1, 32, 1), (20, 1, 4, 8), (16, 2, 16, 2), (3, 10, 3, 10)] {
            for splits in [true, false] {
                let shape = PlanShape { latent: Some(latent), splits, ..plain(KvDType::BF16, queries_per_kv) };
                let plan = AttentionPlan::new(&step, shape);
                let of =
                    |works: &[AttentionWork]| (0..5).map(|r| works.iter().filter(|work| work.request == r).count()).collect();
                let (decode, prefill): (Vec<_>, Vec<_>) = (of(&plan.decode), of(&plan.prefill));
                let parts = if splits { 4 } else { 1 };
                assert_eq!(decode, [0, parts, parts * 9_usize.div_ceil(rows), 0, 1], "{queries_per_kv} heads");
                assert_eq!(prefill, [40_usize.div_ceil(prompt_rows), 0, 0, 10_usize.div_ceil(prompt_rows), 0], "{latent} heads");
                assert!(plan.prefill.iter().all(|work| work.key_begin == 0 && work.part == -1));
                assert!(plan.prefill.iter().all(|work| work.num_rows as usize <= prompt_rows));
                assert!(plan.decode.iter().all(|work| work.num_rows as usize <= rows));
            }
        }
    }

    #[test]
    fn rows_of_a_request_with_drafts_come_in_parts() {
        let shape = plain(KvDType::BF16, 8);
        let plan = AttentionPlan::new(&step(&[(2000, 9), (2000, 10)]), shape);
        // Four tiles of two rows and one of one in four parts each, against two tiles of eight and of two.
        let of_decode: Vec<_> = plan.decode.iter().map(|work| (work.request, work.num_rows)).collect();
        assert_eq!(of_decode, [[(0, 2); 16].as_slice(), &[(0, 1); 4]].concat());
        assert_eq!(plan.prefill.iter().map(|work| (work.request, work.num_rows)).collect::<Vec<_>>(), [(1, 8), (1, 2)]);
        assert_eq!(plan.merges.len(), 9);
    }

    #[test]
    fn a_row_that_is_alone_is_computed_alike_however_its_prompt_is_cut() {
        for (dtype, queries_per_kv) in [(KvDType::F32, 4), (KvDType::F32, 40), (KvDType::BF16, 4), (KvDType::BF16, 40)] {
            let shape = PlanShape { alone: true, splits: false, ..plain(dtype, queries_per_kv) };
            let rows = |requests: &[(usize, usize)]| -> Vec<_> {
                let plan = AttentionPlan::new(&step(requests), shape);
                assert!(plan.merges.is_empty() && (plan.prefill.is_empty() || plan.decode.is_empty()));
                let works = plan.decode.iter().chain(&plan.prefill);
                works.map(|work| (work.num_rows, work.key_begin, work.key_end, work.part)).collect()
            };
            let whole = rows(&[(5000, 3)]);
            assert_eq!(whole, (5000..5003).flat_map(|computed| rows(&[(computed, 1)])).collect::<Vec<_>>());
        }
    }

    #[test]
    fn parts_are_merged_into_the_rows_they_come_from() {
        let step = step(&[(4095, 1), (3000, 2), (5, 1), (9000, 2), (40_000, 1)]);
        let plan = AttentionPlan::new(&step, plain(KvDType::F16, 8));
        let mut parts = vec![None; plan.num_parts];
        for work in plan.decode.iter().filter(|work| work.part >= 0) {
            for row in 0..work.num_rows {
                let part = &mut parts[work.part as usize + row as usize];
                assert_eq!(part.replace(work.first_row + row), None, "two parts in one place");
            }
        }
        for merge in &plan.merges {
            assert!(merge.num_parts > 1);
            for part in 0..merge.num_parts {
                let at = (merge.first_part + part * merge.part_stride) as usize;
                assert_eq!(parts[at].take(), Some(merge.row));
            }
        }
        assert!(parts.iter().all(Option::is_none), "parts that are not merged");
        assert_eq!(plan.merges.iter().map(|merge| merge.row).collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6]);
        assert_eq!(plan.merges.iter().map(|merge| merge.num_parts).collect::<Vec<_>>(), [8, 6, 6, 18, 18, 63]);
    }

    #[test]
    fn what_a_step_has_beyond_the_parts_that_are_kept_follows_in_rounds() {
        let shape = plain(KvDType::BF16, 4);
        let mut requests = vec![(MAX_PARTS * MIN_PART_KEYS - 1, 1); 150];
        requests[70] = (3, 1);
        let plan = AttentionPlan::new(&step(&requests), shape);
        assert_eq!(plan.num_parts, MAX_KEPT_PARTS);
        assert_eq!(plan.rounds.iter().map(|round| round.merges.len()).collect::<Vec<_>>(), [64, 64, 21]);
        let mut next = Round::default();
        for round in &plan.rounds {
            assert_eq!((round.decode.start, round.merges.start), (next.decode.end, next.merges.end));
            let places: Vec<_> =
                plan.decode[round.decode.clone()].iter().map(|work| work.part).filter(|part| *part >= 0).collect();
            assert_eq!(places, (0..places.len() as i32).collect::<Vec<_>>());
            let merged = plan.merges[round.merges.clone()].iter().flat_map(|merge| {
                assert_eq!(merge.part_stride, 1);
                merge.first_part as i32..(merge.first_part + merge.num_parts) as i32
            });
            assert_eq!(merged.collect::<Vec<_>>(), places);
            next = round.clone();
        }
        assert_eq!((next.decode.end, next.merges.end), (plan.decode.len(), plan.merges.len()));
    }

    #[test]
    fn a_request_is_cut_alike_in_every_batch() {
        let shape = plain(KvDType::BF16, 4);
        let cuts = |step: &StepMetadata, request: u32| -> Vec<_> {
            let plan = AttentionPlan::new(step, shape);
            let mine = plan.decode.iter().filter(|work| work.request == request);
            mine.map(|work| (work.key_begin, work.key_end, work.num_rows)).collect()
        };
        let alone = cuts(&step(&[(20_000, 1)]), 0);
        assert!(alone.len() > 1 && alone.len() <= MAX_PARTS);
        assert_eq!(cuts(&step(&[(3, 1), (40_000, 4), (20_000, 1), (7, 500)]), 2), alone);
    }

    #[test]
    fn decodes_fit_into_the_lists_of_their_bucket() {
        // 5000 is in fewer parts than the last 4096 keys of it.
        let alone = [&[0][..], &[511, 600, 9], &[5000, 1, 1023, 1024], &[5000; 3], &[70_000; 20], &[512; 8], &[4096]];
        let alone = alone.map(|positions| positions.iter().map(|position| (*position, 1)).collect::<Vec<_>>());
        // With drafts, some of which are behind the place where a window or a part begins.
        let drafted =
            [&[(0, 9)][..], &[(508, 7), (5, 1)], &[(5028, 5), (4090, 9), (1020, 4)], &[(70_000, 8); 8], &[(91, 6), (93, 3)]];
        for requests in alone.into_iter().chain(drafted.map(<[_]>::to_vec)) {
            let step = step(&requests);
            let bucket = Bucket::of(&step, 256, FEW_ROWS).unwrap();
            let latent = [1, 3, 16, 32].into_iter().flat_map(|queries_per_kv| {
                let all = shapes().filter(|shape| shape.window.is_none() && shape.chunk.is_none() && shape.mask == Mask::Causal);
                all.map(move |shape| PlanShape { queries_per_kv, latent: Some(queries_per_kv), ..shape })
            });
            for shape in shapes().chain(latent).flat_map(|shape| [shape, PlanShape { splits: false, ..shape }]) {
                let (plan, capacity) = (AttentionPlan::new(&step, shape), shape.capacity(bucket));
                assert!(plan.decode.len() <= capacity.decode && plan.prefill.len() <= capacity.prefill, "{shape:?} {capacity:?}");
                assert!(plan.merges.len() <= capacity.merges && plan.num_parts <= capacity.num_parts, "{shape:?} {capacity:?}");
            }
        }
    }

    #[test]
    fn without_splits_a_row_is_finished_by_one_entry() {
        let shape = PlanShape { splits: false, ..plain(KvDType::BF16, 4) };
        let plan = AttentionPlan::new(&step(&[(20_000, 1), (700, 1)]), shape);
        assert_eq!(plan.decode.iter().map(|work| (work.part, work.key_end)).collect::<Vec<_>>(), [(-1, 20_001), (-1, 701)]);
        assert_eq!((plan.merges.len(), plan.num_parts), (0, 0));
    }
}
