//! Patches of a tile: which rows they are, where they lie, and what is in them.

use std::f64::consts::TAU;

use device::{Constant, RopeStyle, RopeTable};
use images::Tile;

use super::config::{Positions, Windows};

/// The patches of a tile, as rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Rows of patches.
    pub(crate) height: usize,
    /// Columns of patches.
    pub(crate) width: usize,
    /// Row and column of each patch, in the order in which they are computed: those of a window together.
    pub(crate) places: Vec<(usize, usize)>,
    /// Patches of each window.
    pub(crate) windows: Vec<usize>,
    /// Rows and columns that others see. Those of its other patches come behind them, and see what these see.
    pub(crate) seen: [usize; 2],
}

impl Grid {
    /// Of so many rows and columns.
    pub(crate) fn new([height, width]: [usize; 2], windows: Option<&Windows>) -> Self {
        let side = windows.map_or(height.max(width).max(1), |windows| windows.side);
        let (mut places, mut lens) = (Vec::with_capacity(height * width), Vec::new());
        for top in (0..height).step_by(side) {
            for left in (0..width).step_by(side) {
                let (bottom, right) = (height.min(top + side), width.min(left + side));
                places.extend((top..bottom).flat_map(|y| (left..right).map(move |x| (y, x))));
                lens.push((bottom - top) * (right - left));
            }
        }
        Self { height, width, places, windows: lens, seen: [height, width] }
    }

    /// Of so many rows and columns, of which others see so many.
    pub(crate) fn partly_seen([height, width]: [usize; 2], seen: [usize; 2]) -> Self {
        let mut grid = Self::new([height, width], None);
        grid.places.sort_by_key(|(y, x)| *y >= seen[0] || *x >= seen[1]);
        Self { seen, ..grid }
    }

    /// Number of patches that others see.
    pub(crate) fn num_seen(&self) -> usize {
        self.seen[0] * self.seen[1]
    }

    /// Number of patches.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The row of each patch, by its place from left to right and from top to bottom.
    pub(crate) fn row_of_place(&self) -> Vec<usize> {
        let mut rows = vec![0; self.len()];
        for (row, (y, x)) in self.places.iter().enumerate() {
            rows[y * self.width + x] = row;
        }
        rows
    }
}

/// Writes the values of a patch: channel after channel, and in each line after line.
pub(crate) fn read_patch(tile: &Tile, (y, x): (usize, usize), side: usize, out: &mut [f32]) {
    let area = tile.width * tile.height;
    for (line, out) in out.chunks_exact_mut(side).enumerate() {
        let (channel, dy) = (line / side, line % side);
        let start = channel * area + (y * side + dy) * tile.width + x * side;
        out.copy_from_slice(&tile.pixels[start..start + side]);
    }
}

/// Which of the learned vectors a patch of a tile takes, with their weights; none where positions are not learned.
pub(crate) fn learned(positions: &Positions, grid: &Grid, (y, x): (usize, usize)) -> Vec<(usize, f32)> {
    match *positions {
        Positions::Line { .. } => vec![(x, 1.0)],
        Positions::Learned { side } | Positions::Turned { side, .. } => vec![(y * side + x, 1.0)],
        // As the models were trained, what is not seen lies nowhere else.
        Positions::Fractions { .. } if y >= grid.seen[0] || x >= grid.seen[1] => vec![(0, 1.0)],
        Positions::Fractions { side } => vec![(bucket(y, grid.seen[0], side) * side + bucket(x, grid.seen[1], side), 1.0)],
        Positions::Interpolated { side, .. } => {
            let [(top, bottom, dy), (left, right, dx)] = [between(y, grid.height, side), between(x, grid.width, side)];
            let corner = |y: usize, x: usize, weight: f32| (y * side + x, weight);
            vec![
                corner(top, left, (1.0 - dy) * (1.0 - dx)),
                corner(top, right, (1.0 - dy) * dx),
                corner(bottom, left, dy * (1.0 - dx)),
                corner(bottom, right, dy * dx),
            ]
        }
        Positions::Cubic { side, .. } => {
            let (down, across) = (cubic(y, grid.height, side), cubic(x, grid.width, side));
            let corner = |&(y, of_y): &(usize, f32)| across.map(|(x, of_x)| (y * side + x, of_y * of_x));
            down.iter().flat_map(corner).collect()
        }
        Positions::Resized { side } => {
            let (down, across) = (covered(y, grid.height, side), covered(x, grid.width, side));
            let corner = |&(y, of_y): &(usize, f32)| across.iter().map(move |(x, of_x)| (y * side + x, of_y * of_x));
            down.iter().flat_map(corner).collect()
        }
        Positions::Axes { side, .. } => vec![(x, 1.0), (side + y, 1.0)],
        Positions::Rotary { .. } | Positions::Turns { .. } => Vec::new(),
    }
}

