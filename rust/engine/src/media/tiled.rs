//! A tower that sees all tiles of an image at once (Llama 3.2 Vision, arXiv:2407.21783): vectors for a tile's place in its
//! picture, then layers over all tiles, then gated ones.
//!
//! As the model was trained, every image has as many tiles as one may have, and every tile a multiple of eight rows. What fills
//! these up is seen by the image's own rows, and sees them, but not itself.

use device::{Backend, KvGroupMetadata, Norm, NormKind, Projection, StepMetadata, Tensor, WeightView};
use images::Processed;

use super::{
    config::{Tiled, TowerConfig},
    grid::read_patch,
    tower::{BLOCK_SIZE, Buffers, Tower},
    tower_layer::TowerLayer,
    weights::TowerWeights,
};
use crate::{EngineError, weights::floats};

/// The rows of a tile are a multiple of this.
const ROWS_OF_TILE: usize = 8;
/// Of the norms before and behind the layers, whatever that of the layers is.
const EPS: f32 = 1e-5;

/// What such a tower has besides.
pub(super) struct TiledTower {
    /// Of each shape a row: of its tiles, what is added to all patches of one.
    before: Gated,
    /// The same, behind the layers.
    behind: Gated,
    /// The same for each row of a tile.
    positions: Gated,
    pre_norm: Norm,
    post_norm: Norm,
    layers: Vec<TowerLayer>,
}

/// Vectors, one row for each shape of an image, and what they are multiplied by.
struct Gated {
    table: WeightView,
    gate: f32,
}

impl Gated {
    fn row(&self, shape: usize) -> Result<Vec<f32>, EngineError> {
        let row = floats(self.table.dtype, self.table.row(shape));
        let mut row = row.ok_or_else(|| EngineError::Internal("vectors of tiles that are no floats".into()))?;
        for x in &mut row {
            *x *= self.gate;
        }
        Ok(row)
    }
}

/// Shapes of up to so many tiles.
pub(super) fn num_shapes(max_tiles: usize) -> usize {
    (1..=max_tiles).map(|rows| max_tiles / rows).sum()
}

/// The number of a shape among those of up to so many tiles, counted from 1.
fn shape_number(max_tiles: usize, (rows, columns): (usize, usize)) -> usize {
    (1..rows).map(|rows| max_tiles / rows).sum::<usize>() + columns
}

impl TowerConfig {
    /// Rows of a tile, that before its patches among them.
    pub(super) fn rows_of_tile(&self) -> usize {
        let side = self.side();
        side * side + usize::from(self.has_class)
    }

    /// Rows that any image is computed with.
    pub(super) fn rows_of_image(&self) -> usize {
        self.tiled.as_ref().map_or(0, |tiled| tiled.max_tiles * self.rows_of_tile().next_multiple_of(ROWS_OF_TILE))
    }

    /// Bytes of what is taken of an image's layers, put together and multiplied, with vectors of so many columns.
    pub(super) fn taken_bytes(&self, columns: usize) -> u64 {
        let Some(tiled) = &self.tiled else { return 0 };
        (tiled.max_tiles * self.rows_of_tile() * (3 * self.output_size() + 2 * columns) * size_of::<f32>()) as u64
    }
}

impl TiledTower {
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        (config, tiled): (&TowerConfig, &Tiled),
        place: &str,
    ) -> Result<Self, EngineError> {
        let (hidden, num_rows) = (config.hidden_size, config.rows_of_tile());
        let mut gated = |table: &str, gate: &str, of_tile: usize| {
            let shape = [num_shapes(tiled.max_tiles) + 1, tiled.max_tiles * of_tile];
            Ok::<_, EngineError>(Gated {
                table: weights.float_rows(&format!("{place}{table}.weight"), shape)?,
                gate: weights.constant(&format!("{place}{gate}"), &[1])?[0].tanh(),
            })
        };
        let (before, behind) = ("pre_tile_positional_embedding", "post_tile_positional_embedding");
        let positions = "gated_positional_embedding";
        let before = gated(&format!("{before}.embedding"), &format!("{before}.gate"), hidden)?;
        let behind = gated(&format!("{behind}.embedding"), &format!("{behind}.gate"), hidden)?;
        let positions = gated(&format!("{positions}.tile_embedding"), &format!("{positions}.gate"), num_rows * hidden)?;
        let named = |name: &str| format!("{place}{name}");
        let kind = (NormKind::Layer, EPS, 0.0);
        let (pre_norm, post_norm) = (
            weights.norm(&named(config.names.pre_norm), hidden, kind)?,
            weights.norm(&named(config.names.post_norm), hidden, kind)?,
        );
        let mut layers = Vec::with_capacity(tiled.num_global_layers);
        for number in 0..tiled.num_global_layers {
            let named = |name: &str| format!("{place}global_{}", name.replace('*', &number.to_string()));
            let mut layer = TowerLayer::new(weights, config, number, &named)?;
            for (scale, gate) in layer.scales.iter_mut().zip(["gate_attn", "gate_ffn"]) {
                *scale = weights.constant(&named(&format!("transformer.layers.*.{gate}")), &[1])?[0].tanh();
            }
            layers.push(layer);
        }
        Ok(Self { before, behind, positions, pre_norm, post_norm, layers })
    }
}

