//! Speed of linear layers, alone and as the phases of a small model: `cargo run --release -p mistral-paged-device --example
//! bench_linear [-- THREADS [ISA]]`.
//!
//! For one row, GB/s of weights read, counted as the file has them; for more rows, GFLOP/s.
//! Medians over calls. Weights are many copies of a shape, so that they do not stay in the caches near a core.

use std::time::Instant;

use device::{
    Activation, DType, GateUpArgs, GgmlType, Linear, LinearOptions, Norm, NormKind, Precision, Projection, ResidualArgs, Tensor,
    WeightView,
    cpu::{
        Isa, ThreadPool,
        linear::{CpuLinear, LinearContext, LinearScratch, gate_up, linear_residual, norm_linear},
    },
    mmap::Bytes,
};

/// Bytes of weights of a run, as in a file.
const TOTAL: usize = 96 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |s| s.parse())?;
    let isa = args.next().map_or(Ok(Isa::detect()), |s| Isa::parse(&s))?;
    let pool = ThreadPool::new(threads).expect("a thread pool");
    println!("{threads} threads, {}", isa.name());
    println!("{:>6} {:>12} {:>9} {:>9} {:>9} {:>9} {:>9}", "type", "shape", "GB/s", "M=1", "M=8", "M=64", "M=512");
    let formats = [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q5_0, GgmlType::Q8_0, GgmlType::Q4K, GgmlType::Q5K, GgmlType::Q6K]
        .map(DType::Ggml);
    for dtype in formats.into_iter().chain([DType::BF16, DType::F16, DType::F32]) {
        for (n, k) in [(576, 1536), (1536, 576), (2048, 8192)] {
            if dtype.row_bytes(k).is_some() {
                bench(dtype, (n, k), LinearContext { pool: &pool, isa, adapters: &[] })?;
            }
        }
    }
    model(LinearContext { pool: &pool, isa, adapters: &[] })
}

fn bench(dtype: DType, (n, k): (usize, usize), context: LinearContext<'_>) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = n * dtype.row_bytes(k).ok_or("columns are not whole blocks")?;
    let copies = TOTAL.div_ceil(bytes);
    let linears: Vec<Linear> = (0..copies)
        .map(|_| {
            let view = WeightView::new(dtype, n, k, Bytes::from_vec(vec![0x31; bytes]))?;
            let options = LinearOptions { name: "w".to_owned(), precision: Precision::Fast, bias: None };
            CpuLinear::new(&view, &options, context.isa, context.pool).map(Linear::from)
        })
        .collect::<Result<_, _>>()?;
    let mut scratch = LinearScratch::default();
    let mut run = |m: usize, linears: &[Linear]| -> Result<f64, device::DeviceError> {
        let (mut x, mut out) = (Tensor::new(m, k)?, Tensor::new(m, n)?);
        x.set_rows(m);
        x.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = (i % 17) as f32 - 8.0);
        let mut times = Vec::new();
        for _ in 0..3 {
            for linear in linears {
                let start = Instant::now();
                norm_linear(context, &mut scratch, &x, None, &mut [Projection { linear, out: &mut out }]);
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    let flops = |m: usize, seconds: f64| 2.0 * (m * n * k) as f64 / seconds / 1e9;
    let one = run(1, &linears)?;
    let (eight, some) = (run(8, &linears)?, run(64, &linears[..copies.div_ceil(4)])?);
    let many = run(512, &linears[..copies.div_ceil(16)])?;
    println!(
        "{:>6} {:>12} {:>9.1} {:>9.0} {:>9.0} {:>9.0} {:>9.0}",
        dtype.to_string(),
        format!("{n}x{k}"),
        bytes as f64 / one / 1e9,
        flops(1, one),
        flops(8, eight),
        flops(64, some),
        flops(512, many)
    );
    Ok(())
}

fn add<'a>(x: &'a Tensor, linear: &'a Linear, residual: &'a mut Tensor) -> ResidualArgs<'a> {
    ResidualArgs { x, linear, post_norm: None, scale: 1.0, residual }
}

/// The phases with weights of a model of 135 million parameters in `Q4_1` (30 layers, hidden size 576), without its attention.
fn model(context: LinearContext<'_>) -> Result<(), Box<dyn std::error::Error>> {
    let load = |n: usize, k: usize| -> Result<Linear, device::DeviceError> {
        let dtype = DType::Ggml(GgmlType::Q4_1);
        let view = WeightView::new(dtype, n, k, Bytes::from_vec(vec![0x31; n * k / 32 * 20]))?;
        let options = LinearOptions { name: "w".to_owned(), precision: Precision::Fast, bias: None };
        CpuLinear::new(&view, &options, context.isa, context.pool).map(Linear::from)
    };
    let layers = (0..30)
        .map(|_| {
            Ok([
                load(576, 576)?,
                load(192, 576)?,
                load(192, 576)?,
                load(576, 576)?,
                load(1536, 576)?,
                load(1536, 576)?,
                load(576, 1536)?,
            ])
        })
        .collect::<Result<Vec<_>, device::DeviceError>>()?;
    let head = load(49_152, 576)?;
    let norm = Norm { kind: NormKind::Rms, weight: vec![1.0; 576].into(), bias: None, eps: 1e-5 };
    let mut scratch = LinearScratch::default();
    for m in [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 512] {
        let mut residual = Tensor::new(m, 576)?;
        residual.set_rows(m);
        let [mut query, mut key, mut value] = [Tensor::new(m, 576)?, Tensor::new(m, 192)?, Tensor::new(m, 192)?];
        let (mut wide, mut logits) = (Tensor::new(m, 1536)?, Tensor::new(m, 49_152)?);
        let mut times = Vec::new();
        for _ in 0..if m < 16 { 60 } else { 15 } {
            residual.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = (i % 17) as f32 - 8.0);
            let start = Instant::now();
            for [q, k, v, o, gate, up, down] in &layers {
                norm_linear(
                    context,
                    &mut scratch,
                    &residual,
                    Some(&norm),
                    &mut [
                        Projection { linear: q, out: &mut query },
                        Projection { linear: k, out: &mut key },
                        Projection { linear: v, out: &mut value },
                    ],
                );
                linear_residual(context, &mut scratch, add(&query, o, &mut residual));
                let (x, norm, activation) = (&residual, Some(&norm), Activation::Silu);
                gate_up(
                    context,
                    &mut scratch,
                    GateUpArgs { x, norm, gate: Some(gate), up, activation, out: &mut wide, next: None },
                );
                linear_residual(context, &mut scratch, add(&wide, down, &mut residual));
            }
            // A prompt's rows do not all need logits.
            if m <= 64 {
                norm_linear(context, &mut scratch, &residual, Some(&norm), &mut [Projection { linear: &head, out: &mut logits }]);
            }
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let rate = |t: f64| m as f64 / t;
        println!("135M Q4_1, {m} rows: {:.0} tokens/s at best, {:.0} median", rate(times[0]), rate(times[times.len() / 2]));
    }
    Ok(())
}
