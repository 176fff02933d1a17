//! Projections alone.

use half::f16;
use proptest::prelude::*;

use super::{
    super::{
        activations::quantize_row_above,
        layout::{Layout, super_block_body_bytes, super_block_bytes, super_block_len},
    },
    *,
};

fn assert_close(what: &str, got: &[f32], expected: &[f64], bounds: &[f64], relative: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, ((g, e), b)) in got.iter().zip(expected).zip(bounds).enumerate() {
        let error = (f64::from(*g) - e).abs();
        assert!(error <= relative * b + 1e-9, "{what}: output {i} is {g} instead of {e}, error {error:e} of {b:e}");
    }
}

/// What the fast path of `isa` computes, and bounds by magnitude.
fn fast_oracle(isa: Isa, x: &Tensor, weight: &WeightView) -> (Vec<f64>, Vec<f64>) {
    let k = weight.cols;
    let rounded = in_bf16(isa, weight.dtype, k);
    let seen = match weight.dtype {
        _ if rounded => through_bf16(x.as_slice()),
        _ if in_tiles(isa, x.rows(), weight.dtype, k) => x.as_slice().to_vec(),
        DType::Ggml(_) => through_integers(isa, x.as_slice(), k),
        _ => x.as_slice().to_vec(),
    };
    let values = dequantize(weight);
    oracle_of(&seen, k, &if rounded { through_bf16(&values) } else { values })
}

