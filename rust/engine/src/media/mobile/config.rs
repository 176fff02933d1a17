//! What a convolutional encoder of images is like.

/// MobileNet-V5, which sees for Gemma 3n: stages of blocks over maps of channels, of which the last two are put together. It is
/// made of the blocks of MobileNet-V4 (Qin et al. 2024, arXiv:2404.10518).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MobileConfig {
    /// Rows and columns of pixels.
    pub size: [usize; 2],
    /// Channels behind the first convolution.
    pub stem: usize,
    /// Blocks, of which the first one of each stage takes every other place.
    pub stages: Vec<Vec<BlockConfig>>,
    /// Vectors along a side of an image.
    pub side: usize,
    /// Columns of a vector.
    pub out_features: usize,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockConfig {
    /// What it does.
    pub kind: BlockKind,
    /// Channels that go in.
    pub in_channels: usize,
    /// Channels that come out.
    pub out_channels: usize,
    /// Places from one output to the next.
    pub stride: usize,
}

/// What a block does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// A convolution over squares to more channels, and a matrix back.
    Edge {
        /// Places along a side of a square.
        side: usize,
        /// Channels between the two.
        inner: usize,
    },
    /// A matrix to more channels and one back, with convolutions of single channels before and between.
    Inverted {
        /// Places along a side of the squares of the one before; 0: there is none.
        start: usize,
        /// The same of the one between.
        middle: usize,
        /// Channels between the two matrices.
        inner: usize,
    },
    /// Attention of all places to places, in which all heads have the same keys and values.
    Attention {
        /// Heads of queries.
        num_heads: usize,
        /// Values of a head.
        head_dim: usize,
        /// Places from one that is looked at to the next; of more than one a convolution of single channels makes these.
        stride: usize,
        /// Places along a side of the squares of that one.
        side: usize,
    },
}

impl BlockConfig {
    /// Whether what goes in is added to what comes out.
    pub(super) fn is_residual(&self) -> bool {
        self.stride == 1 && self.in_channels == self.out_channels
    }

    /// Columns of its widest product.
    fn widest(&self) -> usize {
        let own = match self.kind {
            BlockKind::Edge { side, inner } => inner.max(self.in_channels * side * side),
            BlockKind::Inverted { inner, .. } => inner,
            BlockKind::Attention { num_heads, head_dim, .. } => num_heads * head_dim,
        };
        own.max(self.in_channels).max(self.out_channels)
    }

    /// Channels of a map that is kept whole beside what goes in and what comes out.
    fn inner_map(&self) -> usize {
        match self.kind {
            BlockKind::Inverted { middle: 1.., inner, .. } => 2 * inner,
            BlockKind::Edge { .. } => 0,
            _ => 2 * self.in_channels,
        }
    }
}

impl MobileConfig {
    /// Rows and columns of places behind each stage.
    pub(crate) fn sizes(&self) -> Vec<[usize; 2]> {
        let mut size = self.size.map(|len| len.div_ceil(2));
        let behind = |stage: &Vec<BlockConfig>| {
            for block in stage {
                size = size.map(|len| len.div_ceil(block.stride));
            }
            size
        };
        self.stages.iter().map(behind).collect()
    }

    /// Channels of what is put together behind the last stages.
    pub(crate) fn fused_channels(&self) -> usize {
        let last = |stage: &Vec<BlockConfig>| stage.last().map_or(0, |block| block.out_channels);
        self.stages.iter().rev().take(FUSED).map(last).sum()
    }

    /// Columns of the widest product.
    pub(crate) fn widest(&self) -> usize {
        let blocks = self.stages.iter().flatten().map(BlockConfig::widest).max().unwrap_or(0);
        blocks.max(self.stem).max(FUSED_FACTOR * self.fused_channels()).max(self.out_features)
    }

    /// Bytes of the activations of an image.
    pub(crate) fn activation_bytes(&self) -> u64 {
        let mut values = self.size.iter().product::<usize>().saturating_mul(3);
        let mut size = self.size.map(|len| len.div_ceil(2));
        for (stage, behind) in self.stages.iter().zip(self.sizes()) {
            for block in stage {
                let channels = block.in_channels + block.out_channels + block.inner_map();
                values = values.max(size.iter().product::<usize>().saturating_mul(channels));
                size = behind;
            }
        }
        // Rows of products are there besides, and what the last stages made.
        let rows = 4 * super::ROWS * self.widest();
        let fused = self.sizes().iter().rev().nth(FUSED - 1).map_or(0, |size| size[0] * size[1] * 2 * self.out_features);
        (values.saturating_add(rows).saturating_add(fused) as u64).saturating_mul(size_of::<f32>() as u64)
    }
}

/// Stages whose outputs are put together.
pub(crate) const FUSED: usize = 2;
/// Columns of what becomes of these, by their own.
pub(crate) const FUSED_FACTOR: usize = 2;
