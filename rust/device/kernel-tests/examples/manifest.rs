//! Prints `kernels/manifest.txt` as the sources define it.

fn main() {
    print!("{}", kernel_tests::manifest());
}
