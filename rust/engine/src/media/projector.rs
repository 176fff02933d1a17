//! From the hidden states of patches to vectors of the decoder's width.

use device::{Backend, Constant, GateUpArgs, Linear, Norm, Projection, StepMetadata, Tensor};

use super::{
    config::{ProjectorConfig, ProjectorGate, ProjectorLayout, ProjectorNorm, Regroup},
    grid::Grid,
    stored,
    tower::MAX_ROWS,
    weights::TowerWeights,
};
use crate::EngineError;

/// A projector that was loaded.
pub(crate) struct Projector {
    config: ProjectorConfig,
    norm: Option<Norm>,
    late_norm: Option<Norm>,
    layers: Vec<Layer>,
}

/// A matrix with what its output is multiplied by, and its norm.
struct Layer {
    linear: Linear,
    gate: Option<Linear>,
    norm: Option<Norm>,
}

impl Projector {
    /// Of states of `width` values.
    pub(crate) fn new<P: AsRef<str>>(
        weights: &mut TowerWeights<'_>,
        places: &[P],
        config: &ProjectorConfig,
        width: usize,
    ) -> Result<Self, EngineError> {
        let first = &config.layers[0];
        let is_whole = first.layout == ProjectorLayout::Transposed;
        let place = weights.place(places, &(if is_whole { first.name.into() } else { format!("{}.weight", first.name) }))?;
        let mut cols = config.regroup.columns(width);
        let early = load_norm(weights, &place, config.norm.as_ref(), width)?;
        let late = load_norm(weights, &place, config.late_norm.as_ref(), cols)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for layer in &config.layers {
            let (name, shape) = (format!("{place}{}", layer.name), [layer.out_features, cols]);
            let [rows, _] = shape;
            let (linear, gate) = match (layer.layout, layer.gate) {
                (ProjectorLayout::Transposed, _) => (weights.transposed(&name, shape)?, None),
                (ProjectorLayout::Convolution(side), _) => (weights.convolution(&name, shape, side)?, None),
                (ProjectorLayout::Plain, ProjectorGate::None) => (weights.linear(&name, shape)?, None),
                (ProjectorLayout::Plain, ProjectorGate::Named(gate)) => {
                    (weights.linear(&name, shape)?, Some(weights.linear(&format!("{place}{gate}"), shape)?))
                }
                (ProjectorLayout::Plain, ProjectorGate::SecondHalf) => {
                    let mut half = |first| weights.rows_of_linear(&name, 2 * rows, first, shape);
                    (half(0)?, Some(half(rows)?))
                }
            };
            let norm = load_norm(weights, &place, layer.norm.as_ref(), rows)?;
            layers.push(Layer { linear, gate, norm });
            cols = layer.out_features;
        }
        Ok(Self { config: config.clone(), norm: early, late_norm: late, layers })
    }

    /// Vectors of the rows of a tile's grid, from left to right and from top to bottom, `[rows, out_features]`, of the hidden
    /// states of its patches, `[patches, hidden_size]`.
    pub(crate) fn run(&self, backend: &dyn Backend, hidden: &mut [f32], grid: &Grid) -> Result<Vec<f32>, EngineError> {
        let cols = hidden.len() / grid.len();
        if let Some(norm) = &self.norm {
            hidden.chunks_exact_mut(cols).for_each(|row| norm.apply(row));
        }
        let mut rows = regroup(self.config.regroup, hidden, grid);
        let cols = self.config.regroup.columns(cols);
        if let Some(norm) = &self.late_norm {
            rows.chunks_exact_mut(cols).for_each(|row| norm.apply(row));
        }
        self.project(backend, rows, cols)
    }

    /// Columns of a vector.
    pub(crate) fn out_features(&self) -> usize {
        self.config.out_features()
    }

    /// Vectors of rows of such a width, `[rows, out_features]`, of as many at once as buffers are made for.
    pub(crate) fn project(&self, backend: &dyn Backend, rows: Vec<f32>, cols: usize) -> Result<Vec<f32>, EngineError> {
        if rows.len() <= MAX_ROWS * cols {
            return self.project_some(backend, rows, cols);
        }
        let mut vectors = Vec::with_capacity(rows.len() / cols * self.out_features());
        for rows in rows.chunks(MAX_ROWS * cols) {
            vectors.extend(self.project_some(backend, rows.to_vec(), cols)?);
        }
        Ok(vectors)
    }

