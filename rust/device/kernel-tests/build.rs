//! Compiles the sources in `kernels/` with the C++ compiler, over the emulation of CUDA beside them.

use std::{error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).debug(false).include(&kernels).file(kernels.join("emulation/emulation.cpp"));
    // Fibers have stacks of their own, which fortified functions may take for a fault. Misaligned accesses and indices out of
    // bounds trap.
    for flag in ["-U_FORTIFY_SOURCE", "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error", "-ffp-contract=off"] {
        build.flag(flag);
    }
    build.flag("-Wno-unknown-pragmas").flag("-x").flag("c++").warnings_into_errors(true);
    for entry in fs::read_dir(&kernels)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            build.file(path);
        }
    }
    // Kernels register themselves: nothing names their object files.
    build.link_lib_modifier("+whole-archive").compile("emulated_kernels");
    Ok(())
}
