//! The tokens of the largest logits, against all logits.

use super::*;
use crate::{TokenMask, TokenSet, cpu::linear::largest::search_bytes};

const COLS: usize = 576;

struct Bench {
    pool: ThreadPool,
    isa: Isa,
    scratch: LinearScratch,
}

/// On one thread neighbouring rows of a panel are computed together.
fn on_every_isa(mut test: impl FnMut(&mut Bench)) {
    for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        test(&mut Bench { pool: ThreadPool::new(threads).unwrap(), isa, scratch: LinearScratch::default() });
    }
}

impl Bench {
    fn lm_head(&self, weight: &WeightView, bias: Option<Vec<f32>>) -> Linear {
        CpuLinear::lm_head(weight, &options(Precision::Fast, bias), self.isa, &self.pool).expect("a linear layer").into()
    }

    /// `None` where there was no search.
    fn search(&mut self, x: &Tensor, head: &Linear) -> Option<Vec<u32>> {
        self.search_normed(x, None, head)
    }

    fn search_normed(&mut self, x: &Tensor, norm: Option<&Norm>, head: &Linear) -> Option<Vec<u32>> {
        let context = LinearContext { pool: &self.pool, isa: self.isa, adapters: &[] };
        let mut tokens = vec![7; 9];
        greedy_tokens(context, &mut self.scratch, x, norm, head, &[], &mut tokens).then_some(tokens)
    }

    /// Whether the rows were searched; fails unless that found the first of the largest logits that each row's set has.
    fn check_allowed(&mut self, x: &Tensor, head: &Linear, sets: &[Option<TokenSet>]) -> bool {
        let all = self.all(x, head);
        let masks: Vec<_> = sets.iter().map(|set| set.as_ref().map(TokenSet::mask)).collect();
        let context = LinearContext { pool: &self.pool, isa: self.isa, adapters: &[] };
        let mut tokens = vec![7; 9];
        let found = greedy_tokens(context, &mut self.scratch, x, None, head, &masks, &mut tokens);
        if found {
            assert_eq!(tokens, largest_allowed(&all, &masks), "{}", self.isa.name());
        }
        found
    }

    fn all(&mut self, x: &Tensor, linear: &Linear) -> Vec<f32> {
        project(LinearContext { pool: &self.pool, isa: self.isa, adapters: &[] }, &mut self.scratch, x, linear)
    }

    /// Whether the rows were searched; fails unless that found the first of the largest of `all` of each.
    fn check(&mut self, x: &Tensor, weight: &WeightView) -> bool {
        self.check_biased(x, weight, None)
    }

    fn check_biased(&mut self, x: &Tensor, weight: &WeightView, bias: Option<Vec<f32>>) -> bool {
        let head = self.lm_head(weight, bias.clone());
        let linear = CpuLinear::new(weight, &options(Precision::Fast, bias), self.isa, &self.pool).expect("a linear layer");
        let all = self.all(x, &linear.into());
        let largest = all.chunks_exact(weight.rows).map(|row| {
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            row.iter().position(|v| *v == max).expect("a maximum") as u32
        });
        let found = self.search(x, &head);
        if let Some(found) = &found {
            assert_eq!(*found, largest.collect::<Vec<_>>(), "{}", self.isa.name());
        }
        found.is_some()
    }

    /// How many rows at once this ISA searches.
    fn rows_at_once(&self) -> usize {
        if self.isa < Isa::Avx2 { 0 } else { lm_head::max_searched_rows(self.isa) }
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
fn upper_and_lower_plane_together_are_the_packed_weight() {
    on_every_isa(|bench| {
        let mut random = Random::new(7);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 77, COLS);
        let (head, packed) = (bench.lm_head(&weight, None), linear(&weight, Precision::Fast, bench.isa, &bench.pool));
        let mut rows = [vec![0.0; COLS], vec![0.0; COLS]];
        for r in 0..77 {
            head.weight::<CpuLinear>().row(r, &mut rows[0]);
            packed.weight::<CpuLinear>().row(r, &mut rows[1]);
            assert_eq!(rows[0], rows[1], "row {r}, {}", bench.isa.name());
        }
        for m in [1, 2, 3, 4, 5, 9, 33, 64, 65] {
            let x = random.tensor(m, COLS);
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(bench.all(&x, &head)), bits(bench.all(&x, &packed)), "{m} rows, {}", bench.isa.name());
        }
    });
}

