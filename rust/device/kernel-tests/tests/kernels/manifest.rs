//! The border to the host: what `kernels/manifest.txt` and `device::kernel_args` say is what the sources define.

use device::kernel_args as args;
use kernel_tests::{Kernel, manifest};

#[test]
fn the_manifest_lists_what_the_sources_define() {
    let (listed, defined) = (include_str!("../../../../../kernels/manifest.txt"), manifest());
    let only_in =
        |one: &str, other: &str| one.lines().filter(|line| !other.lines().any(|l| l == *line)).collect::<Vec<_>>().join("\n");
    assert!(
        listed == defined,
        "listed and not defined:\n{}\ndefined and not listed:\n{}\n\
         write it anew: cargo run -p mistral-paged-kernel-tests --example manifest > kernels/manifest.txt",
        only_in(listed, &defined),
        only_in(&defined, listed)
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
        LatentAttentionArgs,
        LatentCacheArgs,
        LoraArgs,
        LoraEmbedArgs,
        NormArgs,
        GatedActivationArgs,
        GatherRowsArgs,
        ScaleAndClampArgs,
        LayerInputsArgs,
        StreamsArgs,
        StreamRowsArgs,
        RoundValuesArgs,
        FillBiasArgs,
        EmbedArgs,
        DequantizeArgs,
        GemvArgs,
        GroupedArgs,
        RouteArgs,
        AddExpertsArgs,
        GemmArgs,
        PackedDequantizeArgs,
        PackedEmbedArgs,
        SampleArgs,
        TopLogprobsArgs,
        CausalConvArgs,
        GatedDeltaArgs,
        GatedNormArgs,
        Mamba2Args,
        MambaArgs,
        AttentionGateArgs
    ];
    for kernel in Kernel::all() {
        let size = mirrored.iter().find(|(name, _)| *name == kernel.args_name()).map(|(_, size)| *size);
        assert_eq!(size, Some(kernel.args_bytes()), "{} of {}", kernel.args_name(), kernel.name());
    }
}
