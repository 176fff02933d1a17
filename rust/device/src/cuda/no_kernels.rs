EmbeddedKernels {
    note: "none were compiled when this was built: kernels/compiler.py was not run",
    modules: &[],
    targets: &[],
}