/// Of each row the first of the largest logits that its mask allows.
fn largest_allowed(logits: &[f32], masks: &[Option<TokenMask<'_>>]) -> Vec<u32> {
    let largest = |(row, mask): (&[f32], &Option<TokenMask<'_>>)| {
        let allowed = (0..).zip(row).filter(|(token, _)| mask.is_none_or(|mask| mask.allows(*token)));
        allowed.reduce(|best, next| if next.1 > best.1 { next } else { best }).expect("an allowed token").0
    };
    logits.chunks_exact(logits.len() / masks.len()).zip(masks).map(largest).collect()
}

/// `rows` of them, each towards a row of the weight, as hidden states are.
fn hidden_states(rows: usize, weight: &WeightView, random: &mut Random) -> Tensor {
    let mut x = random.tensor(rows, COLS);
    let mut row = vec![0.0; COLS];
    for x in x.as_mut_slice().chunks_exact_mut(COLS) {
        let target = random.bits() as usize % weight.rows;
        dequantize_row(weight.dtype, weight.row(target), &mut row);
        x.iter_mut().zip(&row).for_each(|(x, w)| *x = *x * 0.1 + w);
    }
    x
}

#[test]
fn the_largest_logits_of_rows_are_found_and_few_panels_computed() {
    on_every_isa(|bench| {
        let mut random = Random::new(11);
        // The last panel has 3 columns.
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 4099, COLS);
        for rows in [1, 1, 1, 2, 3, 5, 8, 33, 65, 300] {
            bench.scratch = LinearScratch::default();
            let x = hidden_states(rows, &weight, &mut random);
            let searched = bench.check(&x, &weight);
            assert_eq!(searched, rows <= bench.rows_at_once(), "{rows} rows on {}", bench.isa.name());
            let computed = bench.scratch.search.candidates.len();
            assert!(computed < rows * 129 / 20, "{computed} of {rows} times 129 panels on {}", bench.isa.name());
        }
    });
}

#[test]
fn any_row_has_the_largest_logit_of_a_search_if_there_is_one() {
    on_every_isa(|bench| {
        let mut random = Random::new(12);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 2050, COLS);
        let mut num_searched = 0;
        for rows in [1, 1, 1, 2, 7] {
            let mut x = random.tensor(rows, COLS);
            num_searched += usize::from(bench.check(&x, &weight));
            // A few activations that are much larger than the others.
            x.as_mut_slice().iter_mut().step_by(131).for_each(|x| *x *= 50.0);
            bench.scratch = LinearScratch::default();
            num_searched += usize::from(bench.check(&x, &weight));
        }
        assert_eq!(num_searched > 0, bench.rows_at_once() > 0, "{}", bench.isa.name());
    });
}

/// Lower parts go with the activations as far as they can in one row, and nearly so in another.
#[test]
fn a_row_that_is_ahead_by_lower_parts_alone_is_found() {
    on_every_isa(|bench| {
        let sign = |k: usize| if k.is_multiple_of(3) { -1.0 } else { 1.0 };
        // All alike, one activation alone, and a few much larger ones.
        let rows: [&dyn Fn(usize) -> f32; 3] =
            [&|k| sign(k), &|k| if k == 40 { 3.0 } else { 0.0 }, &|k| sign(k) * if k % 100 == 7 { 40.0 } else { 1.0 }];
        for (i, row) in rows.iter().enumerate() {
            let x = row_of(row);
            // Of two rows with the same estimate, either.
            for best in [5, 999] {
                let towards = |k: usize, [up, down]: [i8; 2]| if row(k) > 0.0 { up } else { down };
                let weight = weight_of(1024, |r, k| match r {
                    _ if r == best => towards(k, [47, 40]),
                    _ if r % 512 == best % 512 => towards(k, [46, 41]),
                    _ => -100,
                });
                bench.scratch = LinearScratch::default();
                let searched = bench.check(&x, &weight);
                assert!(searched || bench.rows_at_once() == 0, "row {i} on {}", bench.isa.name());
            }
        }
    });
}

#[test]
fn the_first_of_equal_logits_is_found() {
    on_every_isa(|bench| {
        let weight = weight_of(2000, |r, k| if r % 500 == 3 { 100 } else { ((r * 7 + k * 3) % 50) as i8 });
        assert_eq!(bench.check(&row_of(|_| 1.0), &weight), bench.rows_at_once() > 0);
        let head = bench.lm_head(&weight, None);
        let found = bench.search(&row_of(|_| 1.0), &head);
        assert_eq!(found, (bench.rows_at_once() > 0).then(|| vec![3]), "{}", bench.isa.name());
        // The first has the lower estimate: its lower parts are above their middle, half of the other's below.
        let weight = weight_of(1000, |r, k| match r {
            3 => 47,
            503 => [46, 48][k % 2],
            _ => -100,
        });
        for rows in [1, 2, 5] {
            let mut x = Tensor::new(rows, COLS).unwrap();
            x.set_rows(rows);
            x.as_mut_slice().fill(1.0);
            bench.scratch = LinearScratch::default();
            let found = bench.search(&x, &bench.lm_head(&weight, None));
            assert_eq!(found, (rows <= bench.rows_at_once()).then(|| vec![3; rows]), "{}", bench.isa.name());
        }
    });
}

