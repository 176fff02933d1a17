//! The compiled kernels, as data: `kernels/compiler.py` writes the expression below, and a build without nvcc embeds none.

/// All kernels of this build.
#[derive(Debug)]
pub struct EmbeddedKernels {
    /// By what they were compiled, or why there are none.
    pub note: &'static str,
    /// One a file of kernels/.
    pub modules: &'static [Module],
    /// Machine code, such as "sm_90", and PTX, such as "compute_80", in every module; empty without modules.
    pub targets: &'static [&'static str],
}

/// A fatbin: machine code for every target, and PTX.
pub struct Module {
    /// Its file's name without the suffix.
    pub name: &'static str,
    /// What the driver loads.
    pub image: &'static [u8],
    /// Names of its kernels.
    pub kernels: &'static [&'static str],
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, image, kernels } = self;
        write!(f, "Module {{ name: {name:?}, image: {} bytes, kernels: {kernels:?} }}", image.len())
    }
}

/// 64 bytes at a multiple of 64, as the headers in a fatbin are for the driver to read.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line([u8; 64]);

impl Module {
    /// The image at a multiple of 64, with zeros behind it. What the compiler embeds may begin anywhere, and takes it minutes to
    /// align.
    pub fn aligned(&self) -> Vec<Line> {
        let line = |bytes: &[u8]| {
            let mut line = Line([0; 64]);
            line.0[..bytes.len()].copy_from_slice(bytes);
            line
        };
        self.image.chunks(64).map(line).collect()
    }
}

/// What this build has.
pub static EMBEDDED: EmbeddedKernels = include!(env!("EMBEDDED_KERNELS"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_aligned_and_whole_wherever_it_was_embedded() {
        static BYTES: [u8; 200] = [7; 200];
        for image in [&BYTES[1..], &BYTES[3..131], &BYTES[5..6]] {
            let lines = Module { name: "odd", image, kernels: &[] }.aligned();
            assert!(lines.as_ptr().addr().is_multiple_of(64));
            let bytes: Vec<u8> = lines.iter().flat_map(|line| line.0).collect();
            assert_eq!((&bytes[..image.len()], bytes.len()), (image, image.len().next_multiple_of(64)));
        }
    }
}
