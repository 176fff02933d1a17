//! Speed of the quantizers of the K types on one thread: `cargo run --release -p mistral-paged-device --example bench_quantize`.
//!
//! 512 rows of 2048 columns near a bell; MB of bfloat16 a second of processor time, the best of seven runs.

use device::{
    GgmlType,
    cpu::{
        Isa,
        quantize::{quantize_rows, quantizes},
    },
};

const COLS: usize = 2048;

/// Seconds that the calling thread has computed (Linux).
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat");
    text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

fn main() {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let values: Vec<f32> = (0..512 * COLS).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 0.03).collect();
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::detect()) {
        for format in GgmlType::ALL.into_iter().filter(|format| quantizes(*format)) {
            let mut out = vec![0; values.len() / format.block_len() * format.block_bytes()];
            let seconds = (0..7).map(|_| {
                let began = processor_seconds();
                quantize_rows(isa, &values, COLS, format, None, &mut out);
                processor_seconds() - began
            });
            let best = seconds.fold(f64::INFINITY, f64::min);
            println!("{:6} {:4} {:5.0} MB/s", isa.name(), format.name(), 2e-6 * values.len() as f64 / best);
        }
    }
}
