//! What files say of sounds that are of images as well.

/// Keys of sounds, in a file that is of both processors of a model: Gemma 3n's.
pub(crate) const OF_SOUNDS: [&str; 21] = [
    "audio_seq_length",
    "dither",
    "feature_size",
    "fft_length",
    "fft_overdrive",
    "frame_length",
    "frame_length_ms",
    "hop_length",
    "hop_length_ms",
    "input_scale_factor",
    "max_frequency",
    "mel_floor",
    "min_frequency",
    "padding_side",
    "padding_value",
    "per_bin_mean",
    "per_bin_stddev",
    "preemphasis",
    "preemphasis_htk_flavor",
    "return_attention_mask",
    "sampling_rate",
];
