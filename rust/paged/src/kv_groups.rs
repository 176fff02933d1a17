//! How a model's layers share one pool of blocks.
//!
//! Layers that keep different tokens (all of them, or a window) cannot share a block table. They are split in groups
//! of `layers_per_group` layers; a group has its own block table, and a physical block holds `block_size` tokens for
//! `layers_per_group` layer planes, whichever group it serves at the moment.

use crate::config::{KvDType, ModelConfigLike, Retention};
use crate::error::ConfigError;

/// The largest number up to `max` of which a condition holds, which holds up to some number and of none beyond; 0 if of none.
pub(crate) fn last_that_holds(max: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut last, mut limit) = (0, max.saturating_add(1));
    while limit - last > 1 {
        let middle = last + (limit - last) / 2;
        if holds(middle) {
            last = middle;
        } else {
            limit = middle;
        }
    }
    last
}

/// Layers with one block table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// The same for all of them.
    pub retention: Retention,
    /// The model's layers in it, ascending; at most [`KvGroups::layers_per_group`].
    pub layers: Vec<usize>,
}

impl KvGroup {
    /// First logical block that a query at position `num_tokens` (a multiple of the block size) or later can see.
    pub(crate) fn first_visible_block(&self, num_tokens: usize, block_size: usize) -> usize {
        self.retention.window().map_or(0, |window| (num_tokens + 1).saturating_sub(window) / block_size)
    }

    /// Most blocks a sequence that grows to `num_tokens` holds at once, in steps of at most `max_chunk_len` tokens.
    pub(crate) fn peak_blocks(&self, num_tokens: usize, max_chunk_len: usize, block_size: usize) -> usize {
        let all = num_tokens.div_ceil(block_size);
        let Some(window) = self.retention.window() else { return all };
        // The chunk starts anywhere inside a block, and blocks are given back on block boundaries.
        let chunk = max_chunk_len.saturating_add(block_size - 1).div_ceil(block_size);
        all.min((window - 1).div_ceil(block_size).saturating_add(chunk))
    }
}

impl KvGroup {
    /// Most blocks that `num_seqs` such sequences hold at once, when a step computes at most so many tokens of all.
    fn concurrent_blocks(&self, num_seqs: usize, num_tokens: usize, max_num_batched_tokens: usize, block_size: usize) -> usize {
        let apart = num_seqs.saturating_mul(self.peak_blocks(num_tokens, max_num_batched_tokens, block_size));
        let Some(window) = self.retention.window() else { return apart };
        // As for one sequence; each adds its own rounding, but they share the step's tokens.
        let rounding = num_seqs.saturating_mul(2 * block_size - 2);
        let chunks = max_num_batched_tokens.saturating_add(rounding) / block_size;
        apart.min(num_seqs.saturating_mul((window - 1).div_ceil(block_size)).saturating_add(chunks))
    }
}

/// What of a layer decides its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizedLayer {
    /// Which tokens it keeps.
    pub retention: Retention,
    /// Bytes of its keys and values in a block; 0 for a layer that reads another one's.
    pub block_bytes: u64,
}

/// The layers of a model.
pub(crate) fn sized_layers(
    model: &dyn ModelConfigLike,
    cache_type: KvDType,
    block_size: usize,
) -> Result<Vec<SizedLayer>, ConfigError> {
    let layer = |layer: usize| {
        let too_large = ConfigError::TooLarge { what: "the bytes of a KV block, in layer", value: layer as u64 };
        let block_bytes = model.kv_shape(layer).block_bytes(cache_type, block_size).ok_or(too_large)?;
        Ok(SizedLayer { retention: model.retention(layer), block_bytes })
    };
    (0..model.num_layers()).map(layer).collect()
}

/// The groups of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvGroups {
    /// At least one of a model with layers.
    pub groups: Vec<KvGroup>,
    /// Layers of the largest group: layer planes of a physical block, where all layers are of one size.
    pub layers_per_group: usize,
}