#[test]
fn rows_that_are_not_finite_or_have_no_outstanding_logit_are_not_searched() {
    on_every_isa(|bench| {
        let mut random = Random::new(5);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 640, COLS);
        let head = bench.lm_head(&weight, None);
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let x = row_of(|i| if i == 40 { bad } else { 1.0 });
            assert_eq!(bench.search(&x, &head), None, "{bad} on {}", bench.isa.name());
        }
        for tiny in [0.0, 1e-25] {
            assert_eq!(bench.search(&row_of(|_| tiny), &head), None, "{tiny} on {}", bench.isa.name());
        }
        let flat = bench.lm_head(&weight_of(640, |_, k| (k % 100) as i8), None);
        assert_eq!(bench.search(&row_of(|i| i as f32), &flat), None, "{}", bench.isa.name());
    });
}

#[test]
fn after_searches_in_vain_more_and_more_rows_are_not_searched() {
    on_every_isa(|bench| {
        let mut random = Random::new(6);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 640, COLS);
        let (head, x) = (bench.lm_head(&weight, None), hidden_states(1, &weight, &mut random));
        let flat = bench.lm_head(&weight_of(640, |_, k| (k % 100) as i8), None);
        let in_vain = row_of(|i| i as f32);
        for pause in [4, 8, 16, 32, 64, 64] {
            assert_eq!(bench.search(&in_vain, &flat), None);
            let paused = (0..pause).filter(|_| bench.search(&x, &head).is_none()).count();
            assert_eq!(paused, pause, "{}", bench.isa.name());
        }
        // One that is not in vain ends it.
        for _ in 0..2 {
            let searched = (0..6).filter(|_| bench.search(&x, &head).is_some()).count();
            assert_eq!(searched, if bench.rows_at_once() > 0 { 6 } else { 0 }, "{}", bench.isa.name());
            assert_eq!(bench.search(&in_vain, &flat), None);
            assert!((0..4).all(|_| bench.search(&x, &head).is_none()));
        }
    });
}

#[test]
fn the_largest_allowed_logits_are_found() {
    /// Whether a set has a token, given a random number and whether it is the row's likeliest.
    type Has = fn(token: u32, random: u64, is_likeliest: bool) -> bool;
    let all_but_the_likeliest: Has = |_, _, is_likeliest| !is_likeliest;
    let others: [Has; 4] = [
        |_, random, _| random.is_multiple_of(2),
        |_, random, _| random.is_multiple_of(300),
        // A panel alone, and the last, which has 3 columns.
        |token, _, _| (64..96).contains(&token),
        |token, _, _| token >= 2048,
    ];
    on_every_isa(|bench| {
        let mut random = Random::new(21);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 2051, COLS);
        let head = bench.lm_head(&weight, None);
        for has in [all_but_the_likeliest].into_iter().chain(others) {
            for rows in [1, 2, 5, 33] {
                bench.scratch = LinearScratch::default();
                let x = hidden_states(rows, &weight, &mut random);
                let likeliest = largest_allowed(&bench.all(&x, &head), &vec![None; rows]);
                let mut set = |likeliest: &u32| {
                    let tokens = (0..2051).filter(|token| has(*token, random.bits(), token == likeliest));
                    Some(TokenSet::new(tokens.chain([2050 - likeliest]).filter(|token| token != likeliest), 2051))
                };
                let mut sets: Vec<_> = likeliest.iter().map(&mut set).collect();
                // Rows without a mask beside them.
                sets.iter_mut().skip(1).step_by(3).for_each(|set| *set = None);
                let searched = bench.check_allowed(&x, &head, &sets);
                assert!(!searched || rows <= bench.rows_at_once());
                // A mask that allows few tokens leaves few panels, so that is never in vain.
                let few = sets.iter().flatten().all(|set| (0..65).filter(|panel| set.mask().word(*panel) != 0).count() < 6);
                assert!(searched || !few || rows > bench.rows_at_once(), "{rows} rows on {}", bench.isa.name());
            }
        }
    });
}

#[test]
fn a_single_allowed_token_is_found_wherever_it_is() {
    on_every_isa(|bench| {
        let mut random = Random::new(22);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 200, COLS);
        let (head, x) = (bench.lm_head(&weight, None), hidden_states(1, &weight, &mut random));
        for token in 0..200 {
            let searched = bench.check_allowed(&x, &head, &[Some(TokenSet::new([token], 200))]);
            assert_eq!(searched, bench.rows_at_once() > 0, "token {token} on {}", bench.isa.name());
        }
    });
}