/// The four places among `side` about place `i` of `len`, with the weights of PyTorch's cubic interpolation (a = -0.75); beyond
/// the ends the last ones again.
fn cubic(i: usize, len: usize, side: usize) -> [(usize, f32); 4] {
    const A: f32 = -0.75;
    let place = (((i as f32 + 0.5) / len as f32 * 2.0 - 1.0 + 1.0) * side as f32 - 1.0) / 2.0;
    let before = place.floor();
    let t = place - before;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
    std::array::from_fn(|tap| ((before as i64 + tap as i64 - 1).clamp(0, side as i64 - 1) as usize, weights[tap]))
}

/// The places among `side` that place `i` of `len` covers, with their weights: those of linear interpolation, and of a triangle
/// over all of them where there are more than `len`.
fn covered(i: usize, len: usize, side: usize) -> Vec<(usize, f32)> {
    let scale = side as f32 / len as f32;
    let center = (i as f32 + 0.5) * scale - 0.5;
    let weight = |place: usize| (1.0 - (place as f32 - center).abs() / scale.max(1.0)).max(0.0);
    let sum: f32 = (0..side).map(weight).sum();
    (0..side).map(|place| (place, weight(place) / sum)).filter(|(_, weight)| *weight > 0.0).collect()
}

/// The places among `side` before and behind place `i` of `len`, of which the first and the last fall together, and how far it is
/// from the former. As the model was trained: in f32.
fn between(i: usize, len: usize, side: usize) -> (usize, usize, f32) {
    let place = if len > 1 { (side - 1) as f32 / (len - 1) as f32 * i as f32 } else { 0.0 };
    let before = (place as usize).min(side - 1);
    (before, (before + 1).min(side - 1), place - before as f32)
}

/// In which of `side` equal parts place `i` of `len` begins. As the model was trained: places are rounded to f32 on their way,
/// and the beginnings of parts at its end.
fn bucket(i: usize, len: usize, side: usize) -> usize {
    let place = (i as f32 * (1.0 / len as f32)).min(1.0 - 1e-6);
    let part = 1.0 / side as f64;
    (0..side - 1).filter(|before| (part + part * *before as f64) as f32 <= place).count()
}

/// Cosines and sines of patches, a row each, for heads of `head_dim` elements; those without a place do not rotate.
pub(crate) fn rope_table(positions: &Positions, places: &[Option<(usize, usize)>], head_dim: usize) -> Option<RopeTable> {
    let (theta, takes_turns) = match *positions {
        Positions::Turns { rotary_dim, theta, .. } => return Some(turns(places, rotary_dim, theta)),
        Positions::Rotary { theta, takes_turns } => (theta, takes_turns),
        Positions::Interpolated { theta, .. }
        | Positions::Cubic { theta, .. }
        | Positions::Turned { theta, .. }
        | Positions::Axes { theta, .. } => (theta, false),
        Positions::Line { .. } | Positions::Learned { .. } | Positions::Fractions { .. } | Positions::Resized { .. } => {
            return None;
        }
    };
    let is_turned = matches!(positions, Positions::Turned { .. });
    let quarter = head_dim / 4;
    let frequency = |place: usize| {
        let (i, is_second) = (place % quarter, place / quarter);
        let exponent = if takes_turns { 2 * (2 * i + is_second) } else { 4 * i };
        theta.powf(-(exponent as f64) / head_dim as f64) as f32
    };
    let frequencies: Vec<f32> = (0..2 * quarter).map(frequency).collect();
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for place in places {
        let axes = match *place {
            None => [0, 0],
            Some((y, x)) if is_turned => [x + 1, y + 1],
            Some((y, x)) if matches!(positions, Positions::Axes { .. }) => [x, y],
            Some((y, x)) => [y, x],
        };
        for (i, frequency) in frequencies.iter().enumerate() {
            let (s, c) = (f64::from(axes[i / quarter] as f32 * frequency) % TAU).sin_cos();
            cos.push(c as f32);
            sin.push(s as f32);
        }
    }
    let [cos, sin] = [cos, sin].map(Constant::from);
    let style = if is_turned { RopeStyle::Interleaved } else { RopeStyle::Neox };
    Some(RopeTable { style, rotary_dim: 4 * quarter, cos, sin })
}