fn check_fast(dtype: DType, (m, n, k): (usize, usize, usize), seed: u64, pool: &ThreadPool) {
    let mut random = Random::new(seed);
    let (weight, x) = (random.weight(dtype, n, k), random.tensor(m, k));
    for isa in isas() {
        let (expected, bounds) = fast_oracle(isa, &x, &weight);
        let linear = linear(&weight, Precision::Fast, isa, pool);
        assert_eq!(linear.weight::<CpuLinear>().is_packed(), matches!(dtype, DType::Ggml(_)));
        let got = project(LinearContext { pool, isa, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
        assert_close(&format!("{dtype} {} [{m}, {n}, {k}]", isa.name()), &got, &expected, &bounds, rounding(isa, m, dtype, k));
    }
}

#[test]
fn the_fast_path_is_the_oracle_on_rounded_activations() {
    let pool = ThreadPool::new(2).unwrap();
    for dtype in dtypes() {
        for (i, shape) in
            [(1, 96, 256), (2, 33, 512), (3, 70, 256), (5, 1, 256), (33, 40, 768), (50, 65, 512)].into_iter().enumerate()
        {
            check_fast(dtype, shape, i as u64 + 1, &pool);
        }
    }
}

#[test]
fn activations_are_quantized_to_the_same_bits_on_every_isa() {
    let mut x = Random::new(19).tensor(40, 768);
    // An outlier block in each row.
    x.as_mut_slice().chunks_exact_mut(768).flat_map(|row| &mut row[..BLOCK]).for_each(|v| *v *= 9.0);
    // Zeros, values too small for a scale, codes between two integers, and the largest there are.
    let odd: [fn(usize) -> f32; 6] = [
        |_| 0.0,
        |i| i as f32 * 1e-32,
        |i| i as f32 * 1e-40,
        |i| if i == 0 { 16256.0 } else { i as f32 - 16.5 },
        |i| if i == 0 { -16256.0 } else { 63.5 - 2.0 * i as f32 },
        |i| if i % 2 == 0 { f32::MAX } else { -f32::MAX },
    ];
    for (row, odd) in odd.into_iter().enumerate() {
        x.row_mut(row)[BLOCK..2 * BLOCK].iter_mut().enumerate().for_each(|(i, v)| *v = odd(i));
    }
    for (row, ratio) in (0..x.rows()).flat_map(|row| [(row, 2.0), (row, 0.0)]) {
        let blocks = |isa| {
            let mut blocks = vec![ActBlock::ZERO; 768 / BLOCK];
            quantize_row_above(ratio, isa, x.row(row), &mut blocks);
            let bits = |b: &ActBlock| (b.upper, b.lower, b.scale.to_bits(), b.scaled_sums.map(f32::to_bits), b.sums, b.has_lower);
            blocks.iter().map(bits).collect::<Vec<_>>()
        };
        let plain = blocks(Isa::Scalar);
        assert!(plain.iter().any(|b| b.5 != 0), "row {row} has no lower part");
        for isa in isas() {
            assert_eq!(blocks(isa), plain, "row {row}, {}", isa.name());
        }
    }
}

#[test]
fn extreme_codes_neither_saturate_nor_overflow() {
    let pool = ThreadPool::new(1).unwrap();
    for format in GgmlType::ALL {
        for fill in [0x00, 0x80, 0x7f, 0xff] {
            let mut bytes = vec![fill; 4 * 32 * format.block_bytes()];
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                set_scales(format, block, &mut || 0.01);
            }
            let cols = 4 * format.block_len();
            let weight = WeightView::new(DType::Ggml(format), 32, cols, Bytes::from_vec(bytes)).expect("a weight");
            for sign in [1.0, -1.0] {
                let mut few = Vec::new();
                for (isa, rows) in isas().into_iter().flat_map(|t| [(t, 2), (t, 64)]) {
                    let mut x = Tensor::new(rows, weight.cols).expect("memory");
                    x.set_rows(rows);
                    // Codes of activations: the largest, and in odd rows those of the largest parts of opposite signs; those of a
                    // quarter of the blocks have both parts, with AMX all.
                    for (i, v) in x.as_mut_slice().iter_mut().enumerate() {
                        let opposite = i / weight.cols % 2 == 1 && !i.is_multiple_of(32);
                        let size = if i % weight.cols < format.block_len() { 3.0 } else { 0.1 };
                        *v = size * sign * if opposite { 16192.0 / 16256.0 } else { 1.0 };
                    }
                    let (expected, bounds) = fast_oracle(isa, &x, &weight);
                    let linear = linear(&weight, Precision::Fast, isa, &pool);
                    let got =
                        project(LinearContext { pool: &pool, isa, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
                    let what = format!("{} {} {fill:#x}", format.name(), isa.name());
                    let by_tiles = in_tiles(isa, rows, weight.dtype, cols);
                    assert_close(&what, &got, &expected, &bounds, if by_tiles { F16_ROUNDING } else { ROUNDING * 4.0 });
                    if rows == 2 {
                        few = got;
                    } else if !by_tiles {
                        assert!(got.chunks_exact(few.len()).all(|g| *g == few), "{what}: many rows differ from few");
                    }
                }
            }
        }
    }
}

/// Every row of a batch has the bits it has alone, on one thread or three.
fn check_rows_alone(precision: Precision, dtype: DType, isa: Isa, rows: impl Iterator<Item = usize>) {
    let mut random = Random::new(7);
    // Whole blocks; k tiles, three more than a multiple of the four that are widened together; of exact floats any number of
    // columns.
    let k = match (dtype, precision) {
        (DType::Ggml(_), _) => 512,
        (_, Precision::Exact) => 501,
        _ => 608,
    };
    let n = 67;
    let (weight, all) = (random.weight(dtype, n, k), random.tensor(65, k));
    let (one, three) = (ThreadPool::new(1).unwrap(), ThreadPool::new(3).unwrap());
    let linear = linear(&weight, precision, isa, &three);
    let mut scratch = LinearScratch::default();
    let mut part = |pool: &ThreadPool, m: usize, start: usize| {
        let mut x = Tensor::new(m, k).expect("memory");
        x.set_rows(m);
        x.as_mut_slice().copy_from_slice(&all.as_slice()[start * k..(start + m) * k]);
        project(LinearContext { pool, isa, adapters: &[] }, &mut scratch, &x, &linear)
    };
    let alone: Vec<u32> = (0..65).flat_map(|i| part(&one, 1, i)).map(f32::to_bits).collect();
    // From some number of rows on AMX multiplies by tiles; there, rows agree among all larger batches.
    let together: Vec<u32> = part(&one, 65, 0).into_iter().map(f32::to_bits).collect();
    for m in rows {
        let by_tiles = precision == Precision::Fast && tiles::min_rows(isa).is_some_and(|min| m >= min);
        let alone = if by_tiles { &together } else { &alone };
        for pool in [&one, &three] {
            let start = 65 - m;
            let got = part(pool, m, start);
            let same = got.iter().zip(&alone[start * n..]).all(|(g, a)| g.to_bits() == *a);
            assert!(same, "{dtype} {} {precision:?}: {m} rows differ from the same rows alone", isa.name());
        }
    }
}

#[test]
fn an_exact_row_has_the_same_bits_in_every_batch() {
    for isa in isas() {
        for dtype in dtypes() {
            let all = dtype == DType::BF16 || dtype == DType::Ggml(GgmlType::Q4_1);
            check_rows_alone(Precision::Exact, dtype, isa, (1..=65).filter(|m| all || [1, 2, 3, 4, 7, 33, 65].contains(m)));
        }
    }
}

#[test]
fn a_fast_row_has_the_same_bits_in_every_batch() {
    for isa in isas() {
        for dtype in dtypes() {
            check_rows_alone(Precision::Fast, dtype, isa, [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 64, 65].into_iter());
        }
    }
}

/// On AMX as well, where a fast row does not.
#[test]
fn a_deterministic_row_has_the_same_bits_in_every_batch() {
    for isa in isas() {
        for dtype in dtypes() {
            check_rows_alone(Precision::Deterministic, dtype, isa, [1, 2, 3, 4, 5, 8, 16, 31, 33, 64, 65].into_iter());
        }
    }
}

/// Instruction sets that fuse multiplications with additions agree with each other and with `float.rs`.
#[test]
fn an_exact_row_is_sixteen_partial_sums_added_pairwise() {
    let pool = ThreadPool::new(1).unwrap();
    let mut random = Random::new(12);
    for (isa, k) in isas().into_iter().filter(|isa| *isa != Isa::Scalar).flat_map(|isa| [(isa, 512), (isa, 501)]) {
        for (dtype, m) in [DType::F32, DType::BF16].into_iter().flat_map(|dtype| (1..=14).map(move |m| (dtype, m))) {
            let (weight, x) = (random.weight(dtype, 39, k), random.tensor(m, k));
            let linear = linear(&weight, Precision::Exact, isa, &pool);
            let context = LinearContext { pool: &pool, isa, adapters: &[] };
            let got = project(context, &mut LinearScratch::default(), &x, &linear);
            let values = dequantize(&weight);
            for (i, got) in got.into_iter().enumerate() {
                let mut sums = [0.0f32; 16];
                for (column, (x, w)) in x.row(i / 39).iter().zip(&values[i % 39 * k..]).enumerate() {
                    sums[column % 16] = w.mul_add(*x, sums[column % 16]);
                }
                for half in [8, 4, 2, 1] {
                    (0..half).for_each(|lane| sums[lane] += sums[lane + half]);
                }
                assert_eq!(got.to_bits(), sums[0].to_bits(), "{} {dtype} of {m} rows of {k}, output {i}", isa.name());
            }
        }
    }
}

/// Each `vdpbf16ps` adds the product of odd columns to an output, then that of even ones.
#[test]
fn a_bf16_row_is_one_chain_of_sums() {
    if !Isa::Avx512.multiplies_bf16() {
        return;
    }
    let pool = ThreadPool::new(1).unwrap();
    let (mut random, k) = (Random::new(11), 288);
    let weight = random.weight(DType::BF16, 37, k);
    let linear = linear(&weight, Precision::Fast, Isa::Avx512, &pool);
    let (values, context) = (dequantize(&weight), LinearContext { pool: &pool, isa: Isa::Avx512, adapters: &[] });
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 70] {
        let x = random.tensor(m, k);
        let got = project(context, &mut LinearScratch::default(), &x, &linear);
        let rounded = through_bf16(x.as_slice());
        for (i, got) in got.into_iter().enumerate() {
            let (x, w) = (&rounded[i / 37 * k..][..k], &values[i % 37 * k..][..k]);
            let chain = (0..k).step_by(2).fold(0.0f32, |sum, k| (sum + x[k + 1] * w[k + 1]) + x[k] * w[k]);
            assert_eq!(got.to_bits(), chain.to_bits(), "{m} rows, output {i}: {got} instead of {chain}");
        }
    }
}

/// Alone a row is multiplied by other instructions than among many: of the same bf16 numbers, or by activations that are not
/// rounded to f16.
#[test]
fn a_float_row_on_amx_is_the_row_alone_but_for_rounding() {
    if Isa::detect() < Isa::Amx {
        return;
    }
    let pool = ThreadPool::new(2).unwrap();
    let context = LinearContext { pool: &pool, isa: Isa::Amx, adapters: &[] };
    let most = if Isa::Amx.multiplies_f16() { 2.5e-4 } else { 1e-6 };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut random = Random::new(13);
        let (weight, x) = (random.weight(dtype, 75, 768), random.tensor(40, 768));
        let linear = linear(&weight, Precision::Fast, Isa::Amx, &pool);
        let together = project(context, &mut LinearScratch::default(), &x, &linear);
        let (_, bounds) = oracle(x.as_slice(), &weight);
        for (i, together) in together.chunks_exact(75).enumerate() {
            let mut row = Tensor::new(1, 768).expect("memory");
            row.set_rows(1);
            row.as_mut_slice().copy_from_slice(x.row(i));
            let alone = project(context, &mut LinearScratch::default(), &row, &linear);
            let alone: Vec<_> = alone.into_iter().map(f64::from).collect();
            assert_close(&format!("{dtype} row {i}"), together, &alone, &bounds[i * 75..], most);
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn avx2_kernels_have_the_same_bits_with_vnni_and_without() {
    const BLOCKS: usize = 8;
    if Isa::detect() < Isa::Avx2 || !is_x86_feature_detected!("avxvnni") {
        return;
    }
    for (format, rows) in GgmlType::ALL.into_iter().flat_map(|f| [1, 2, 3, 64].map(|rows| (f, rows))) {
        let mut random = Random::new(rows as u64);
        let layout = Layout::of(format);
        let mut acts = vec![ActBlock::ZERO; BLOCKS * rows];
        for (i, act) in acts.iter_mut().enumerate() {
            // Some of the largest parts that there are; lower parts in every other block.
            let extreme = i % 3 == 0;
            let mut below = |n: u64| (random.bits() % n) as i32;
            act.upper.fill_with(|| if extreme { 127 } else { (below(255) - 127) as i8 });
            act.lower.fill_with(|| match (i % 2, extreme) {
                (0, _) => 0,
                (_, true) => -64,
                _ => (below(128) - 64) as i8,
            });
            act.has_lower = (i % 2 == 1).into();
            let code = |i: usize| 128 * i32::from(act.upper[i]) + i32::from(act.lower[i]);
            act.sums = [0..32, 0..16, 16..32].map(|columns| columns.map(code).sum());
            act.scale = 0.01;
            act.scaled_sums = act.sums.map(|s| s as f32 * act.scale);
        }
        for fill in [None, Some(0x00), Some(0xff)] {
            let Layout { codes, halves, min, super_blocks, .. } = layout;
            let [blocks, super_block] =
                [super_block_body_bytes, super_block_bytes].map(|bytes| bytes(codes as u8, halves, min, super_blocks));
            let mut panel = vec![0u8; BLOCKS / super_block_len(super_blocks) * super_block];
            for super_block in panel.chunks_exact_mut(super_block) {
                let (blocks, floats) = super_block.split_at_mut(blocks);
                blocks.fill_with(|| fill.unwrap_or(random.bits() as u8));
                floats.as_chunks_mut::<2>().0.iter_mut().for_each(|s| *s = f16::from_f32(random.unit()).to_le_bytes());
            }
            let bits = |kernel: &dyn Fn(&mut [[f32; PANEL]])| {
                let mut out = vec![[f32::NAN; PANEL]; rows];
                kernel(&mut out);
                out.as_flattened().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let [with, without] = [avx2::with_vnni(layout), avx2::without_vnni(layout)]
                // SAFETY: the machine has AVX2 and AVX-VNNI.
                .map(|kernel| bits(&|out| unsafe { kernel(&panel, &layout.lookup(), &acts, out) }));
            assert!(with == without, "{} {rows} rows, codes {fill:?}", format.name());
            if format == GgmlType::Q4_0 {
                // The upper plane of a matrix of logits is laid out like this format.
                for (other, is_estimate) in [(layout::FIFTH_BYTES, true), (layout::LOWER_BYTES, false)] {
                    let mut plane = vec![0u8; BLOCKS * other];
                    plane.fill_with(|| fill.unwrap_or(random.bits() as u8));
                    let [with, without] = [avx2::planes_kernels_of::<true>(), avx2::planes_kernels_of::<false>()]
                        .map(|kernels| if is_estimate { kernels.estimate } else { kernels.multiply })
                        // SAFETY: as above.
                        .map(|kernel| bits(&|out| unsafe { kernel(&panel, &plane, &acts, out) }));
                    assert!(with == without, "planes, {rows} rows, codes {fill:?}");
                }
            }
        }
    }
}

#[test]
fn the_exact_path_is_the_oracle_on_float_activations() {
    let pool = ThreadPool::new(2).unwrap();
    for dtype in dtypes() {
        let mut random = Random::new(3);
        let k = if matches!(dtype, DType::Ggml(_)) { 768 } else { 777 };
        let (weight, x) = (random.weight(dtype, 45, k), random.tensor(6, k));
        let (expected, bounds) = oracle(x.as_slice(), &weight);
        for isa in isas() {
            let linear = linear(&weight, Precision::Exact, isa, &pool);
            let got = project(LinearContext { pool: &pool, isa, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
            assert_close(&format!("{dtype} {}", isa.name()), &got, &expected, &bounds, 1e-6);
        }
    }
}

#[test]
fn a_nan_or_infinite_activation_is_lost_in_no_row_and_reaches_no_other() {
    let pool = ThreadPool::new(1).unwrap();
    for (isa, rows) in isas().into_iter().flat_map(|t| [(t, 2), (t, 64)]) {
        for dtype in dtypes() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                let mut random = Random::new(5);
                let (weight, mut x) = (random.weight(dtype, 5, 256), random.tensor(rows, 256));
                x.as_mut_slice()[300] = bad;
                let linear = linear(&weight, Precision::Fast, isa, &pool);
                let got = project(LinearContext { pool: &pool, isa, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
                let right = got.iter().enumerate().all(|(i, v)| v.is_finite() == (i / 5 != 1));
                assert!(right, "{dtype} {bad} {} {rows} rows: {got:?}", isa.name());
            }
        }
    }
}

#[test]
fn a_scale_beyond_f16_is_computed_in_f32() {
    let pool = ThreadPool::new(1).unwrap();
    let mut bytes = vec![0x21; 34];
    (bytes[0], bytes[17]) = (150, 120);
    let weight = WeightView::new(DType::Ggml(GgmlType::Mxfp4), 1, 64, Bytes::from_vec(bytes)).expect("a weight");
    let x = Random::new(1).tensor(1, 64);
    let (expected, bounds) = oracle(x.as_slice(), &weight);
    let isa = Isa::detect();
    let linear = linear(&weight, Precision::Fast, isa, &pool);
    let got = project(LinearContext { pool: &pool, isa, adapters: &[] }, &mut LinearScratch::default(), &x, &linear);
    assert_close("MXFP4", &got, &expected, &bounds, 1e-6);
}

#[test]
fn a_bias_of_the_wrong_length_is_refused_by_name_and_numbers() {
    let weight = Random::new(1).weight(DType::F32, 4, 8);
    let error = CpuLinear::new(&weight, &options(Precision::Fast, Some(vec![0.0; 3])), Isa::Scalar, &ThreadPool::new(1).unwrap());
    let message = error.err().expect("an error").to_string();
    assert!(message.contains("`w`") && message.contains('3') && message.contains('4'), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_shape_of_any_type_agrees_with_the_oracle(
        dtype in proptest::sample::select(dtypes()), m in 1usize..34, n in 1usize..100, blocks in 1usize..12, seed in 1u64..1_000_000,
    ) {
        let block = match dtype { DType::Ggml(f) => f.block_len(), _ if seed % 2 == 0 => 32, _ => 7 };
        let blocks = if block == 256 { blocks.div_ceil(4) } else { blocks };
        check_fast(dtype, (m, n, block * blocks), seed, &ThreadPool::new(2).unwrap());
    }
}

#[test]
fn a_row_of_a_weight_is_the_stored_one_but_for_scales_rounded_to_f16() {
    let (pool, mut random) = (ThreadPool::new(1).unwrap(), Random::new(31));
    for dtype in dtypes() {
        let view = random.weight(dtype, 45, 512);
        for precision in [Precision::Exact, Precision::Fast] {
            let weight = linear(&view, precision, Isa::detect(), &pool);
            for r in [0, 15, 16, 31, 32, 44] {
                let (mut row, mut stored) = (vec![0.0; 512], vec![0.0; 512]);
                weight.weight::<CpuLinear>().row(r, &mut row);
                dequantize_row(dtype, view.row(r), &mut stored);
                let largest = stored.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let tolerance = if precision == Precision::Fast { 4e-3 * largest } else { 0.0 };
                for (k, (got, expected)) in row.iter().zip(&stored).enumerate() {
                    assert!((got - expected).abs() <= tolerance, "{dtype} row {r} column {k}: {got} for {expected}");
                }
            }
        }
    }
}
