//! Tells the crate where the compiled kernels are, if `kernels/compiler.py` has left any.

use std::path::Path;

fn main() {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/built");
    // The folder, which is always there: a file that is not would make every build a new one.
    println!("cargo::rerun-if-changed={}", built.display());
    let embedded = built.join("embedded.rs");
    if embedded.is_file() {
        println!("cargo::rustc-env=EMBEDDED_KERNELS={}", embedded.display());
    } else {
        println!("cargo::rustc-env=EMBEDDED_KERNELS={}/src/cuda/no_kernels.rs", env!("CARGO_MANIFEST_DIR"));
    }
}
