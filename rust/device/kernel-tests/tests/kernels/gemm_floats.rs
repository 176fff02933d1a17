//! Products of weights in bf16 and f16 with up to 32 rows, by tensor cores.

use device::{
    DType,
    kernel_args::{GemmArgs, GemmTarget, MAX_TARGETS},
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close,
    random::Rng,
    weight::{Weight, kernel_suffix},
};

const FORMATS: [DType; 2] = [DType::BF16, DType::F16];
/// Of a stage.
const STAGE: [usize; 2] = [64, 256];
const SCALE: f32 = 0.75;

/// A value as it is multiplied.
fn rounded(format: DType, x: f32) -> f32 {
    match format {
        DType::F16 => f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
        _ => bf16::from_f32(x).to_f32(),
    }
}

fn bits(format: DType, x: f32) -> u16 {
    match format {
        DType::F16 => f16::from_f32(rounded(format, x)).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    }
}

/// What the product is made of besides the weight.
struct Product {
    x: Vec<f32>,
    x_stride: usize,
    bias: Option<Vec<f32>>,
    before: Vec<f32>,
    out_stride: usize,
    accumulate: bool,
    part_stages: usize,
    /// Features from which on they are another target's.
    cuts: Vec<usize>,
}

impl Product {
    fn random(weight: &Weight, rows: usize, part_stages: usize, rng: &mut Rng) -> Self {
        let (x_stride, out_stride) = (weight.cols + 8, weight.rows + 3);
        Self {
            x: rng.floats(rows * x_stride),
            x_stride,
            bias: (rng.below(2) == 0).then(|| rng.floats(weight.rows)),
            before: rng.floats(rows * out_stride),
            out_stride,
            accumulate: rng.below(2) == 0,
            part_stages,
            cuts: Vec::new(),
        }
    }

    /// `rows` rows from `first` on, by the kernel for `capacity`.
    fn run(&self, weight: &Weight, (first, rows): (usize, usize), capacity: usize, order: Order) -> Vec<f32> {
        let x = &self.x[first * self.x_stride..][..rows * self.x_stride];
        let halves: Vec<u16> = x.iter().map(|x| bits(weight.format, *x)).collect();
        let x = if capacity == 8 { Buffer::input(x) } else { Buffer::input(&halves) };
        let w = Buffer::input(&weight.bytes);
        let bias = Buffer::input(self.bias.as_deref().unwrap_or(&[]));
        let out = Buffer::inout(&self.before[first * self.out_stride..][..rows * self.out_stride]);
        let (mut targets, mut pieces) = ([GemmTarget::default(); MAX_TARGETS], 0);
        let firsts = [&[0], self.cuts.as_slice(), &[weight.rows]].concat();
        for (target, range) in targets.iter_mut().zip(firsts.windows(2)) {
            let (first, out_features) = (range[0], range[1] - range[0]);
            *target = GemmTarget {
                w: w.ptr() + first as u64 * weight.row_bytes(),
                bias: if self.bias.is_some() { bias.ptr() + first as u64 * 4 } else { 0 },
                out: out.ptr() + first as u64 * 4,
                out_features: out_features as u32,
                out_stride: self.out_stride as u32,
                first_piece: pieces as u32,
                part_stages: self.part_stages as u32,
            };
            let stages = out_features.div_ceil(STAGE[0]) * weight.cols.div_ceil(STAGE[1]);
            pieces += stages.div_ceil(self.part_stages);
        }
        let parts = Buffer::output::<f32>(pieces * 2 * STAGE[0] * capacity);
        let arrivals = Buffer::inout(&vec![0u32; pieces]);
        let args = GemmArgs {
            x: x.ptr(),
            targets,
            parts: parts.ptr(),
            arrivals: arrivals.ptr(),
            w_stride: weight.row_bytes(),
            num_rows: rows as u32,
            in_features: weight.cols as u32,
            x_stride: self.x_stride as u32,
            accumulate: self.accumulate.into(),
            scale: SCALE,
            reserved: 0,
        };
        let kernel = Kernel::named(&format!("gemm_{}_r{capacity}", kernel_suffix(weight.format)));
        kernel.launch_behind(&[&x, &out, &parts, &arrivals], [pieces, 1, 1], &args, order);
        assert_eq!(arrivals.values::<u32>(), vec![0; pieces], "arrivals are forgotten");
        out.values()
    }

    /// The products of weights and rounded activations.
    fn expected(&self, weight: &Weight, rows: usize) -> Vec<f32> {
        let mut out = self.before[..rows * self.out_stride].to_vec();
        for (out, x) in out.chunks_exact_mut(self.out_stride).zip(self.x.chunks_exact(self.x_stride)) {
            for (n, w) in weight.values.chunks_exact(weight.cols).enumerate() {
                let product = |(w, x): (&f32, &f32)| f64::from(*w) * f64::from(rounded(weight.format, *x));
                let dot: f64 = w.iter().zip(x).map(product).sum();
                let sum = (dot + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))) * f64::from(SCALE);
                out[n] = (sum + if self.accumulate { f64::from(out[n]) } else { 0.0 }) as f32;
            }
        }
        out
    }
}