/// Where the rows of an image lie: first its own, tile by tile, then those that fill up.
struct Rows {
    of_tile: usize,
    own: usize,
    /// The first of those that fill tiles up.
    filling: usize,
    all: usize,
    /// The tile of each row.
    tiles: Vec<usize>,
}

impl Rows {
    fn new(config: &TowerConfig, num_tiles: usize, max_tiles: usize) -> Self {
        let of_tile = config.rows_of_tile();
        let filled = of_tile.next_multiple_of(ROWS_OF_TILE);
        let mut tiles: Vec<_> = (0..num_tiles).flat_map(|tile| std::iter::repeat_n(tile, of_tile)).collect();
        tiles.extend((num_tiles..max_tiles).flat_map(|tile| std::iter::repeat_n(tile, of_tile)));
        let filling = tiles.len();
        tiles.extend((0..max_tiles).flat_map(|tile| std::iter::repeat_n(tile, filled - of_tile)));
        Self { of_tile, own: num_tiles * of_tile, filling, all: tiles.len(), tiles }
    }

    /// The image's own rows see all; the others see these.
    fn step(&self) -> StepMetadata {
        let num_blocks = self.all.div_ceil(BLOCK_SIZE);
        let mut group = KvGroupMetadata { max_blocks: num_blocks, ..KvGroupMetadata::default() };
        let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
        let mut request = |len: usize, seen: usize| {
            step.positions.extend(0..len as u32);
            step.query_start_loc.push(step.positions.len() as u32);
            step.seq_lens.push(seen as u32);
            step.span_ends.extend(std::iter::repeat_n(seen as u32, len));
            group.block_tables.extend(1..=num_blocks as u32);
        };
        request(self.own, self.all);
        let mut rest = self.all - self.own;
        // A request has no more rows than keys.
        while rest > 0 {
            let len = rest.min(self.own);
            request(len, self.own);
            rest -= len;
        }
        group.slot_mapping = (0..self.all).map(|row| (BLOCK_SIZE + row) as i64).collect();
        step.rope_positions = (0..self.all as u32).collect();
        step.groups.push(group);
        step
    }
}

