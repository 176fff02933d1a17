//! Products of `CudaBackend` with few rows and with many, against the plain backend.

use device::{
    Backend, DType, GgmlType, Linear, LinearOptions, Precision, Projection, ResidualArgs, StepMetadata, WeightView,
    cpu::ReferenceBackend,
    cuda::{CudaBackend, CudaOptions},
    mmap::Bytes,
    quant::dequantize_row,
};
use half::{bf16, f16};
use kernel_tests::{
    Order, assert_close, driver,
    random::Rng,
    tensors::{fetched, tensor},
};

const Q8_0: DType = DType::Ggml(GgmlType::Q8_0);
const Q4_0: DType = DType::Ggml(GgmlType::Q4_0);
const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, Q8_0, Q4_0];
const COLS: usize = 96;

/// What a product of matrices makes of a value.
fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
        _ => bf16::from_f32(x).to_f32(),
    }
}

fn view(rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> WeightView {
    let floats = rng.floats(rows * cols);
    let bytes = match dtype {
        DType::F32 => floats.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => floats.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        DType::BF16 => floats.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::Ggml(format) => {
            let mut block = || {
                let scale = f16::from_f32(rng.float() / 50.0).to_le_bytes();
                scale.into_iter().chain((2..format.block_bytes()).map(|_| rng.below(256) as u8)).collect::<Vec<u8>>()
            };
            (0..rows * cols / format.block_len()).flat_map(|_| block()).collect()
        }
    };
    WeightView::new(dtype, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

fn f32_view(values: &[f32], cols: usize) -> WeightView {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    WeightView::new(DType::F32, values.len() / cols, cols, Bytes::from_vec(bytes)).unwrap()
}

/// The weight's values as a product of matrices reads them.
fn rounded(weight: &WeightView) -> WeightView {
    let mut row = vec![0.0; weight.cols];
    let values: Vec<f32> = (0..weight.rows)
        .flat_map(|i| {
            dequantize_row(weight.dtype, weight.row(i), &mut row);
            row.iter().map(|x| round(weight.dtype, *x)).collect::<Vec<_>>()
        })
        .collect();
    f32_view(&values, weight.cols)
}

fn linear(backend: &dyn Backend, weight: &WeightView, precision: Precision, bias: Option<&Vec<f32>>) -> Linear {
    backend.load_linear(weight, &LinearOptions { name: "w".into(), precision, bias: bias.cloned() }).unwrap()
}

/// With products of matrices: of the emulation, or of cuBLASLt on a GPU.
fn cuda() -> CudaBackend {
    let driver = driver(Order::Ascending);
    driver.check_matmul().expect("LD_LIBRARY_PATH with the folder of libcublasLt.so.13");
    CudaBackend::new(driver).unwrap()
}

fn project(backend: &dyn Backend, weight: &WeightView, precision: Precision, bias: Option<&Vec<f32>>, x: &[f32]) -> Vec<f32> {
    let linear = linear(backend, weight, precision, bias);
    let x = tensor(backend, x, weight.cols);
    let mut out = backend.alloc(x.rows(), weight.rows).unwrap();
    backend.norm_linear(&x, None, &mut [Projection { linear: &linear, out: &mut out }], &StepMetadata::default());
    fetched(backend, out)
}

/// Rows up to which a weight is multiplied without rounding it.
fn few(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 8,
        _ => 32,
    }
}

/// Rows from which on there is a product of matrices: there are tiles of packed weights up to then.
fn many(dtype: DType) -> usize {
    if matches!(dtype, DType::Ggml(_)) { 257 } else { few(dtype) + 1 }
}

/// Rows from which on activations are rounded.
fn rounded_from(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 9,
        _ => 1,
    }
}

#[test]
fn values_are_rounded_from_the_first_row_too_many_for_few() {
    let mut rng = Rng::new(1);
    for (dtype, out_features) in DTYPES.into_iter().flat_map(|dtype| [33, 100].map(|n| (dtype, n))) {
        let weight = view(&mut rng, dtype, out_features, COLS);
        let bias = rng.floats(out_features);
        for rows in [1, 2, 9, few(dtype), few(dtype) + 1, 77, many(dtype)] {
            let x = rng.floats(rows * COLS);
            let seen: Vec<f32> = x.iter().map(|x| if rows < rounded_from(dtype) { *x } else { round(dtype, *x) }).collect();
            let read = if rows > few(dtype) { rounded(&weight) } else { weight.clone() };
            for bias in [None, Some(&bias)] {
                let expected = project(&ReferenceBackend::new(), &read, Precision::Exact, bias, &seen);
                let actual = project(&cuda(), &weight, Precision::Fast, bias, &x);
                let what = format!("{dtype}, {rows} rows, {out_features} features, bias {}", bias.is_some());
                assert_close(&actual, &expected, [1e-4, 1e-5], &what);
            }
        }
    }
}

#[test]
fn weights_take_the_bytes_that_are_planned_for_them() {
    let mut rng = Rng::new(5);
    for (dtype, precision) in DTYPES.into_iter().flat_map(|d| [Precision::Exact, Precision::Fast].map(|p| (d, p))) {
        for rows in [33, 128] {
            let (weight, cuda) = (view(&mut rng, dtype, rows, COLS), cuda());
            let backend: &dyn Backend = &cuda;
            let bytes = linear(backend, &weight, precision, None).bytes();
            assert_eq!(bytes, backend.linear_bytes(dtype, [rows, COLS], precision), "{dtype} {precision:?}");
        }
    }
}

#[test]
fn values_beyond_f16_become_its_largest() {
    let weight = f32_view(&[1.0; 8], 8);
    let half = WeightView::new(DType::F16, 1, 8, Bytes::from_vec(f16::ONE.to_le_bytes().repeat(8))).unwrap();
    for rows in [2, 9, 33] {
        let mut x = vec![0.0; rows * 8];
        x[0] = 1e6;
        x[8] = -1e6;
        let clamped: Vec<f32> = x.iter().map(|x| round(DType::F16, *x)).collect();
        let expected = project(&ReferenceBackend::new(), &weight, Precision::Exact, None, &clamped);
        assert_eq!(project(&cuda(), &half, Precision::Fast, None, &x), expected, "{rows} rows");
    }
}

#[test]
fn many_rows_are_scaled_and_added_to_the_residual() {
    let mut rng = Rng::new(2);
    for dtype in DTYPES {
        let (weight, bias, rows) = (view(&mut rng, dtype, 64, COLS), rng.floats(64), many(dtype) + 7);
        let (x, residual) = (rng.floats(rows * COLS), rng.floats(rows * 64));
        let run = |backend: &dyn Backend, weight: &WeightView, precision, x: &[f32]| {
            let (linear, x) = (linear(backend, weight, precision, Some(&bias)), tensor(backend, x, COLS));
            let mut residual = tensor(backend, &residual, 64);
            let args = ResidualArgs { x: &x, linear: &linear, post_norm: None, scale: 0.3, residual: &mut residual };
            backend.linear_residual(args, &StepMetadata::default());
            fetched(backend, residual)
        };
        let seen: Vec<f32> = x.iter().map(|x| round(dtype, *x)).collect();
        let expected = run(&ReferenceBackend::new(), &rounded(&weight), Precision::Exact, &seen);
        assert_close(&run(&cuda(), &weight, Precision::Fast, &x), &expected, [1e-4, 1e-5], &format!("{dtype}"));
    }
}

#[test]
fn a_weight_larger_than_a_slice_is_multiplied_whole() {
    let (mut rng, cols, features) = (Rng::new(3), 256, 2048 + 65);
    let weight = view(&mut rng, Q8_0, features, cols);
    let x = rng.floats(many(Q8_0) * cols);
    let options = CudaOptions { slice_bytes: 2048 * cols * 2, ..CudaOptions::default() };
    let backend = CudaBackend::with(driver(Order::Ascending), options).unwrap();
    let actual = project(&backend, &weight, Precision::Fast, None, &x);
    let rounded = rounded(&weight);
    for feature in [0, 1, 2047, 2048, 2049, features - 1] {
        let w = rounded.row(feature).chunks_exact(4).map(|w| f32::from_le_bytes(w.try_into().unwrap()));
        let w: Vec<f32> = w.collect();
        for (row, x) in x.chunks_exact(cols).enumerate() {
            let sum: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(round(Q8_0, *x)) * f64::from(*w)).sum();
            assert_close(&[actual[row * features + feature]], &[sum as f32], [2e-2, 1e-4], &format!("row {row}, {feature}"));
        }
    }
}

