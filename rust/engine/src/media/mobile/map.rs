//! Maps: places in rows and columns, each with a value of every channel.

use device::Backend;

use crate::media::conformer::by_rows;

/// `[height, width, channels]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Map {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    pub(super) values: Vec<f32>,
}

/// Which places a convolution sees from one of its own along an axis: as many before as behind, or one less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    /// Places along a side of a square.
    pub(super) side: usize,
    /// Places from one output to the next.
    pub(super) stride: usize,
}

impl Reach {
    /// Zeros before the first of so many places, and places of the output.
    fn axis(self, len: usize) -> (usize, usize) {
        let out = len.div_ceil(self.stride);
        let covered = out.saturating_sub(1) * self.stride + self.side;
        (covered.saturating_sub(len) / 2, out)
    }

    /// The place that element `d` of the square of output `at` lies on, if it lies within.
    fn place(self, at: usize, d: usize, (before, len): (usize, usize)) -> Option<usize> {
        (at * self.stride + d).checked_sub(before).filter(|place| *place < len)
    }
}

impl Map {
    /// Of zeros.
    pub(super) fn new([height, width]: [usize; 2], channels: usize) -> Self {
        Self { height, width, channels, values: vec![0.0; height * width * channels] }
    }

    pub(super) fn len(&self) -> usize {
        self.height * self.width
    }

    /// The rows of some places.
    pub(super) fn rows(&self, places: &std::ops::Range<usize>) -> &[f32] {
        &self.values[places.start * self.channels..places.end * self.channels]
    }

    /// Rows and columns of what a convolution makes of it.
    pub(super) fn size_behind(&self, reach: Reach) -> [usize; 2] {
        [self.height, self.width].map(|len| reach.axis(len).1)
    }

    /// What a convolution sees of these places of its output, square by square, row by row of each; zeros beyond the edges and up
    /// to the columns of `rows`.
    pub(super) fn squares(&self, backend: &dyn Backend, reach: Reach, first: usize, rows: &mut [f32], columns: usize) {
        let (top, _) = reach.axis(self.height);
        let (left, out_width) = reach.axis(self.width);
        by_rows(backend, rows, columns, |row, out| {
            out.fill(0.0);
            let (y, x) = ((first + row) / out_width, (first + row) % out_width);
            for (square, out) in out.chunks_exact_mut(self.channels).take(reach.side * reach.side).enumerate() {
                let seen = reach.place(y, square / reach.side, (top, self.height)).zip(reach.place(
                    x,
                    square % reach.side,
                    (left, self.width),
                ));
                if let Some((y, x)) = seen {
                    out.copy_from_slice(&self.values[(y * self.width + x) * self.channels..][..self.channels]);
                }
            }
        });
    }

    /// A convolution of each channel by itself, `[side, side, channels]`, with zeros beyond the edges.
    pub(super) fn depthwise(&self, backend: &dyn Backend, reach: Reach, kernel: &[f32]) -> Self {
        let (top, height) = reach.axis(self.height);
        let (left, width) = reach.axis(self.width);
        let mut out = Self::new([height, width], self.channels);
        by_rows(backend, &mut out.values, width * self.channels, |y, line| {
            for (x, out) in line.chunks_exact_mut(self.channels).enumerate() {
                for (square, kernel) in kernel.chunks_exact(self.channels).enumerate() {
                    let seen = reach.place(y, square / reach.side, (top, self.height)).zip(reach.place(
                        x,
                        square % reach.side,
                        (left, self.width),
                    ));
                    if let Some((y, x)) = seen {
                        let row = &self.values[(y * self.width + x) * self.channels..][..self.channels];
                        out.iter_mut().zip(row).zip(kernel).for_each(|((out, x), weight)| *out += x * weight);
                    }
                }
            }
        });
        out
    }

    /// The place of a larger map's place in this one.
    pub(super) fn nearest(&self, place: usize, [height, width]: [usize; 2]) -> usize {
        let (y, x) = (place / width, place % width);
        y * self.height / height * self.width + x * self.width / width
    }

    /// Means of equal parts, `side` along each axis.
    pub(super) fn means(&self, side: usize) -> Self {
        let [down, across] = [self.height / side, self.width / side];
        let mut out = Self::new([side; 2], self.channels);
        let factor = 1.0 / (down * across) as f32;
        for (place, out) in out.values.chunks_exact_mut(self.channels).enumerate() {
            let (top, left) = (place / side * down, place % side * across);
            for (y, x) in (0..down).flat_map(|y| (0..across).map(move |x| (top + y, left + x))) {
                let row = &self.values[(y * self.width + x) * self.channels..][..self.channels];
                out.iter_mut().zip(row).for_each(|(out, x)| *out += x);
            }
            for out in out {
                *out *= factor;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use device::cpu::ReferenceBackend;

    use super::*;

    fn map(height: usize, width: usize) -> Map {
        Map { height, width, channels: 1, values: (1..=height * width).map(|value| value as f32).collect() }
    }

    #[test]
    fn squares_have_zeros_beyond_the_edges() {
        let mut rows = vec![9.0; 2 * 16];
        map(2, 3).squares(&ReferenceBackend, Reach { side: 3, stride: 2 }, 0, &mut rows, 16);
        // Of an even number of places there is none before the first; of an odd one there is.
        assert_eq!(rows[..9], [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 0.0, 0.0, 0.0]);
        assert_eq!(rows[16..25], [2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(rows[9..16], [0.0; 7]);
    }

    #[test]
    fn channels_have_kernels_of_their_own() {
        let one = Map { height: 1, width: 2, channels: 2, values: vec![1.0, 10.0, 2.0, 20.0] };
        let kernel = [0.0, 0.0, 1.0, 2.0, 0.0, 0.0].repeat(3);
        let out = one.depthwise(&ReferenceBackend, Reach { side: 3, stride: 1 }, &kernel);
        assert_eq!(out.values, [1.0, 20.0, 2.0, 40.0]);
        let left = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0].repeat(3);
        let out = one.depthwise(&ReferenceBackend, Reach { side: 3, stride: 1 }, &left);
        assert_eq!(out.values, [0.0, 0.0, 1.0, 10.0]);
    }

    #[test]
    fn maps_become_larger_and_smaller() {
        let small = map(2, 2);
        assert_eq!(
            (0..16).map(|place| small.nearest(place, [4, 4])).collect::<Vec<_>>(),
            [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
        );
        assert_eq!(map(2, 4).means(2).values, [1.5, 3.5, 5.5, 7.5]);
        assert_eq!(map(4, 2).means(2).values, [2.0, 3.0, 6.0, 7.0]);
    }
}