    fn project_some(&self, backend: &dyn Backend, mut rows: Vec<f32>, mut cols: usize) -> Result<Vec<f32>, EngineError> {
        for (Layer { linear, gate, norm }, config) in self.layers.iter().zip(&self.config.layers) {
            let num_rows = rows.len() / cols;
            let (x, mut out) = (stored(backend, &rows, cols)?, backend.alloc(num_rows, linear.out_features)?);
            let in_phase = config.activation.filter(|_| norm.is_none());
            product(backend, &x, (linear, gate.as_ref()), in_phase, &mut out);
            backend.fetch(&mut out);
            rows = out.as_slice().to_vec();
            cols = linear.out_features;
            if let Some(norm) = norm {
                rows.chunks_exact_mut(cols).for_each(|row| norm.apply(row));
                if let Some(activation) = config.activation {
                    for value in &mut rows {
                        *value = activation.apply(*value);
                    }
                }
            }
        }
        Ok(rows)
    }
}

/// A norm of so many values; one without a name has no weights.
fn load_norm(
    weights: &mut TowerWeights<'_>,
    place: &str,
    norm: Option<&ProjectorNorm>,
    len: usize,
) -> Result<Option<Norm>, EngineError> {
    let load = |norm: &ProjectorNorm| match norm.name {
        "" => Ok(Norm { kind: norm.kind, weight: Constant::from(vec![1.0; len]), bias: None, eps: norm.eps }),
        name => weights.norm(&format!("{place}{name}"), len, (norm.kind, norm.eps, norm.offset)),
    };
    norm.map(load).transpose()
}

fn product(
    backend: &dyn Backend,
    x: &Tensor,
    (linear, gate): (&Linear, Option<&Linear>),
    activation: Option<device::Activation>,
    out: &mut Tensor,
) {
    let step = StepMetadata::default();
    match activation {
        Some(activation) => backend.gate_up(GateUpArgs { x, norm: None, gate, up: linear, activation, out, next: None }, &step),
        None => backend.norm_linear(x, None, &mut [Projection { linear, out }], &step),
    }
}

/// Puts patches together, `[patches, cols]` in the order of the grid's rows.
fn regroup(regroup: Regroup, hidden: &[f32], grid: &Grid) -> Vec<f32> {
    let cols = hidden.len() / grid.len();
    let row_of_place = grid.row_of_place();
    let [down, across] = regroup.sides(grid.height);
    let patch = |y: usize, x: usize| &hidden[row_of_place[y * grid.width + x] * cols..][..cols];
    let mut out = Vec::with_capacity(hidden.len());
    for (top, left) in (0..grid.height / down).flat_map(|y| (0..grid.width / across).map(move |x| (y * down, x * across))) {
        let square = || (0..down).flat_map(move |dy| (0..across).map(move |dx| patch(top + dy, left + dx)));
        match regroup {
            Regroup::Each | Regroup::Runs(_) | Regroup::Squares(_) => square().for_each(|patch| out.extend_from_slice(patch)),
            Regroup::Interleaved(_) => out.extend((0..cols).flat_map(|col| square().map(move |patch| patch[col]))),
            Regroup::Means(_) | Regroup::MeansOf(_) | Regroup::MeansOfRuns(_) => out.extend((0..cols).map(|col| {
                let sum: f32 = square().map(|patch| patch[col]).sum();
                sum / (down * across) as f32
            })),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_patches_become_rows() {
        // The value of a patch: its row and its column; twice that in its second value.
        let grid = Grid::new([2, 4], None);
        let hidden: Vec<f32> = grid.places.iter().flat_map(|(y, x)| [(10 * y + x) as f32, (100 * y + x) as f32]).collect();
        assert_eq!(regroup(Regroup::Each, &hidden, &grid), hidden);
        assert_eq!(regroup(Regroup::Squares(2), &hidden, &grid)[..8], [0.0, 0.0, 1.0, 1.0, 10.0, 100.0, 11.0, 101.0]);
        assert_eq!(regroup(Regroup::Runs(4), &hidden, &grid), hidden);
        assert_eq!(regroup(Regroup::MeansOfRuns(2), &hidden, &grid)[..4], [0.5, 0.5, 2.5, 2.5]);
        assert_eq!(regroup(Regroup::Interleaved(2), &hidden, &grid)[8..], [2.0, 3.0, 12.0, 13.0, 2.0, 3.0, 102.0, 103.0]);
        assert_eq!(regroup(Regroup::Means(1), &hidden, &grid), [5.5, 50.5, 7.5, 52.5]);
    }
}