impl Tower {
    /// The hidden states of an image's own rows, tile by tile, `[tiles * rows, output_size]`: behind the last layer, and behind
    /// them, value by value, those that were taken.
    pub(crate) fn run_tiled(&mut self, backend: &dyn Backend, image: &Processed) -> Result<Vec<f32>, EngineError> {
        let Some(config) = &self.config.tiled else {
            return Err(EngineError::Internal("tiles of one image for a tower that takes each by itself".into()));
        };
        if image.grid.0 * image.grid.1 != image.tiles.len() || image.tiles.len() > config.max_tiles {
            return Err(EngineError::Internal(format!("{} tiles in a grid of {:?}", image.tiles.len(), image.grid)));
        }
        let shape = shape_number(config.max_tiles, image.grid);
        let rows = Rows::new(&self.config, image.tiles.len(), config.max_tiles);
        let taken = config.taken.clone();
        let (step, hidden_size) = (rows.step(), self.config.hidden_size);
        let mut buffers = self.reserve(backend, rows.all, rows.all.div_ceil(BLOCK_SIZE))?;
        let tiled = self.tiled.as_ref().ok_or_else(|| EngineError::Internal("a tower without the layers over tiles".into()))?;
        let behind = tiled.behind.row(shape)?;
        self.embed_tiles(backend, (image, shape), &rows, &mut buffers)?;
        backend.begin_step(&step);
        let own = |hidden: &mut Tensor| {
            backend.fetch(hidden);
            hidden.as_slice()[..rows.own * hidden_size].to_vec()
        };
        let mut states = vec![Vec::new(); taken.len()];
        for (number, layer) in self.layers.iter().enumerate() {
            self.layer(backend, layer, (&step, None), &mut buffers);
            for (states, _) in states.iter_mut().zip(&taken).filter(|(_, taken)| **taken == number) {
                *states = own(&mut buffers.hidden);
            }
        }
        backend.fetch(&mut buffers.hidden);
        for (row, tile) in rows.tiles.iter().enumerate() {
            let (row, added) = (buffers.hidden.row_mut(row), &behind[tile * hidden_size..][..hidden_size]);
            tiled.post_norm.apply(row);
            row.iter_mut().zip(added).for_each(|(x, added)| *x += added);
        }
        backend.store(&mut buffers.hidden);
        for layer in &tiled.layers {
            self.layer(backend, layer, (&step, None), &mut buffers);
        }
        let last = own(&mut buffers.hidden);
        self.buffers = Some(buffers);
        let mut outputs = Vec::with_capacity(last.len() * (1 + taken.len()));
        for (row, values) in last.chunks_exact(hidden_size).enumerate() {
            outputs.extend_from_slice(values);
            let first = row * hidden_size;
            outputs.extend((first..first + hidden_size).flat_map(|at| states.iter().map(move |states| states[at])));
        }
        Ok(outputs)
    }

    /// All rows as hidden states, normalized, but those that fill a tile up, which are zeros.
    fn embed_tiles(
        &self,
        backend: &dyn Backend,
        (image, shape): (&Processed, usize),
        rows: &Rows,
        buffers: &mut Buffers,
    ) -> Result<(), EngineError> {
        let (Some(tiled), Some(patches)) = (&self.tiled, &mut buffers.patches) else { return Ok(()) };
        let (Some(class), Some(positions)) = (&self.class, &self.positions) else { return Ok(()) };
        let (patch_len, cols) = (self.config.patch_len(), self.config.hidden_size);
        let side = self.config.side();
        patches.set_rows(rows.own);
        for (tile, first) in image.tiles.iter().zip((0..).step_by(rows.of_tile)) {
            patches.row_mut(first).fill(0.0);
            for place in 0..side * side {
                let at = (place / side, place % side);
                read_patch(tile, at, self.config.patch_size, &mut patches.row_mut(first + 1 + place)[..patch_len]);
            }
        }
        backend.store(patches);
        let hidden = &mut buffers.hidden;
        let product = &mut [Projection { linear: self.patch_matrix()?, out: &mut *hidden }];
        backend.norm_linear(patches, None, product, &StepMetadata::default());
        backend.fetch(hidden);
        hidden.set_rows(rows.all);
        let (before, of_rows) = (tiled.before.row(shape)?, tiled.positions.row(shape)?);
        let of_positions = 1.0 - tiled.positions.gate;
        for (row, tile) in rows.tiles.iter().enumerate() {
            let x = hidden.row_mut(row);
            if row >= rows.own {
                x.fill(0.0);
            }
            if row >= rows.filling {
                continue;
            }
            let within = row % rows.of_tile;
            if within == 0 {
                x.copy_from_slice(class);
            } else {
                x.iter_mut().zip(&before[tile * cols..]).for_each(|(x, added)| *x += added);
            }
            let place = (tile * rows.of_tile + within) * cols;
            let both = positions[within * cols..].iter().zip(&of_rows[place..]);
            x.iter_mut().zip(both).for_each(|(x, (position, of_row))| *x = *x + of_positions * position + of_row);
            tiled.pre_norm.apply(x);
        }
        backend.store(hidden);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_counted_by_rows_then_columns() {
        let shapes = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)];
        assert_eq!(num_shapes(4), shapes.len());
        let numbers: Vec<_> = shapes.iter().map(|shape| shape_number(4, *shape)).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