/// What one more group weighs when groups are chosen, in layers of mean size: a group costs a block table a request
/// and a step, bytes that it leaves over cost memory in every block of it.
const LAYERS_PER_GROUP: f64 = 0.5;

/// Cuts members, in order, in groups of as many as take up to `capacity` bytes together, one at least.
fn cut(members: &[usize], bytes: impl Fn(usize) -> u64, capacity: u128) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut taken = 0;
    for &member in members {
        taken += u128::from(bytes(member));
        match groups.last_mut() {
            Some(group) if taken <= capacity => group.push(member),
            _ => {
                taken = bytes(member).into();
                groups.push(vec![member]);
            }
        }
    }
    groups
}

impl KvGroups {
    /// Groups for a model's layers.
    ///
    /// # Errors
    /// [`ConfigError::TooLarge`] when the bytes of a block overflow.
    pub fn of_model(model: &dyn ModelConfigLike, cache_type: KvDType, block_size: usize) -> Result<Self, ConfigError> {
        Ok(Self::from_sized_layers(&sized_layers(model, cache_type, block_size)?))
    }

    /// Groups for layers with these windows and KV of one size, in layer order.
    pub fn from_layers(windows: &[Option<usize>]) -> Self {
        let layers: Vec<_> = windows.iter().map(|&window| SizedLayer { retention: window.into(), block_bytes: 1 }).collect();
        Self::from_sized_layers(&layers)
    }

    /// Groups for these layers, in layer order; those without KV of their own are in none.
    ///
    /// One kind of layer makes one group. Otherwise each kind is cut into groups that take as many bytes of a block as
    /// wastes least, where both bytes left over in a block and the number of groups count as waste.
    pub fn from_sized_layers(layers: &[SizedLayer]) -> Self {
        let mut kinds: Vec<(Retention, Vec<usize>)> = Vec::new();
        for (index, layer) in layers.iter().enumerate().filter(|(_, layer)| layer.block_bytes > 0) {
            let retention = Retention::from(layer.retention.window());
            match kinds.iter_mut().find(|kind| kind.0 == retention) {
                Some(kind) => kind.1.push(index),
                None => kinds.push((retention, vec![index])),
            }
        }
        if kinds.is_empty() {
            kinds.push((Retention::All, Vec::new()));
        }
        let bytes = |members: &[usize]| members.iter().map(|&layer| u128::from(layers[layer].block_bytes)).sum::<u128>();
        let groups_of = |capacity: u128| -> Vec<KvGroup> {
            let of_kind = |kind: &(Retention, Vec<usize>)| {
                let retention = kind.0;
                cut(&kind.1, |layer| layers[layer].block_bytes, capacity)
                    .into_iter()
                    .map(move |layers| KvGroup { retention, layers })
            };
            kinds.iter().flat_map(of_kind).collect()
        };
        let total = kinds.iter().map(|(_, members)| bytes(members)).sum::<u128>();
        let mean = total as f64 / kinds.iter().map(|(_, members)| members.len()).sum::<usize>().max(1) as f64;
        let waste = |groups: &[KvGroup]| {
            let block = groups.iter().map(|group| bytes(&group.layers)).max().unwrap_or(0);
            (block * groups.len() as u128 - total) as f64 + groups.len() as f64 * mean * LAYERS_PER_GROUP
        };
        // A capacity that no first layers of a kind fill wastes more than the next smaller one that some do.
        let mut capacities: Vec<u128> = Vec::new();
        for (_, members) in &kinds {
            capacities.extend(members.iter().scan(0, |sum, &layer| {
                *sum += u128::from(layers[layer].block_bytes);
                Some(*sum)
            }));
        }
        capacities.sort_unstable_by(|a, b| b.cmp(a));
        capacities.dedup();
        let groups = capacities.into_iter().map(groups_of).min_by(|a, b| waste(a).total_cmp(&waste(b)));
        let groups = groups.unwrap_or_else(|| vec![KvGroup { retention: Retention::All, layers: Vec::new() }]);
        let layers_per_group = groups.iter().map(|group| group.layers.len()).max().unwrap_or(0).max(1);
        Self { groups, layers_per_group }
    }

