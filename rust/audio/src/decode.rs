//! From bytes to samples of one channel.

use std::{
    any::Any,
    fmt::Display,
    io::{Cursor, ErrorKind},
    panic::{AssertUnwindSafe, catch_unwind},
};

use symphonia::core::{
    codecs::audio::AudioDecoderOptions,
    common::Limit,
    errors::Error,
    formats::{FormatOptions, FormatReader, TrackType, probe::Hint},
    io::{MediaSourceStream, MediaSourceStreamOptions},
    meta::MetadataOptions,
};

use crate::{Sound, SoundError};

/// What a sound may take. It is checked while samples are decoded, which take four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the file.
    pub max_bytes: usize,
    /// Of the sound.
    pub max_seconds: u32,
    /// Of the sound, of one channel.
    pub max_samples: usize,
}

impl Default for Limits {
    /// 64 MiB, 40 minutes, and as many samples as those have at 48,000 a second.
    fn default() -> Self {
        Self { max_bytes: 64 << 20, max_seconds: 40 * 60, max_samples: 40 * 60 * 48_000 }
    }
}

/// The samples of a WAV, FLAC, MP3 or Ogg Vorbis file; several channels become their mean.
///
/// A file that ends too early has the samples up to there.
///
/// # Errors
/// For files over the limits, of other formats, or broken.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Sound, SoundError> {
    let Limits { max_bytes, .. } = *limits;
    if bytes.len() > max_bytes {
        return Err(SoundError::TooManyBytes { bytes: bytes.len(), max_bytes });
    }
    let Some((format, ending)) = format(bytes) else {
        return Err(SoundError::UnknownFormat { begin: bytes[..bytes.len().min(8)].to_vec() });
    };
    // With checks of overflows, some sizes in the header of a WAV make its reader panic.
    catch_unwind(AssertUnwindSafe(|| samples(bytes, (format, ending), limits)))
        .unwrap_or_else(|panic| Err(malformed(format, panic_text(panic.as_ref()))))
}

/// The format's name, and how names of its files end.
fn format(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(("WAV", "wav")),
        [b'f', b'L', b'a', b'C', ..] => Some(("FLAC", "flac")),
        [b'O', b'g', b'g', b'S', ..] => Some(("Ogg", "ogg")),
        // A tag, or eleven bits that are set before a layer that is none of the others.
        [b'I', b'D', b'3', ..] => Some(("MP3", "mp3")),
        [0xff, second, ..] if second & 0xe6 == 0xe2 => Some(("MP3", "mp3")),
        _ => None,
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the decoder failed")
}

#[allow(clippy::needless_pass_by_value, reason = "errors are made to be given away")]
fn malformed(format: &'static str, reason: impl Display) -> SoundError {
    SoundError::Malformed { format, reason: reason.to_string() }
}

fn samples(bytes: &[u8], (format, ending): (&'static str, &str), limits: &Limits) -> Result<Sound, SoundError> {
    let failed = |error: Error| malformed(format, error);
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes.to_vec())), MediaSourceStreamOptions::default());
    // Tags and pictures are of no use here.
    let metadata =
        MetadataOptions::default().limit_tag_bytes(Limit::Maximum(1 << 20)).limit_visual_bytes(Limit::Maximum(1 << 20));
    let mut hint = Hint::new();
    hint.with_extension(ending);
    let mut reader = symphonia::default::get_probe().probe(&hint, stream, FormatOptions::default(), metadata).map_err(failed)?;
    let track = reader.default_track(TrackType::Audio).ok_or_else(|| malformed(format, "it has no sound"))?;
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or_else(|| malformed(format, "what it holds is not known"))?;
    let id = track.id;
    let decoders = symphonia::default::get_codecs();
    let mut decoder = decoders.make_audio_decoder(parameters, &AudioDecoderOptions::default()).map_err(failed)?;
    let (mut rate, mut samples, mut interleaved) = (None, Vec::new(), Vec::<f32>::new());
    while let Some(packet) = next_packet(&mut *reader).map_err(failed)? {
        if packet.track_id != id {
            continue;
        }
        let decoded = match decoder.decode(&packet) {
            Ok(decoded) => decoded,
            // The file is cut.
            Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(failed(error)),
        };
        let (own, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if *rate.get_or_insert(own) != own || channels == 0 {
            return Err(malformed(format, "its rate or its channels change"));
        }
        if !crate::RATES.contains(&own) {
            return Err(SoundError::Rate { rate: own });
        }
        if samples.len() + decoded.frames() > (limits.max_seconds as usize).saturating_mul(own as usize) {
            return Err(SoundError::TooLong { max_seconds: limits.max_seconds });
        }
        if samples.len() + decoded.frames() > limits.max_samples {
            return Err(SoundError::TooManySamples { max_samples: limits.max_samples });
        }
        decoded.copy_to_vec_interleaved(&mut interleaved);
        let mean = |frame: &[f32]| frame.iter().sum::<f32>() / channels as f32;
        samples.extend(interleaved.chunks_exact(channels).map(mean));
    }
    Sound::new(rate.unwrap_or(*crate::RATES.end()), samples)
}

/// The next packet; `None` at the end, or where the file is cut.
fn next_packet(reader: &mut dyn FormatReader) -> Result<Option<symphonia::core::packet::Packet>, Error> {
    match reader.next_packet() {
        Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(Error::ResetRequired) => Err(Error::Unsupported("a second stream follows the first")),
        other => other,
    }
}
