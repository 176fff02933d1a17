//! Which steps share a CUDA graph: those in which every request has few rows, as those that decode, of the same padded size.

use crate::{KvGroupMetadata, StepMetadata, kernel_args::NO_SLOT};

use super::attention_plan::{FEW_ROWS, MAX_KEPT_PARTS, MAX_PARTS, MIN_PART_KEYS, max_parts};

/// Rows of a step that is recorded at most.
pub const MAX_ROWS: usize = 256;
/// Tokens before a request whose keys come in parts.
const PARTED_POSITION: u32 = MIN_PART_KEYS as u32;
/// Tokens of the smallest block.
const MIN_BLOCK_SIZE: usize = 8;

/// The padded size of a step, which alone decides what is launched and with which arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket {
    /// Rows of all requests together, padded.
    pub rows: usize,
    /// Parts that the keys of all rows together are cut into at most: as many as rows where none is cut, else more. A few long
    /// requests among many short ones so launch few CTAs that have nothing to do.
    pub parts: usize,
    /// Whether rows have adapters.
    pub has_adapters: bool,
}

impl Bucket {
    /// Of a step; `None` when a request has more than `max_request_rows` rows or [`FEW_ROWS`], or rows that see keys behind them,
    /// the padded rows would be more than `max_rows`, or there are more parts than are kept at once.
    pub fn of(step: &StepMetadata, max_rows: usize, max_request_rows: usize) -> Option<Self> {
        let num_rows = step.positions.len();
        let rows_of = |pair: &[u32]| (pair[1] - pair[0]) as usize;
        let are_few = |pair: &[u32]| (1..=max_request_rows.min(FEW_ROWS)).contains(&rows_of(pair));
        let see_ahead = step.span_ends.iter().zip(&step.positions).any(|(end, position)| *end > position + 1);
        let decodes = !see_ahead && step.query_start_loc.windows(2).all(are_few);
        let rows = padded_rows(num_rows);
        if !decodes || num_rows == 0 || rows > max_rows.min(MAX_ROWS) {
            return None;
        }
        // No row of a request has more parts than the last.
        let of_request = |(pair, seq_len): (&[u32], &u32)| rows_of(pair) * max_parts(*seq_len as usize);
        let parts: usize = step.query_start_loc.windows(2).zip(&step.seq_lens).map(of_request).sum();
        if parts > MAX_KEPT_PARTS {
            return None;
        }
        let parts = if parts == num_rows { rows } else { padded_parts(rows, parts) };
        Some(Self { rows, parts, has_adapters: !step.adapters.is_empty() })
    }

    /// The one with the longest lists, of steps of up to `max_rows` rows.
    pub fn largest(max_rows: usize) -> Self {
        let rows = max_rows.min(MAX_ROWS);
        Self { rows, parts: most_parts(rows), has_adapters: true }
    }

    /// Whether keys of some row are cut.
    pub fn has_parts(self) -> bool {
        self.parts > self.rows
    }

    /// A step of this many rows that writes no keys and reads those of the null block: what is recorded, and run once before. The
    /// first row's keys come in parts where some may, so that every kernel is loaded. Its requests keep no states, and have slots
    /// that are none where requests have any.
    pub fn rehearsal(self, num_groups: usize, has_states: bool) -> StepMetadata {
        let mut positions = vec![0; self.rows];
        positions[0] = if self.has_parts() { PARTED_POSITION } else { 0 };
        let max_blocks = positions[0] as usize / MIN_BLOCK_SIZE + 1;
        let group =
            KvGroupMetadata { block_tables: vec![0; self.rows * max_blocks], max_blocks, slot_mapping: vec![-1; self.rows] };
        StepMetadata {
            rope_positions: vec![0; self.rows],
            query_start_loc: (0..=self.rows as u32).collect(),
            seq_lens: positions.iter().map(|position| position + 1).collect(),
            positions,
            state_slots: vec![NO_SLOT; if has_states { self.rows } else { 0 }],
            adapters: Vec::new(),
            span_ends: Vec::new(),
            groups: vec![group; num_groups],
        }
    }
}

/// As many as rows can have, and are kept.
fn most_parts(rows: usize) -> usize {
    (rows * MAX_PARTS).min(MAX_KEPT_PARTS)
}

/// Powers of two above `rows`, up to as many as rows can have.
fn padded_parts(rows: usize, parts: usize) -> usize {
    (rows + 1).next_power_of_two().max(parts.next_power_of_two()).min(most_parts(rows))
}