/// The same of the numbers of places in a row, for the first elements of a head.
fn turns(places: &[Option<(usize, usize)>], rotary_dim: usize, theta: f64) -> RopeTable {
    let frequencies: Vec<_> = (0..rotary_dim / 2).map(|i| theta.powf(-((2 * i) as f64) / rotary_dim as f64) as f32).collect();
    let place = |place: &Option<(usize, usize)>| place.map_or(0, |(_, x)| x) as f32;
    let angles = || places.iter().flat_map(|at| frequencies.iter().map(move |frequency| f64::from(place(at) * frequency) % TAU));
    let [cos, sin] = [f64::cos, f64::sin].map(|of| Constant::from(angles().map(|angle| of(angle) as f32).collect::<Vec<_>>()));
    RopeTable { style: RopeStyle::Neox, rotary_dim, cos, sin }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_hold_what_is_left_at_the_edges() {
        let windows = Windows { side: 4, full_layers: Vec::new() };
        let grid = Grid::new([6, 4], Some(&windows));
        assert_eq!(grid.windows, [16, 8]);
        assert_eq!((grid.places[0], grid.places[4], grid.places[16]), ((0, 0), (1, 0), (4, 0)));
        let grid = Grid::new([6, 10], Some(&windows));
        assert_eq!(grid.windows, [16, 16, 8, 8, 8, 4]);
        let rows = grid.row_of_place();
        assert!((0..60).all(|place| grid.places[rows[place]] == (place / 10, place % 10)));
        assert_eq!(Grid::new([6, 10], None).windows, [60]);
    }

    #[test]
    fn what_is_not_seen_comes_last() {
        let grid = Grid::partly_seen([2, 4], [1, 3]);
        assert_eq!((grid.num_seen(), grid.len()), (3, 8));
        assert_eq!(grid.places, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]);
        let at = |y, x| learned(&Positions::Fractions { side: 6 }, &grid, (y, x))[0].0;
        assert_eq!([at(0, 0), at(0, 1), at(0, 2), at(0, 3), at(1, 1)], [0, 2, 4, 0, 0]);
    }

    #[test]
    fn a_patch_is_read_channel_by_channel() {
        let tile = Tile { width: 6, height: 4, pixels: (0..72).map(|i| i as f32).collect() };
        let mut patch = [0.0; 12];
        read_patch(&tile, (1, 2), 2, &mut patch);
        assert_eq!(patch, [16.0, 17.0, 22.0, 23.0, 40.0, 41.0, 46.0, 47.0, 64.0, 65.0, 70.0, 71.0]);
    }

    #[test]
    fn a_whole_tile_takes_every_vector_and_a_smaller_one_those_as_far_along() {
        let positions = Positions::Fractions { side: 8 };
        let all = |grid: &Grid| -> Vec<_> { grid.places.iter().map(|place| learned(&positions, grid, *place)[0].0).collect() };
        // The last of 8 parts begins a millionth too late for 1 of f32's roundings, as in training.
        assert_eq!(all(&Grid::new([8, 8], None)), (0..64).collect::<Vec<_>>());
        assert_eq!(all(&Grid::new([1, 4], None)), [0, 2, 4, 6]);
        assert_eq!(all(&Grid::new([2, 1], None)), [0, 32]);
    }

    #[test]
    fn a_tile_of_another_size_takes_means_of_what_it_covers() {
        let close = |i: usize, len: usize, side: usize, wanted: &[(usize, f32)]| {
            let found = covered(i, len, side);
            assert_eq!(found.len(), wanted.len(), "{found:?}");
            for (found, wanted) in found.iter().zip(wanted) {
                assert!(found.0 == wanted.0 && (found.1 - wanted.1).abs() < 1e-6, "{found:?} {wanted:?}");
            }
        };
        close(2, 4, 4, &[(2, 1.0)]);
        close(0, 8, 4, &[(0, 1.0)]);
        close(1, 8, 4, &[(0, 0.75), (1, 0.25)]);
        // By PyTorch's `interpolate` with antialiasing.
        close(0, 2, 4, &[(0, 3.0 / 7.0), (1, 3.0 / 7.0), (2, 1.0 / 7.0)]);
    }
}