    /// Where a layer's KV lies: its group, and its plane in the group's blocks. `None` for a layer out of range.
    pub fn layer_slot(&self, layer: usize) -> Option<(usize, usize)> {
        self.groups.iter().enumerate().find_map(|(group, members)| {
            let index = members.layers.binary_search(&layer).ok()?;
            Some((group, index))
        })
    }

    /// Most blocks that a sequence growing to `num_tokens` holds at once, over all groups, when no step computes more
    /// than `max_chunk_len` of its tokens.
    pub fn peak_blocks(&self, num_tokens: usize, max_chunk_len: usize, block_size: usize) -> usize {
        self.groups.iter().map(|group| group.peak_blocks(num_tokens, max_chunk_len, block_size)).sum()
    }

    /// Most blocks that `num_seqs` sequences growing to `num_tokens` each hold at once, over all groups, when a step
    /// computes at most `max_num_batched_tokens` tokens of all of them.
    pub fn concurrent_blocks(
        &self,
        num_seqs: usize,
        num_tokens: usize,
        max_num_batched_tokens: usize,
        block_size: usize,
    ) -> usize {
        let of_group = |group: &KvGroup| group.concurrent_blocks(num_seqs, num_tokens, max_num_batched_tokens, block_size);
        self.groups.iter().map(of_group).fold(0, usize::saturating_add)
    }

