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

/// Values of all codebooks of an Ogg Vorbis file at most, which take four bytes each and more; encoders write a tenth of it.
const MAX_CODEBOOK_VALUES: u64 = 1 << 20;

/// The samples of a WAV, FLAC, MP3 or Ogg Vorbis file; several channels become their mean.
///
/// A file that ends too early has the samples up to there. What is broken is left out, unless it is more than half of the file.
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
    if format == "Ogg" && parameters.extra_data.as_deref().is_some_and(|header| num_codebook_values(header) > MAX_CODEBOOK_VALUES)
    {
        return Err(malformed(format, format!("its codebooks have more than {MAX_CODEBOOK_VALUES} values")));
    }
    let id = track.id;
    let decoders = symphonia::default::get_codecs();
    let mut decoder = decoders.make_audio_decoder(parameters, &AudioDecoderOptions::default()).map_err(failed)?;
    let (mut rate, mut samples, mut interleaved) = (None, Vec::new(), Vec::<f32>::new());
    let (mut num_packets, mut num_broken, mut broken) = (0_usize, 0, None);
    while let Some(packet) = next_packet(&mut *reader).map_err(failed)? {
        if packet.track_id != id {
            continue;
        }
        num_packets += 1;
        let decoded = match decoder.decode(&packet) {
            Ok(decoded) => decoded,
            // Files that are cut out of others begin so, and what follows is whole.
            Err(Error::DecodeError(why)) => {
                num_broken += 1;
                broken.get_or_insert(why);
                continue;
            }
            // The file is cut.
            Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(failed(error)),
        };
        let (own, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if *rate.get_or_insert(own) != own || channels == 0 {
            return Err(malformed(format, "its rate changes, or it has no channels"));
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
    if let Some(why) = broken.filter(|_| num_broken > num_packets / 2) {
        return Err(malformed(format, why));
    }
    Sound::new(rate.unwrap_or(*crate::RATES.end()), samples)
}

/// How many values the codebooks of a Vorbis header have that a decoder would make memory for, or more. Of each that the decoder
/// takes there is a mark, behind which come its dimensions and entries (Vorbis I, 3.2.1); what stands before one may be read only
/// by a whole decoder, so marks are looked for at each bit.
fn num_codebook_values(header: &[u8]) -> u64 {
    let (mut window, mut sum) = (0_u64, 0);
    for at in 0..header.len() * 8 {
        window = window >> 1 | u64::from(header[at / 8] >> (at % 8) & 1) << 63;
        let (mark, dimensions, entries) = (window & 0xff_ffff, window >> 24 & 0xffff, window >> 40);
        // Beyond these the decoder refuses it.
        if mark == 0x56_4342 && dimensions <= 32 && entries <= 1 << 17 {
            sum += dimensions * entries;
        }
    }
    sum
}

/// The next packet; `None` at the end, or where the file is cut.
fn next_packet(reader: &mut dyn FormatReader) -> Result<Option<symphonia::core::packet::Packet>, Error> {
    match reader.next_packet() {
        Err(Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(Error::ResetRequired) => Err(Error::Unsupported("a second stream follows the first")),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codebooks_of_a_header_are_counted_wherever_they_begin() {
        let mut header = vec![0_u8; 40];
        let mut write = |first: usize, value: u64| {
            (0..64).filter(|bit| value >> bit & 1 == 1).for_each(|bit| header[(first + bit) / 8] |= 1 << ((first + bit) % 8));
        };
        write(13, 0x56_4342 | 8 << 24 | 1000 << 40);
        write(100, 0x56_4342 | 2 << 24 | 100 << 40);
        write(200, 0x56_4342 | 33 << 24 | 100 << 40);
        assert_eq!(num_codebook_values(&header), 8200);
        assert_eq!(num_codebook_values(&header[..5]), 0);
    }
}
