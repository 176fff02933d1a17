//! Against f64 oracles. Where the machine has no AMX, its instructions are modelled; where it has no AVX-512 BF16 either, the
//! tests have nothing to run.

use half::{bf16, f16};

use super::{
    super::{
        PANEL,
        out::SharedOut,
        tests::{Random, dequantize, linear, options, oracle_of, project, through_bf16, through_f16},
        tiled::{PanelForm, Tiled},
    },
    gemm::Groups,
    *,
};
use crate::{
    DType, GgmlType, Linear, LinearOptions, Projection, WeightView,
    cpu::{ThreadPool, linear::LinearScratch},
    mmap::Bytes,
};

/// AMX with what the machine has, or what is modelled, and as on processors without AMX-FP16.
fn all_amx() -> Vec<Amx> {
    let mut all: Vec<_> = Amx::detect().into_iter().chain(Amx::without_fp16()).collect();
    all.dedup_by_key(|amx| amx.has_fp16());
    all
}

fn deterministic(weight: &WeightView, pool: &ThreadPool) -> Linear {
    linear(weight, Precision::Deterministic, Isa::Amx, pool)
}

/// A float weight in the form that a processor with `amx` gives it.
fn tiled(amx: Amx, view: &WeightView, pool: &ThreadPool) -> Linear {
    let mut linear = CpuLinear::new(view, &options(Precision::Deterministic, None), Isa::Amx, pool).expect("a linear layer");
    let form = if amx.has_fp16() { PanelForm::F16Pairs } else { PanelForm::Bf16Pairs };
    let tiled = Tiled::in_form(form, view, Isa::Amx, pool).expect("memory");
    linear.weight = Weight::Tiled(tiled.expect("numbers"));
    linear.into()
}

/// `x @ weight^T` by tiles.
fn product(amx: Amx, pool: &ThreadPool, scratch: &mut Option<TileScratch>, x: &Tensor, weight: &Linear) -> Vec<f32> {
    let (n, weight) = (weight.out_features, weight.weight::<CpuLinear>());
    let context = LinearContext { pool, isa: Isa::Amx, adapters: &[] };
    let mut out = vec![f32::NAN; x.rows() * n];
    let shared = SharedOut::new(&mut out);
    let phase = TilePhase::start_as(amx, context, scratch, x, None, std::iter::once(weight)).expect("a phase by tiles");
    phase.run(&Items {
        count: weight.panels(),
        width: 1,
        weight: &|p| (weight, p),
        store: &|p, rows, c| {
            let columns = weight.panel_rows(p);
            for (r, c) in rows.zip(c.chunks_exact(PANEL)) {
                // SAFETY: each panel and row is stored once.
                unsafe { shared.part(r * n + columns.start, columns.len()) }.copy_from_slice(&c[..columns.len()]);
            }
        },
    });
    out
}

/// Rows `start..start + rows` of `x`.
fn part(x: &Tensor, start: usize, rows: usize) -> Tensor {
    let mut part = Tensor::new(rows, x.cols()).expect("memory");
    part.set_rows(rows);
    part.as_mut_slice().copy_from_slice(&x.as_slice()[start * x.cols()..(start + rows) * x.cols()]);
    part
}

