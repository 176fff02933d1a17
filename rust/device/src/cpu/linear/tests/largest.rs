//! Logits of which only the largest are wanted, against all of them.

use super::*;

const COLS: usize = 576;

struct Bench {
    pool: ThreadPool,
    tier: CpuTier,
    scratch: LinearScratch,
}

fn on_every_tier(mut test: impl FnMut(&mut Bench)) {
    for tier in tiers() {
        test(&mut Bench { pool: ThreadPool::new(2).unwrap(), tier, scratch: LinearScratch::default() });
    }
}

impl Bench {
    fn lm_head(&self, weight: &WeightView, bias: Option<Vec<f32>>) -> Linear {
        CpuLinear::lm_head(weight, &options(Precision::Fast, bias), self.tier, &self.pool).expect("a linear layer").into()
    }

    fn largest(&mut self, x: &Tensor, head: &Linear) -> Vec<f32> {
        let mut out = Tensor::new(x.rows(), head.out_features).unwrap();
        let context = LinearContext { pool: &self.pool, tier: self.tier };
        largest_logits(context, &mut self.scratch, x, None, head, &mut out);
        out.as_slice().to_vec()
    }

    fn all(&mut self, x: &Tensor, linear: &Linear) -> Vec<f32> {
        project(LinearContext { pool: &self.pool, tier: self.tier }, &mut self.scratch, x, linear)
    }

    /// How many of a row's logits were computed; fails unless they have the bits of `all` and every largest one is among them.
    fn check(&mut self, x: &Tensor, weight: &WeightView) -> usize {
        let head = self.lm_head(weight, None);
        let all = self.all(x, &linear(weight, Precision::Fast, self.tier, &self.pool));
        let found = self.largest(x, &head);
        let max = all.iter().copied().fold(f32::MIN, f32::max);
        let mut computed = 0;
        for (i, (found, all)) in found.iter().zip(&all).enumerate() {
            if *found == f32::MIN {
                assert!(*all < max, "the largest logit, {i}, was left out");
            } else {
                assert_eq!(found.to_bits(), all.to_bits(), "logit {i}");
                computed += 1;
            }
        }
        computed
    }
}

/// Rows of one scale, with the codes that `code(row, column)` gives.
fn weight_of(rows: usize, code: impl Fn(usize, usize) -> i8) -> WeightView {
    let mut bytes = Vec::new();
    for r in 0..rows {
        for b in 0..COLS / BLOCK {
            bytes.extend(f16::from_f32(0.01).to_le_bytes());
            bytes.extend((0..BLOCK).map(|k| code(r, b * BLOCK + k).cast_unsigned()));
        }
    }
    WeightView::new(DType::Ggml(GgmlType::Q8_0), rows, COLS, Bytes::from_vec(bytes)).unwrap()
}

fn row_of(f: impl Fn(usize) -> f32) -> Tensor {
    let mut x = Tensor::new(1, COLS).unwrap();
    x.set_rows(1);
    x.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = f(i));
    x
}

#[test]
fn both_planes_together_are_the_packed_weight() {
    on_every_tier(|bench| {
        let mut random = Random::new(7);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 77, COLS);
        let (head, packed) = (bench.lm_head(&weight, None), linear(&weight, Precision::Fast, bench.tier, &bench.pool));
        let mut rows = [vec![0.0; COLS], vec![0.0; COLS]];
        for r in 0..77 {
            head.cpu().row(r, &mut rows[0]);
            packed.cpu().row(r, &mut rows[1]);
            assert_eq!(rows[0], rows[1], "row {r}, {}", bench.tier.name());
        }
        for m in [1, 2, 3, 4, 5, 9, 33, 64, 65] {
            let x = random.tensor(m, COLS);
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(bench.all(&x, &head)), bits(bench.all(&x, &packed)), "{m} rows, {}", bench.tier.name());
        }
    });
}