/// 1, 2, 4, 8, 16, 24, ...
fn padded_rows(rows: usize) -> usize {
    if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of (computed tokens, rows).
    fn step(requests: &[(u32, u32)]) -> StepMetadata {
        let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
        for &(computed, rows) in requests {
            step.positions.extend(computed..computed + rows);
            step.query_start_loc.push(step.positions.len() as u32);
            step.seq_lens.push(computed + rows);
        }
        step
    }

    fn bucket(rows: usize, parts: usize) -> Bucket {
        Bucket { rows, parts, has_adapters: false }
    }

    #[test]
    fn rows_are_padded_to_few_sizes_that_hold_them() {
        let padded: Vec<_> =
            (1..=MAX_ROWS).map(|n| Bucket::of(&step(&vec![(7, 1); n]), MAX_ROWS, FEW_ROWS).unwrap().rows).collect();
        assert!((1..).zip(&padded).all(|(n, rows)| n <= *rows && *rows <= 2 * n));
        let mut sizes = padded;
        sizes.dedup();
        assert_eq!(sizes[..6], [1, 2, 4, 8, 16, 24]);
        assert_eq!((sizes.len(), sizes[sizes.len() - 1]), (35, 256));
    }

    #[test]
    fn steps_with_prompts_or_too_many_rows_have_no_bucket() {
        assert_eq!(Bucket::of(&step(&[(5, 1), (0, 10)]), 256, FEW_ROWS), None);
        let with_span = StepMetadata { span_ends: vec![7, 7], ..step(&[(5, 2)]) };
        assert_eq!(Bucket::of(&with_span, 256, FEW_ROWS), None);
        let behind_span = StepMetadata { span_ends: vec![6, 7], ..step(&[(5, 2)]) };
        assert_eq!(Bucket::of(&behind_span, 256, FEW_ROWS), Some(bucket(2, 2)), "its rows see no further than themselves");
        let drafted = step(&[(5, 4), (600, 1)]);
        assert_eq!((Bucket::of(&drafted, 256, 1), Bucket::of(&drafted, 256, FEW_ROWS)), (None, Some(bucket(8, 16))));
        assert_eq!(Bucket::of(&step(&[]), 256, FEW_ROWS), None);
        assert_eq!(Bucket::of(&step(&[(5, 1); 257]), 1000, FEW_ROWS), None);
        assert_eq!(Bucket::of(&step(&[(5, 1); 9]), 15, FEW_ROWS), None, "16 rows do not fit");
        assert_eq!(Bucket::of(&step(&[(5, 1); 9]), 16, FEW_ROWS), Some(bucket(16, 16)));
        // As many rows as requests, but not one each.
        let uneven = StepMetadata { query_start_loc: vec![0, 0, 2], ..step(&[(5, 1), (6, 1)]) };
        assert_eq!(Bucket::of(&uneven, 256, FEW_ROWS), None);
    }

    #[test]
    fn parts_are_padded_by_what_all_requests_have() {
        let parts = |positions: &[u32]| {
            let requests: Vec<_> = positions.iter().map(|p| (*p, 1)).collect();
            Bucket::of(&step(&requests), 256, FEW_ROWS).unwrap().parts
        };
        assert_eq!([parts(&[0]), parts(&[511, 3]), parts(&[512]), parts(&[2047, 9])], [1, 2, 2, 8]);
        assert_eq!([parts(&[2048]), parts(&[100_000]), parts(&[100_000, 1]), parts(&[5000; 2])], [8, 64, 128, 32]);
        // A long request among many short ones is not many long ones.
        let mut positions = vec![7; 256];
        assert_eq!(parts(&positions), 256);
        positions[9] = 100_000;
        assert_eq!(parts(&positions), 512);
        // No more than there can be, though 24 is no power of two.
        assert_eq!([parts(&[100_000; 24]), parts(&[600; 20])], [1536, 64]);
    }

    #[test]
    fn steps_with_more_parts_than_are_kept_have_no_bucket() {
        // 16 parts each.
        assert_eq!(Bucket::of(&step(&[(8191, 1); 256]), 256, FEW_ROWS), Some(bucket(256, 4096)));
        assert_eq!(Bucket::of(&step(&[(8192, 1); 256]), 256, FEW_ROWS), None);
        assert_eq!(Bucket::largest(256), Bucket { has_adapters: true, ..bucket(256, 4096) });
        assert_eq!(Bucket::largest(8), Bucket { has_adapters: true, ..bucket(8, 512) });
    }

    #[test]
    fn few_sizes_serve_all_steps_of_as_many_rows() {
        for rows in [1, 2, 8, 24, 200, 256] {
            let mut sizes: Vec<_> = (rows + 1..=most_parts(rows)).map(|parts| padded_parts(rows, parts)).collect();
            assert!((rows + 1..).zip(&sizes).all(|(parts, padded)| parts <= *padded && *padded <= most_parts(rows)));
            sizes.dedup();
            assert!(sizes.len() <= 7, "{sizes:?}");
        }
    }

    #[test]
    fn a_rehearsal_is_a_step_of_its_rows_that_writes_nowhere() {
        for (rows, parts) in [(24, 24), (24, 128), (2, 4), (1, 1), (1, 16)] {
            let bucket = bucket(rows, parts);
            let step = bucket.rehearsal(2, true);
            let own = Bucket::of(&step, 256, FEW_ROWS).unwrap();
            assert_eq!((own.rows, own.has_parts()), (rows, bucket.has_parts()));
            assert!(own.parts <= parts);
            assert_eq!(step.groups.len(), 2);
            assert_eq!((step.state_slots, bucket.rehearsal(1, false).state_slots), (vec![NO_SLOT; rows], vec![]));
            for group in &step.groups {
                assert!(group.slot_mapping.iter().all(|slot| *slot == -1));
                assert_eq!(group.block_tables, vec![0; rows * group.max_blocks]);
                assert!(group.max_blocks * MIN_BLOCK_SIZE > step.positions[0] as usize);
            }
        }
    }
}
