//! Speed of the AMX matrix products: TFLOP/s by number of rows and shape, packing of the activations included. Medians.
//!
//! `cargo run --release -p mistral-paged-device --example bench_amx [threads]`

#[cfg(target_arch = "x86_64")]
mod bench {
    use std::time::Instant;

    use device::{
        DType, WeightView,
        cpu::{
            ThreadPool,
            amx::{ActTiles, Amx, FloatPanels, PanelSource, Workspace, multiply_into},
        },
        mmap::Bytes,
    };

    struct Setup {
        amx: Amx,
        pool: ThreadPool,
        workspace: Workspace,
        acts: ActTiles,
    }

    fn tflops(s: &mut Setup, (m, n, k): (usize, usize, usize), source: &dyn PanelSource, (x, out): (&[f32], &mut [f32])) -> f64 {
        let flops = 2.0 * (m * n * k) as f64;
        // About 20 ms a sample.
        let repeats = (2e10 / flops).ceil() as usize;
        let mut times: Vec<f64> = (0..9)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..repeats {
                    s.acts
                        .pack(s.amx, &s.pool, (m, k), &|i, row| row.copy_from_slice(&x[i * k..(i + 1) * k]))
                        .expect("memory for the activations");
                    multiply_into(s.amx, &s.pool, &s.workspace, &s.acts, (source, n), (out, n));
                }
                start.elapsed().as_secs_f64() / repeats as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        flops / times[times.len() / 2] / 1e12
    }

    pub fn run() -> Result<(), Box<dyn std::error::Error>> {
        let Some(amx) = Amx::detect() else { return Err("this machine has no AMX".into()) };
        let threads = std::env::args().nth(1).map_or(Ok(2), |a| a.parse())?;
        let mut setup =
            Setup { amx, pool: ThreadPool::new(threads), workspace: Workspace::new(threads)?, acts: ActTiles::new()? };
        let rows = [1usize, 8, 16, 32, 64, 128, 256, 512, 1400];
        println!("TFLOP/s, {threads} threads\n{:<22}{}", "K x N", rows.map(|m| format!("{:>7}", format!("M={m}"))).concat());
        for (k, n) in [(576, 1536), (1536, 576), (2048, 8192), (8192, 2048)] {
            let bytes = (0..n * k).flat_map(|i| (0x3c00u16 + (i * 37 % 512) as u16).to_le_bytes()).collect();
            let weight = WeightView::new(DType::BF16, n, k, Bytes::from_vec(bytes))?;
            let source = FloatPanels::new(amx, &weight).ok_or("bf16 is a float type")?;
            let x = vec![0.5f32; rows[rows.len() - 1] * k];
            let mut out = vec![0.0f32; rows[rows.len() - 1] * n];
            print!("{:<22}", format!("{k} x {n} bf16"));
            for m in rows {
                print!("{:>7.2}", tflops(&mut setup, (m, n, k), &source, (&x, &mut out)));
            }
            println!();
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(target_arch = "x86_64")]
    return bench::run();
    #[cfg(not(target_arch = "x86_64"))]
    Err("AMX is a part of x86-64".into())
}