#[test]
fn the_largest_logits_of_any_row_are_found_and_few_others_computed() {
    on_every_tier(|bench| {
        let mut random = Random::new(11);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 4099, COLS);
        for _ in 0..20 {
            let mut x = random.tensor(1, COLS);
            bench.check(&x, &weight);
            // Towards a row, as hidden states are.
            let target = (random.bits() % 4099) as usize;
            let mut row = vec![0.0; COLS];
            dequantize_row(weight.dtype, weight.row(target), &mut row);
            x.as_mut_slice().iter_mut().zip(row).for_each(|(x, w)| *x = *x * 0.1 + w);
            bench.scratch = LinearScratch::default();
            let computed = bench.check(&x, &weight);
            assert!(bench.tier < CpuTier::Avx512 || computed < 1000, "{computed} of 4099 on {}", bench.tier.name());
        }
    });
}

/// Upper parts are the same in all rows, and lower parts go with or against the activations as far as they can.
#[test]
fn a_row_that_is_ahead_by_lower_parts_alone_is_found() {
    on_every_tier(|bench| {
        let sign = |k: usize| if k.is_multiple_of(3) { -1.0 } else { 1.0 };
        for best in [0, 31, 32, 700, 1023] {
            let weight = weight_of(1024, |r, k| if (sign(k) > 0.0) == (r == best) { 47 } else { 40 });
            bench.scratch = LinearScratch::default();
            bench.check(&row_of(sign), &weight);
        }
        // Against the estimate: all others have larger upper parts.
        for best in [5, 999] {
            let weight = weight_of(1024, |r, k| if r == best { if sign(k) > 0.0 { 47 } else { 40 } } else { 44 });
            bench.scratch = LinearScratch::default();
            bench.check(&row_of(sign), &weight);
        }
    });
}

#[test]
fn equal_logits_are_all_found() {
    on_every_tier(|bench| {
        let weight = weight_of(2000, |r, k| if r % 500 == 3 { 100 } else { ((r * 7 + k * 3) % 50) as i8 });
        let head = bench.lm_head(&weight, None);
        let found = bench.largest(&row_of(|_| 1.0), &head);
        let max = found.iter().copied().fold(f32::MIN, f32::max);
        let tied: Vec<usize> = (0..2000).filter(|i| found[*i] == max).collect();
        assert_eq!(tied, [3, 503, 1003, 1503], "{}", bench.tier.name());
    });
}

#[test]
fn a_row_that_is_not_finite_or_has_no_outstanding_logit_is_computed_whole() {
    on_every_tier(|bench| {
        let mut random = Random::new(5);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 640, COLS);
        let head = bench.lm_head(&weight, None);
        for bad in [f32::NAN, f32::INFINITY] {
            let found = bench.largest(&row_of(|i| if i == 40 { bad } else { 1.0 }), &head);
            assert!(found.iter().all(|v| !v.is_finite()), "{bad} on {}", bench.tier.name());
        }
        let flat = weight_of(640, |_, k| (k % 100) as i8);
        let (x, head) = (row_of(|i| i as f32), bench.lm_head(&flat, None));
        for _ in 0..3 {
            let found = bench.largest(&x, &head);
            assert!(found.iter().all(|v| *v == found[0]), "{}", bench.tier.name());
        }
        assert_eq!(bench.largest(&x, &head), bench.all(&x, &head));
    });
}

#[test]
fn a_bias_or_a_second_row_is_not_lost() {
    on_every_tier(|bench| {
        let mut random = Random::new(3);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 96, COLS);
        let x = random.tensor(2, COLS);
        let head = bench.lm_head(&weight, None);
        assert_eq!(bench.largest(&x, &head), bench.all(&x, &head));
        let head = bench.lm_head(&weight, Some(random.vec(96)));
        let x = random.tensor(1, COLS);
        assert_eq!(bench.largest(&x, &head), bench.all(&x, &head));
    });
}