/// The root mean square of the errors over that of the outputs.
fn relative_error(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let errors: f64 = got.iter().zip(expected).map(|(g, e)| (f64::from(*g) - e).powi(2)).sum();
    (errors / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

#[test]
fn a_k_tile_is_the_weights_of_its_columns() {
    let (pool, mut random) = (ThreadPool::new(1).unwrap(), Random::new(1));
    for amx in all_amx() {
        for format in GgmlType::ALL {
            let view = random.weight(DType::Ggml(format), 45, 512);
            let weight = deterministic(&view, &pool);
            let weight = weight.weight::<CpuLinear>();
            let mut rows = vec![[0.0; 512]; 64];
            (0..45).for_each(|r| weight.row(r, &mut rows[r]));
            let largest = rows.as_flattened().iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (p, t) in [(0, 0), (0, 7), (1, 8), (1, 15)] {
                let Weights::Packed { planes, lookup, dequantize } = weight.tile_weights(p, amx) else { panic!("{format:?}") };
                let mut tile = [0u16; PANEL * K_TILE];
                // SAFETY: the processor has what `amx` says, or it is modelled.
                unsafe { dequantize(planes, lookup, t, &mut tile) };
                for (i, bits) in tile.into_iter().enumerate() {
                    let (line, n, odd) = (i / 32 % 16, i / 512 * 16 + i / 2 % 16, i % 2);
                    // Columns 0 2 and 1 3 of every four.
                    let column = t * K_TILE + line / 2 * 4 + line % 2 + 2 * odd;
                    let value = if amx.has_fp16() { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() };
                    let (value, expected) = (value / dequantize::UNIT, rows[p * PANEL + n][column]);
                    let tolerance = largest * if amx.has_fp16() { 2e-3 } else { 5e-3 };
                    assert!(
                        (value - expected).abs() <= tolerance,
                        "{} row {n} column {column}: {value} {expected}",
                        format.name()
                    );
                }
            }
        }
    }
}

#[test]
fn errors_are_those_of_the_types_of_tiles() {
    let pool = ThreadPool::new(2).unwrap();
    for amx in all_amx() {
        for format in GgmlType::ALL {
            let mut random = Random::new(3);
            let (view, x) = (random.weight(DType::Ggml(format), 70, 768), random.tensor(9, 768));
            let (expected, _) = oracle_of(x.as_slice(), 768, &dequantize(&view));
            let got = product(amx, &pool, &mut None, &x, &deterministic(&view, &pool));
            let error = relative_error(&got, &expected);
            let most = if amx.has_fp16() { 6e-4 } else { 4e-3 };
            assert!(error < most, "{}: {error:.1e} of the outputs", format.name());
        }
        // As the prototypes have them: scales and minima like those of a model.
        let mut random = Random::new(5);
        let mut bytes = vec![0u8; 192 * 1088 / 32 * GgmlType::Q4_1.block_bytes()];
        for block in bytes.chunks_exact_mut(GgmlType::Q4_1.block_bytes()) {
            block.fill_with(|| random.bits() as u8);
            block[..2].copy_from_slice(&f16::from_f32(0.006 + 0.002 * random.unit()).to_le_bytes());
            block[2..4].copy_from_slice(&f16::from_f32(-0.06 + 0.03 * random.unit()).to_le_bytes());
        }
        let view = WeightView::new(DType::Ggml(GgmlType::Q4_1), 192, 1088, Bytes::from_vec(bytes)).expect("a weight");
        let mut x = random.tensor(40, 1088);
        x.as_mut_slice().iter_mut().for_each(|v| *v = random.unit().powi(3) * 3.0);
        let (expected, _) = oracle_of(x.as_slice(), 1088, &dequantize(&view));
        let error = relative_error(&product(amx, &pool, &mut None, &x, &deterministic(&view, &pool)), &expected);
        let most = if amx.has_fp16() { 4e-4 } else { 3e-3 };
        assert!(error < most, "Q4_1, f16 {}: {error:.1e} of the outputs", amx.has_fp16());
    }
}

#[test]
fn float_weights_are_the_oracle_on_rounded_operands() {
    let pool = ThreadPool::new(3).unwrap();
    let mut scratch = None;
    let sizes = [(1, 1, 32), (5, 31, 64), (40, 33, 512), (17, 70, 640), (37, 100, 672), (65, 65, 2080), (33, 257, 96)];
    for (amx, (m, n, k)) in all_amx().into_iter().flat_map(|amx| sizes.map(|size| (amx, size))) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut random = Random::new(m as u64);
            let (view, x) = (random.weight(dtype, n, k), random.tensor(m, k));
            let through = |values: &[f32], chunk| if amx.has_fp16() { through_f16(values, chunk) } else { through_bf16(values) };
            let (expected, bounds) = oracle_of(&through(x.as_slice(), k), k, &through(&dequantize(&view), PANEL * k));
            let got = product(amx, &pool, &mut scratch, &x, &tiled(amx, &view, &pool));
            for (i, got) in got.iter().enumerate() {
                let error = (f64::from(*got) - expected[i]).abs();
                assert!(error <= 1e-6 * bounds[i], "{dtype} {m} {n} {k}, output {i}: {error:e} off {}", expected[i]);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_number_of_rows_and_on_any_number_of_threads() {
    let pools = [1, 2, 3].map(|threads| ThreadPool::new(threads).unwrap());
    for amx in all_amx() {
        for (dtype, k) in [
            (DType::Ggml(GgmlType::Q4_1), 1088),
            (DType::Ggml(GgmlType::Q4K), 768),
            (DType::Ggml(GgmlType::Q6K), 256),
            (DType::BF16, 672),
            (DType::F32, 672),
        ] {
            let (mut random, n) = (Random::new(7), 40);
            let (view, x) = (random.weight(dtype, n, k), random.tensor(600, k));
            let weight = if matches!(dtype, DType::BF16 | DType::F32) {
                tiled(amx, &view, &pools[0])
            } else {
                deterministic(&view, &pools[0])
            };
            let mut scratch = None;
            let all: Vec<u32> = product(amx, &pools[0], &mut scratch, &x, &weight).into_iter().map(f32::to_bits).collect();
            // Cut within tiles and at them, with the ring and in parts, one group and several.
            for (first, m) in [(0, 1), (599, 1), (7, 5), (3, 16), (500, 17), (13, 32), (40, 64), (2, 65), (64, 130), (0, 600)] {
                for pool in &pools {
                    let got = product(amx, pool, &mut scratch, &part(&x, first, m), &weight);
                    let same = got.iter().zip(&all[first * n..]).all(|(a, b)| a.to_bits() == *b);
                    assert!(same, "{dtype}, f16 {}: rows {first}..+{m}, {} threads", amx.has_fp16(), pool.num_threads());
                }
            }
        }
    }
}

#[test]
fn groups_have_every_row_once_and_no_more_than_buffers_hold() {
    for (rows, k_tiles, threads) in (1..70).chain([511, 512, 513, 1000, 1420, 8191]).flat_map(|rows| {
        [(1, 1), (18, 2), (48, 3), (64, 16), (448, 2), (1000, 64)].map(|(k_tiles, threads)| (rows, k_tiles, threads))
    }) {
        let groups = Groups::new(rows, k_tiles, threads);
        let mut next = 0;
        for g in 0..groups.count {
            let range = groups.rows(g);
            assert!(range.start == next && range.len() <= gemm::MAX_ROWS, "group {g} of {rows} rows: {range:?}");
            assert!(range.is_empty() || range.start.is_multiple_of(16));
            next = range.end;
        }
        assert_eq!(next, rows);
        assert!(rows < 16 * threads || groups.count.is_multiple_of(threads), "{rows} rows on {threads} threads");
    }
}

#[test]
fn rows_far_from_one_are_as_precise_as_others() {
    let pool = ThreadPool::new(1).unwrap();
    for (amx, dtype) in all_amx().into_iter().flat_map(|amx| [DType::Ggml(GgmlType::Q8_0), DType::F32].map(|dtype| (amx, dtype)))
    {
        let mut random = Random::new(9);
        let (view, x) = (random.weight(dtype, 32, 256), random.tensor(1, 256));
        let weight = if dtype == DType::F32 { tiled(amx, &view, &pool) } else { deterministic(&view, &pool) };
        let one = product(amx, &pool, &mut None, &x, &weight);
        for exponent in [-90, -40, 40, 90] {
            let (scale, mut scaled) = (2f32.powi(exponent), part(&x, 0, 1));
            scaled.as_mut_slice().iter_mut().for_each(|v| *v *= scale);
            let got = product(amx, &pool, &mut None, &scaled, &weight);
            assert!(got.iter().zip(&one).all(|(g, o)| g.to_bits() == (o * scale).to_bits()), "times 2^{exponent}: {got:?}");
        }
        let mut zeros = part(&x, 0, 1);
        zeros.as_mut_slice().fill(0.0);
        assert!(product(amx, &pool, &mut None, &zeros, &weight).iter().all(|v| *v == 0.0));
    }
}

/// Panels of zeros, of the least and of large values beside each other, and a row of zeros among large ones.
#[test]
fn every_panel_of_float_weights_has_a_scale_of_its_own() {
    let (pool, k) = (ThreadPool::new(1).unwrap(), 64);
    for amx in all_amx() {
        let mut random = Random::new(15);
        let scales = [0.0, 2f32.powi(-100), 2f32.powi(60), 1.0];
        let mut values = random.vec(4 * PANEL * k);
        for (panel, scale) in values.chunks_exact_mut(PANEL * k).zip(scales) {
            for v in &mut *panel {
                *v *= scale;
            }
            panel[..k].fill(0.0);
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = WeightView::new(DType::F32, 4 * PANEL, k, Bytes::from_vec(bytes)).expect("a weight");
        let mut x = random.tensor(5, k);
        x.row_mut(4).iter_mut().for_each(|v| *v *= 2f32.powi(60));
        let (expected, _) = oracle_of(x.as_slice(), k, &values);
        let got = product(amx, &pool, &mut None, &x, &tiled(amx, &view, &pool));
        for (got, expected) in got.chunks_exact(PANEL).zip(expected.chunks_exact(PANEL)) {
            assert!(got[0] == 0.0 && expected[0] == 0.0, "of a row of zeros: {}", got[0]);
            let (largest, most) =
                (expected.iter().fold(0.0, |m: f64, v| m.max(v.abs())), if amx.has_fp16() { 2e-3 } else { 1e-2 });
            assert!(got.iter().zip(expected).all(|(g, e)| (f64::from(*g) - e).abs() <= most * largest), "{got:?} {expected:?}");
        }
    }
}

#[test]
fn float_weights_that_are_no_numbers_stay_as_they_are() {
    if !Isa::Amx.multiplies_f16() {
        return;
    }
    let pool = ThreadPool::new(1).unwrap();
    let mut values = vec![1.0f32; 40 * 64];
    values[33 * 64 + 5] = f32::INFINITY;
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = WeightView::new(DType::F32, 40, 64, Bytes::from_vec(bytes)).expect("a weight");
    let linear = linear(&view, Precision::Fast, Isa::Amx, &pool);
    let mut x = Tensor::new(9, 64).expect("memory");
    x.set_rows(9);
    x.as_mut_slice().fill(1.0);
    let context = LinearContext { pool: &pool, isa: Isa::Amx, adapters: &[] };
    let got = project(context, &mut LinearScratch::default(), &x, &linear);
    assert!(got.iter().enumerate().all(|(i, v)| if i % 40 == 33 { *v == f32::INFINITY } else { *v == 64.0 }), "{got:?}");
}

#[test]
fn weights_beyond_f16_go_by_other_kernels() {
    let pool = ThreadPool::new(2).unwrap();
    if Isa::detect() < Isa::Amx {
        return;
    }
    let mut random = Random::new(11);
    let mut bytes = vec![1u8; 40 * 64 / 32 * GgmlType::Q8_0.block_bytes()];
    for (i, block) in bytes.chunks_exact_mut(GgmlType::Q8_0.block_bytes()).enumerate() {
        block[..2].copy_from_slice(&f16::from_f32(if i == 33 { 40.0 } else { 0.01 }).to_le_bytes());
    }
    let view = WeightView::new(DType::Ggml(GgmlType::Q8_0), 40, 64, Bytes::from_vec(bytes)).expect("a weight");
    for load in [CpuLinear::new, CpuLinear::lm_head] {
        let linear: Linear = load(&view, &options(Precision::Fast, None), Isa::Amx, &pool).expect("a linear layer").into();
        assert!(!linear.weight::<CpuLinear>().is_for_tiles(9));
        let x = random.tensor(9, 64);
        let got =
            project(LinearContext { pool: &pool, isa: Isa::Amx, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
        let (expected, _) = oracle_of(x.as_slice(), 64, &dequantize(&view));
        assert!(relative_error(&got, &expected) < 0.02);
    }
}

/// A phase may have packed and float weights, and the matrix of logits lies in planes.
#[test]
fn weights_of_every_kind_share_a_phase() {
    if Isa::detect() < Isa::Amx {
        return;
    }
    let pool = ThreadPool::new(2).unwrap();
    let context = LinearContext { pool: &pool, isa: Isa::Amx, adapters: &[] };
    let mut random = Random::new(13);
    let x = random.tensor(21, 256);
    let views = [DType::Ggml(GgmlType::Q8_0), DType::F16, DType::Ggml(GgmlType::Q8_0)].map(|dtype| random.weight(dtype, 50, 256));
    let options = LinearOptions { bias: Some(random.vec(50)), ..options(Precision::Fast, None) };
    let load = |i: usize, load: fn(&WeightView, &LinearOptions, Isa, &ThreadPool) -> _| -> Linear {
        let linear: Result<CpuLinear, DeviceError> = load(&views[i], &options, Isa::Amx, &pool);
        linear.expect("a linear layer").into()
    };
    let linears = [load(0, CpuLinear::new), load(1, CpuLinear::new), load(2, CpuLinear::lm_head)];
    let mut outs = [0; 3].map(|_| Tensor::new(21, 50).expect("memory"));
    let mut projections: Vec<_> = linears.iter().zip(&mut outs).map(|(linear, out)| Projection { linear, out }).collect();
    super::super::norm_linear(context, &mut LinearScratch::default(), &x, None, &mut projections);
    for ((linear, out), view) in linears.iter().zip(&outs).zip(&views) {
        assert!(linear.weight::<CpuLinear>().is_for_tiles(21));
        let alone = project(context, &mut LinearScratch::default(), &x, linear);
        assert!(out.as_slice() == alone, "a projection differs from itself alone");
        let (mut expected, _) = oracle_of(x.as_slice(), 256, &dequantize(view));
        let bias = options.bias.as_ref().expect("it has one");
        expected.iter_mut().enumerate().for_each(|(i, e)| *e += f64::from(bias[i % 50]));
        assert!(relative_error(out.as_slice(), &expected) < 5e-3);
    }
    // The same codes in planes and not.
    let plain = load(2, CpuLinear::new);
    assert!(project(context, &mut LinearScratch::default(), &x, &plain) == outs[2].as_slice());
}