#[test]
fn tiles_of_rows_give_the_same_bits_in_every_batch() {
    let mut rng = Rng::new(7);
    // Several pieces share each tile of features.
    let (cols, features) = (2560, 130);
    let (weight, bias) = (view(&mut rng, Q4_0, features, cols), rng.floats(features));
    let x = rng.floats(256 * cols);
    let together = project(&cuda(), &weight, Precision::Fast, Some(&bias), &x);
    for (first, rows) in [(0, 33), (60, 64), (100, 65)] {
        let fewer = project(&cuda(), &weight, Precision::Fast, Some(&bias), &x[first * cols..][..rows * cols]);
        assert_eq!(fewer, together[first * features..][..rows * features], "{rows} rows from {first} on");
    }
}

#[test]
fn exact_and_deterministic_rows_have_the_same_bits_alone_and_beside_many() {
    let mut rng = Rng::new(4);
    for (dtype, precision) in DTYPES.into_iter().flat_map(|d| [Precision::Exact, Precision::Deterministic].map(|p| (d, p))) {
        let weight = view(&mut rng, dtype, 50, COLS);
        let x = rng.floats(40 * COLS);
        let together = project(&cuda(), &weight, precision, None, &x);
        for (x, together) in x.chunks_exact(COLS).zip(together.chunks_exact(50)) {
            assert_eq!(project(&cuda(), &weight, precision, None, x), together, "{dtype} {precision:?}");
        }
    }
}

#[test]
fn rows_of_16_bit_weights_have_the_same_bits_in_every_small_batch() {
    let mut rng = Rng::new(6);
    for dtype in [DType::F16, DType::BF16] {
        // Several pieces share each panel.
        let (cols, features) = (2056, 130);
        let (weight, bias) = (view(&mut rng, dtype, features, cols), rng.floats(features));
        let x = rng.floats(32 * cols);
        let together = project(&cuda(), &weight, Precision::Fast, Some(&bias), &x);
        for (first, rows) in [(0, 2), (7, 8), (20, 9), (3, 17)] {
            let fewer = project(&cuda(), &weight, Precision::Fast, Some(&bias), &x[first * cols..][..rows * cols]);
            assert_eq!(fewer, together[first * features..][..rows * features], "{dtype}: {rows} rows from {first} on");
        }
    }
}
