//! Speed of linear layers by number of rows, with and without AMX, in TFLOP/s; packing of the activations included.
//!
//! `cargo run --release -p mistral-paged-device --example bench_amx [-- THREADS [TYPE]]`: the ISAs amx and avx512 in turn,
//! medians of 7 samples of about 10 ms each.

use std::time::Instant;

use device::{
    DType, GgmlType, Linear, LinearOptions, Precision, Projection, Tensor, WeightView,
    cpu::{
        Isa, ThreadPool,
        linear::{CpuLinear, LinearContext, LinearScratch, norm_linear},
    },
    mmap::Bytes,
};

const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 512, 1400];
const SAMPLES: usize = 7;
const SAMPLE_SECONDS: f64 = 0.01;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |a| a.parse())?;
    let only = args.next();
    let best = Isa::detect();
    if best != Isa::Amx {
        return Err(format!("this machine has no AMX; its best ISA is {}", best.name()).into());
    }
    let pool = ThreadPool::new(threads).expect("a thread pool");
    println!("TFLOP/s, {threads} threads\n{:<26}{}", "", ROWS.map(|m| format!("{:>7}", format!("M={m}"))).concat());
    let formats = [GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q4K, GgmlType::Q6K].map(DType::Ggml);
    for dtype in
        [DType::BF16, DType::F16].into_iter().chain(formats).filter(|d| only.as_ref().is_none_or(|o| *o == d.to_string()))
    {
        for (k, n) in [(576, 1536), (1536, 576), (2048, 8192)] {
            let Some(row_bytes) = dtype.row_bytes(k) else { continue };
            let weight = WeightView::new(dtype, n, k, Bytes::from_vec(vec![0x31; n * row_bytes]))?;
            for isa in [Isa::Avx512, Isa::Amx] {
                let rates = bench(LinearContext { pool: &pool, isa, adapters: &[] }, &weight)?;
                println!("{:<26}{}", format!("{dtype} {k} x {n} {}", isa.name()), rates.map(|r| format!("{r:>7.2}")).concat());
            }
        }
    }
    Ok(())
}

fn bench(context: LinearContext<'_>, weight: &WeightView) -> Result<[f64; ROWS.len()], device::DeviceError> {
    let options = LinearOptions { name: "w".to_owned(), precision: Precision::Fast, bias: None };
    let linear: Linear = CpuLinear::new(weight, &options, context.isa, context.pool)?.into();
    let (k, n) = (weight.cols, weight.rows);
    let most = ROWS[ROWS.len() - 1];
    let (mut x, mut out) = (Tensor::new(most, k)?, Tensor::new(most, n)?);
    let mut scratch = LinearScratch::default();
    Ok(ROWS.map(|m| {
        x.set_rows(m);
        x.as_mut_slice().iter_mut().enumerate().for_each(|(i, v)| *v = (i % 17) as f32 - 8.0);
        let mut once = || {
            let start = Instant::now();
            norm_linear(context, &mut scratch, &x, None, &mut [Projection { linear: &linear, out: &mut out }]);
            start.elapsed().as_secs_f64()
        };
        once();
        let repeats = (SAMPLE_SECONDS / once()).ceil().clamp(1.0, 1000.0) as usize;
        let mut times: Vec<f64> = (0..SAMPLES).map(|_| (0..repeats).map(|_| once()).sum::<f64>() / repeats as f64).collect();
        times.sort_by(f64::total_cmp);
        2.0 * (m * n * k) as f64 / times[SAMPLES / 2] / 1e12
    }))
}
