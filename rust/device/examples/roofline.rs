//! The read bandwidth of this machine, and the rate of products by tiles where it has AMX, a JSON line a buffer:
//! `cargo run --release -p mistral-paged-device --example roofline [-- THREADS [BYTES ...]]`.
//!
//! The first buffer is one that no cache holds; the others have the sizes given, such as that of a model's weights. Without
//! THREADS, or with 0, one a physical core.

use device::cpu::{
    Isa, ThreadPool,
    roofline::{beyond_caches, read_bandwidth, tile_flops},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = std::env::args().skip(1).map(|text| {
        text.parse::<usize>().map_err(|_| format!("`{text}` is not a number; usage: roofline [THREADS [BYTES ...]]"))
    });
    let mut arguments = arguments.collect::<Result<Vec<_>, _>>()?.into_iter();
    let threads = arguments.next().filter(|threads| *threads > 0).unwrap_or_else(device::num_physical_cores);
    let (pool, isa) = (ThreadPool::new(threads)?, Isa::detect());
    let tiles = tile_flops(&pool).map_or("null".to_owned(), |flops| format!("{:.3}", flops / 1e12));
    for bytes in std::iter::once(beyond_caches()).chain(arguments) {
        let measured = read_bandwidth(&pool, isa, bytes)?;
        println!(
            r#"{{"gb_per_s": {:.2}, "best_gb_per_s": {:.2}, "tile_tflop_per_s": {tiles}, "threads": {}, "buffer_bytes": {bytes}, "tier": "{}"}}"#,
            measured.median / 1e9,
            measured.best / 1e9,
            pool.num_threads(),
            isa.name()
        );
    }
    Ok(())
}