#[test]
fn products_agree_with_the_oracle() {
    let mut rng = Rng::new(1);
    for format in FORMATS {
        // Less than a stage, a panel whose columns several pieces have, pieces that begin within a panel, pieces of several
        // panels.
        for (features, cols, part_stages) in
            [(5, 8, 4), (70, 576, 4), (70, 1320, 1), (129, 1032, 2), (200, 256, 3), (64, 2304, 20)]
        {
            let weight = Weight::random(format, features, cols, &mut rng);
            let largest = weight.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (rows, capacity) in [(1, 8), (3, 8), (8, 8), (11, 16), (16, 16), (19, 32), (32, 32)] {
                let product = Product::random(&weight, rows, part_stages, &mut rng);
                let order = if rows % 2 == 0 { Order::Ascending } else { Order::Descending };
                let tolerance = [2e-7 * largest * (cols as f32).sqrt() * 8.0 + 1e-6, 1e-5];
                let what = format!("{format} {features} x {cols}, {rows} rows, {part_stages} stages a piece");
                let actual = product.run(&weight, (0, rows), capacity, order);
                assert_close(&actual, &product.expected(&weight, rows), tolerance, &what);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_others_at_any_place_and_of_any_kernel() {
    let mut rng = Rng::new(2);
    for format in FORMATS {
        for part_stages in [20, 2, 1] {
            let weight = Weight::random(format, 133, 776, &mut rng);
            let product = Product::random(&weight, 32, part_stages, &mut rng);
            let together = product.run(&weight, (0, 32), 32, Order::Ascending);
            let places = [
                (0, 1, 8),
                (3, 1, 8),
                (3, 5, 8),
                (24, 8, 8),
                (6, 1, 16),
                (0, 9, 16),
                (7, 16, 16),
                (31, 1, 16),
                (5, 20, 32),
                (30, 1, 32),
            ];
            for (first, rows, capacity) in places {
                let fewer = product.run(&weight, (first, rows), capacity, Order::Descending);
                let expected = &together[first * product.out_stride..][..rows * product.out_stride];
                assert_eq!(fewer, expected, "{format}: {rows} rows from {first} on, room for {capacity}");
            }
        }
    }
}

#[test]
fn targets_of_one_launch_have_the_bits_that_they_have_alone() {
    let mut rng = Rng::new(3);
    for format in FORMATS {
        let weight = Weight::random(format, 256, 520, &mut rng);
        for (cuts, part_stages) in [(vec![128, 192], 2), (vec![64], 1), (vec![128, 192], 5)] {
            let mut product = Product::random(&weight, 9, part_stages, &mut rng);
            // Cuts at whole panels, whose pieces begin with one: the same pieces of the same panels, but those of the last
            // target.
            product.cuts = cuts;
            let together = product.run(&weight, (0, 9), 16, Order::Ascending);
            let firsts = [&[0], product.cuts.as_slice(), &[weight.rows]].concat();
            for range in firsts.windows(2) {
                let alone = Weight {
                    rows: range[1] - range[0],
                    bytes: weight.bytes[range[0] * 2 * weight.cols..range[1] * 2 * weight.cols].to_vec(),
                    values: weight.values[range[0] * weight.cols..range[1] * weight.cols].to_vec(),
                    ..weight
                };
                let of_range = |rows: &[f32]| -> Vec<f32> {
                    rows.chunks_exact(product.out_stride).flat_map(|row| row[range[0]..range[1]].to_vec()).collect()
                };
                let product = Product {
                    x: product.x.clone(),
                    bias: product.bias.as_ref().map(|bias| bias[range[0]..range[1]].to_vec()),
                    before: of_range(&product.before),
                    out_stride: alone.rows,
                    cuts: Vec::new(),
                    ..product
                };
                let expected = of_range(&together);
                assert_eq!(product.run(&alone, (0, 9), 16, Order::Descending), expected, "{format}, features {range:?}");
            }
        }
    }
}

#[test]
fn values_beyond_f16_become_its_largest() {
    let weight = Weight { format: DType::F16, rows: 1, cols: 8, bytes: f16::ONE.to_le_bytes().repeat(8), values: vec![1.0; 8] };
    let mut product = Product::random(&weight, 2, 4, &mut Rng::new(4));
    (product.bias, product.accumulate) = (None, false);
    product.x.fill(0.0);
    (product.x[0], product.x[product.x_stride + 3]) = (1e6, f32::NEG_INFINITY);
    let out = product.run(&weight, (0, 2), 8, Order::Ascending);
    assert_eq!([out[0], out[product.out_stride]], [65504.0 * SCALE, -65504.0 * SCALE]);
}

#[test]
fn what_a_weight_does_not_have_is_not_read_and_counts_nothing() {
    // x ends with its last column, the weight with its last feature: buffers are guarded on both sides.
    let mut rng = Rng::new(5);
    for format in FORMATS {
        let weight = Weight::random(format, 65, 264, &mut rng);
        let mut product = Product::random(&weight, 4, 4, &mut rng);
        product.x = product.x[..4 * weight.cols].to_vec();
        product.x_stride = weight.cols;
        let tolerance = [1e-4, 1e-5];
        for (capacity, order) in [(8, Order::Ascending), (16, Order::Descending)] {
            let actual = product.run(&weight, (0, 4), capacity, order);
            assert_close(&actual, &product.expected(&weight, 4), tolerance, &format!("{format}, room for {capacity}"));
        }
    }
}
