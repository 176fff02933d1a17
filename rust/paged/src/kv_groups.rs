//! How a model's layers share one pool of blocks.
//!
//! Layers that keep different tokens (all of them, or a window) cannot share a block table. They are split in groups
//! of `layers_per_group` layers; a group has its own block table, and a physical block holds `block_size` tokens for
//! `layers_per_group` layer planes, whichever group it serves at the moment.

/// Layers with one block table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// Key `j` is visible to query `i` iff `i - window < j <= i`; `None` is full attention.
    pub window: Option<usize>,
    /// The model's layers in it, ascending; at most [`KvGroups::layers_per_group`].
    pub layers: Vec<usize>,
}

impl KvGroup {
    /// First logical block that a query at position `num_tokens` (a multiple of the block size) or later can see.
    pub(crate) fn first_visible_block(&self, num_tokens: usize, block_size: usize) -> usize {
        self.window.map_or(0, |window| (num_tokens + 1).saturating_sub(window) / block_size)
    }

    /// Most blocks a sequence that grows to `num_tokens` holds at once, in steps of at most `max_chunk_len` tokens.
    pub(crate) fn peak_blocks(&self, num_tokens: usize, max_chunk_len: usize, block_size: usize) -> usize {
        let all = num_tokens.div_ceil(block_size);
        let Some(window) = self.window else { return all };
        // The chunk starts anywhere inside a block, and blocks are given back on block boundaries.
        let chunk = max_chunk_len.saturating_add(block_size - 1).div_ceil(block_size);
        all.min((window - 1).div_ceil(block_size).saturating_add(chunk))
    }
}

/// The groups of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroups {
    /// At least one.
    pub groups: Vec<KvGroup>,
    /// Layer planes of a physical block. A group with fewer layers leaves the last ones unused.
    pub layers_per_group: usize,
}

/// What one more group weighs against one padded layer plane when groups are chosen: a group costs a block table a
/// request and a step, a padded plane costs memory in every block of its group.
const PLANES_PER_GROUP: f64 = 0.5;

impl KvGroups {
    /// Groups for layers with these windows, in layer order (`None`: full attention; a window of 0 counts as 1).
    ///
    /// One kind of layer makes one group. Otherwise each kind is cut into groups of the size that wastes least,
    /// where both padded planes and the number of groups count as waste.
    pub fn from_layers(windows: &[Option<usize>]) -> Self {
        let mut kinds: Vec<KvGroup> = Vec::new();
        for (layer, window) in windows.iter().enumerate() {
            let window = window.map(|window| window.max(1));
            match kinds.iter_mut().find(|kind| kind.window == window) {
                Some(kind) => kind.layers.push(layer),
                None => kinds.push(KvGroup { window, layers: vec![layer] }),
            }
        }
        if kinds.is_empty() {
            kinds.push(KvGroup { window: None, layers: Vec::new() });
        }
        let num_groups = |size: usize| kinds.iter().map(|kind| kind.layers.len().div_ceil(size)).sum::<usize>();
        let waste = |size: usize| (num_groups(size) * size - windows.len()) as f64 + num_groups(size) as f64 * PLANES_PER_GROUP;
        let largest = kinds.iter().map(|kind| kind.layers.len()).max().unwrap_or(0).max(1);
        let layers_per_group = (1..=largest).rev().min_by(|a, b| waste(*a).total_cmp(&waste(*b))).unwrap_or(largest);
        let groups = kinds
            .iter()
            .flat_map(|kind| {
                let size = layers_per_group.min(kind.layers.len()).max(1);
                let mut groups: Vec<_> =
                    kind.layers.chunks(size).map(|layers| KvGroup { window: kind.window, layers: layers.to_vec() }).collect();
                if groups.is_empty() {
                    groups.push(kind.clone());
                }
                groups
            })
            .collect();
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

    /// The longest sequence that `num_blocks` blocks can serve alone, looking no further than `max_tokens`.
    pub fn servable_tokens(&self, num_blocks: usize, block_size: usize, max_tokens: usize) -> usize {
        let fits = |num_tokens: usize| self.peak_blocks(num_tokens, 1, block_size) <= num_blocks;
        let (mut fitting, mut limit) = (0, max_tokens.saturating_add(1));
        while limit - fitting > 1 {
            let middle = fitting + (limit - fitting) / 2;
            if fits(middle) {
                fitting = middle;
            } else {
                limit = middle;
            }
        }
        fitting
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
                assert_eq!(groups.groups[group].window, (layer < num_windowed).then_some(512));
            }
        }
    }

    #[test]
    fn peak_blocks_bounds_every_chunking_and_is_reached() {
        for block_size in [1, 2, 4] {
            for window in 1..10 {
                let group = KvGroup { window: Some(window), layers: vec![0] };
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
