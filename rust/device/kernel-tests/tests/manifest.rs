//! The border to the host: what `kernels/manifest.txt` and `device::kernel_args` say is what the sources define.

use device::kernel_args as args;
use kernel_tests::{Kernel, manifest};

#[test]
fn the_manifest_lists_what_the_sources_define() {
    let listed = include_str!("../../../../kernels/manifest.txt");
    assert_eq!(
        listed,
        manifest(),
        "write it anew: cargo run -p mistral-paged-kernel-tests --example manifest > kernels/manifest.txt"
    );
}

#[test]
fn argument_structs_have_the_same_size_on_both_sides() {
    macro_rules! sizes {
        ($($name:ident),*) => { [$((stringify!($name), size_of::<args::$name>())),*] };
    }
    let mirrored = sizes![
        RopeAndCacheArgs,
        CopyBlocksArgs,
        AttentionArgs,
        AttentionMergeArgs,
        RmsNormArgs,
        GatedActivationArgs,
        GatherRowsArgs,
        EmbedArgs,
        DequantizeArgs,
        GemvArgs,
        SampleArgs,
        TopLogprobsArgs
    ];
    for kernel in Kernel::all() {
        let size = mirrored.iter().find(|(name, _)| *name == kernel.args_name()).map(|(_, size)| *size);
        assert_eq!(size, Some(kernel.args_bytes()), "{} of {}", kernel.args_name(), kernel.name());
    }
}