#[test]
fn a_mask_that_allows_everything_changes_nothing() {
    on_every_isa(|bench| {
        let mut random = Random::new(23);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 2050, COLS);
        let head = bench.lm_head(&weight, None);
        for rows in [1, 3] {
            let x = hidden_states(rows, &weight, &mut random);
            let expected = bench.search(&x, &head);
            let candidates = bench.scratch.search.candidates.len();
            let searched = bench.check_allowed(&x, &head, &vec![Some(TokenSet::new(0..2050, 2050)); rows]);
            assert_eq!((searched, bench.scratch.search.candidates.len()), (expected.is_some(), candidates));
        }
    });
}

#[test]
fn a_row_that_may_have_no_token_is_not_searched() {
    on_every_isa(|bench| {
        let mut random = Random::new(24);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 100, COLS);
        let (head, x) = (bench.lm_head(&weight, None), hidden_states(1, &weight, &mut random));
        assert!(!bench.check_allowed(&x, &head, &[Some(TokenSet::new([], 100))]));
        // Bits behind the last token allow none.
        let words = [0, 0, 0, 0xffff_fff0];
        let (context, mut tokens) = (LinearContext { pool: &bench.pool, isa: bench.isa, adapters: &[] }, Vec::new());
        let mask = TokenMask::new(&words, 100).expect("a mask");
        assert!(!greedy_tokens(context, &mut bench.scratch, &x, None, &head, &[Some(mask)], &mut tokens));
    });
}

#[test]
fn a_search_takes_no_more_memory_than_is_foretold() {
    on_every_isa(|bench| {
        let mut random = Random::new(8);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 4099, COLS);
        for rows in [4, 65] {
            bench.scratch = LinearScratch::default();
            bench.check(&hidden_states(rows, &weight, &mut random), &weight);
            let (taken, foretold) = (bench.scratch.search.bytes(), search_bytes([rows, 4099], COLS));
            assert!(taken <= foretold, "{taken} of {foretold} bytes, {rows} rows on {}", bench.isa.name());
        }
    });
}

#[test]
fn the_largest_sums_of_logits_and_a_bias_are_found() {
    on_every_isa(|bench| {
        let mut random = Random::new(3);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 4099, COLS);
        for rows in [1, 1, 3, 5] {
            let x = hidden_states(rows, &weight, &mut random);
            // What a search would find without it is no longer the largest, in the last panel as well.
            let mut bias = random.vec(4099);
            let largest = bench.all(&x, &linear(&weight, Precision::Fast, bench.isa, &bench.pool));
            let largest = largest[..4099].iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("logits");
            bias[largest.0] = -1e4;
            bias[4098] = if rows == 3 { 1e4 } else { 0.0 };
            bench.scratch = LinearScratch::default();
            let searched = bench.check_biased(&x, &weight, Some(bias));
            assert_eq!(searched, rows <= bench.rows_at_once(), "{rows} rows on {}", bench.isa.name());
        }
        let x = hidden_states(1, &weight, &mut random);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let head = bench.lm_head(&weight, Some([vec![0.0; 4098], vec![bad]].concat()));
            assert_eq!(bench.search(&x, &head), None, "{bad} on {}", bench.isa.name());
        }
    });
}

#[test]
fn rows_are_normalised_before_they_are_searched() {
    on_every_isa(|bench| {
        let mut random = Random::new(4);
        let weight = random.weight(DType::Ggml(GgmlType::Q8_0), 2050, COLS);
        let head = bench.lm_head(&weight, Some(random.vec(2050)));
        let layer = random.norm(NormKind::Layer, COLS);
        for norm in [random.norm(NormKind::Rms, COLS), Norm { bias: None, ..layer.clone() }, layer] {
            let (x, mut normed) = (hidden_states(2, &weight, &mut random), random.tensor(2, COLS));
            for (x, normed) in x.as_slice().chunks_exact(COLS).zip(normed.as_mut_slice().chunks_exact_mut(COLS)) {
                elementwise::norm_row(bench.isa, &norm, x, normed);
            }
            bench.scratch = LinearScratch::default();
            let expected = bench.search(&normed, &head);
            bench.scratch = LinearScratch::default();
            assert_eq!(bench.search_normed(&x, Some(&norm), &head), expected, "{:?} on {}", norm.kind, bench.isa.name());
            assert_eq!(expected.is_some(), bench.rows_at_once() > 1, "{:?} on {}", norm.kind, bench.isa.name());
        }
    });
}