    /// The longest sequence that `num_blocks` blocks can serve alone, looking no further than `max_tokens`.
    pub fn servable_tokens(&self, num_blocks: usize, block_size: usize, max_tokens: usize) -> usize {
        last_that_holds(max_tokens, |num_tokens| self.peak_blocks(num_tokens, 1, block_size) <= num_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed(num_windowed: usize, num_full: usize) -> KvGroups {
        let mut windows = vec![Some(512); num_windowed];
        windows.extend(vec![None; num_full]);
        KvGroups::from_layers(&windows)
    }

    #[test]
    fn one_kind_of_layer_makes_one_group() {
        for window in [None, Some(4096)] {
            let groups = KvGroups::from_layers(&[window; 30]);
            assert_eq!((groups.groups.len(), groups.layers_per_group), (1, 30));
            assert_eq!(groups.layer_slot(29), Some((0, 29)));
            assert_eq!(groups.layer_slot(30), None);
        }
    }

    #[test]
    fn mixed_layers_are_cut_with_little_padding_and_few_groups() {
        let shape = |groups: &KvGroups| (groups.groups.len(), groups.layers_per_group);
        assert_eq!(shape(&mixed(15, 3)), (6, 3));
        assert_eq!(shape(&mixed(22, 4)), (7, 4));
        assert_eq!(shape(&mixed(29, 5)), (7, 5));
        assert_eq!(shape(&mixed(12, 12)), (2, 12));
    }

    #[test]
    fn every_layer_has_one_plane_and_kinds_never_mix() {
        for (num_windowed, num_full) in [(15, 3), (22, 4), (1, 7), (5, 5), (52, 10)] {
            let groups = mixed(num_windowed, num_full);
            let mut seen = std::collections::HashSet::new();
            for layer in 0..num_windowed + num_full {
                let (group, index) = groups.layer_slot(layer).unwrap();
                assert!(index < groups.layers_per_group && seen.insert((group, index)));
                assert_eq!(groups.groups[group].retention.window(), (layer < num_windowed).then_some(512));
            }
        }
    }

    #[test]
    fn layers_of_unequal_size_are_grouped_by_bytes_and_those_without_kv_are_in_no_group() {
        let layer = |window: Option<usize>, block_bytes| SizedLayer { retention: window.into(), block_bytes };
        // Two windowed layers take the bytes of a full one, whose heads are twice as wide.
        let mut layers = vec![layer(Some(512), 100); 8];
        layers.extend([layer(None, 200); 4]);
        layers.push(layer(None, 0));
        let groups = KvGroups::from_sized_layers(&layers);
        let bytes = |group: &KvGroup| group.layers.iter().map(|&layer| layers[layer].block_bytes).sum::<u64>();
        let sizes: Vec<_> = groups.groups.iter().map(bytes).collect();
        assert_eq!(sizes, [800, 800]);
        assert_eq!((groups.layers_per_group, groups.layer_slot(12)), (8, None));
        // One kind is one group, whatever its layers' sizes.
        let groups = KvGroups::from_sized_layers(&[layer(None, 3), layer(None, 100), layer(None, 7)]);
        assert_eq!(groups.groups, [KvGroup { retention: Retention::All, layers: vec![0, 1, 2] }]);
    }

    #[test]
    fn sequences_that_share_a_steps_tokens_never_hold_more_than_concurrent_blocks() {
        let (block_size, num_tokens) = (4, 40);
        for window in [1, 3, 4, 9, 100] {
            let group = KvGroup { retention: Retention::Window(window), layers: vec![0] };
            let groups = KvGroups { groups: vec![group.clone()], layers_per_group: 1 };
            for chunk in [1, 5, 16] {
                assert_eq!(
                    groups.concurrent_blocks(1, num_tokens, chunk, block_size),
                    groups.peak_blocks(num_tokens, chunk, block_size)
                );
                for num_seqs in 2..5 {
                    // The worst that each does with its share of the step, in any way to share it equally or to one.
                    let held = |share: usize| match share {
                        0 => group.peak_blocks(num_tokens, 1, block_size),
                        share => group.peak_blocks(num_tokens, share, block_size),
                    };
                    let equal = num_seqs * held(chunk / num_seqs);
                    let one = held(chunk - 1) + (num_seqs - 1) * held(0);
                    let most = groups.concurrent_blocks(num_seqs, num_tokens, chunk, block_size);
                    assert!(most >= equal.max(one), "window {window} chunk {chunk} seqs {num_seqs}: {most} < {equal}, {one}");
                    assert!(most <= num_seqs * group.peak_blocks(num_tokens, chunk, block_size));
                }
            }
        }
    }

    #[test]
    fn peak_blocks_bounds_every_chunking_and_is_reached() {
        for block_size in [1, 2, 4] {
            for window in 1..10 {
                let group = KvGroup { retention: Retention::Window(window), layers: vec![0] };
                for chunk in 1..8 {
                    for num_tokens in 1..40 {
                        let mut most = 0;
                        for computed in 0..num_tokens {
                            let aligned = computed / block_size * block_size;
                            let first = group.first_visible_block(aligned, block_size);
                            let end = num_tokens.min(computed + chunk).div_ceil(block_size);
                            most = most.max(end - first);
                        }
                        let peak = group.peak_blocks(num_tokens, chunk, block_size);
                        assert!(most <= peak, "window {window} chunk {chunk} tokens {num_tokens}: {most} > {peak}");
                        if num_tokens > window + chunk + 2 * block_size {
                            assert_eq!(most, peak, "window {window} chunk {chunk} tokens {num_tokens}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn servable_tokens_is_the_last_length_that_fits() {
        let groups = mixed(15, 3);
        for num_blocks in 0..60 {
            let tokens = groups.servable_tokens(num_blocks, 8, 10_000);
            assert!(groups.peak_blocks(tokens, 1, 8) <= num_blocks);
            assert!(tokens == 10_000 || groups.peak_blocks(tokens + 1, 1, 8) > num_blocks);
        }
    }
}
