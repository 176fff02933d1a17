//! Frames of an animated GIF, each laid over what those before it left.

use std::{num::NonZeroU64, time::Instant};

use ::gif::{ColorOutput, DecodeOptions, Decoder, DecodingError, DisposalMethod, MemoryLimit};
use images::RgbImage;

use crate::{Limits, VideoError};

/// Hundredths of a second that a frame is shown which does not say how long, or too short, as browsers do.
const USUAL_DELAY: u64 = 10;

/// What is known of a file that has not been decoded.
pub(crate) struct Looked {
    pub(crate) num_frames: usize,
    pub(crate) fps: f64,
    pub(crate) size: (usize, usize),
}

#[allow(clippy::needless_pass_by_value, reason = "errors are made to be given away")]
fn failed(error: DecodingError) -> VideoError {
    VideoError::Malformed { format: "GIF", reason: error.to_string() }
}

fn decoder<'a>(bytes: &'a [u8], limits: &Limits, is_skipping: bool) -> Result<Decoder<&'a [u8]>, VideoError> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::RGBA);
    options.skip_frame_decoding(is_skipping);
    let most = limits.max_pixels.saturating_mul(8).max(1 << 20);
    options.set_memory_limit(MemoryLimit::Bytes(NonZeroU64::new(most).unwrap_or(NonZeroU64::MIN)));
    let decoder = options.read_info(bytes).map_err(failed)?;
    let pixels = u64::from(decoder.width()) * u64::from(decoder.height());
    if pixels == 0 {
        return Err(VideoError::Empty);
    }
    if pixels > limits.max_pixels {
        return Err(VideoError::TooLarge { what: format!("frames of {pixels} pixels"), most: limits.max_pixels });
    }
    Ok(decoder)
}

/// Counts frames, and how long they are shown.
pub(crate) fn look(bytes: &[u8], limits: &Limits) -> Result<Looked, VideoError> {
    let mut decoder = decoder(bytes, limits, true)?;
    let size = (usize::from(decoder.height()), usize::from(decoder.width()));
    let (mut num_frames, mut hundredths, begun) = (0_usize, 0_u64, Instant::now());
    while let Some(frame) = decoder.next_frame_info().map_err(failed)? {
        hundredths += if frame.delay < 2 { USUAL_DELAY } else { u64::from(frame.delay) };
        num_frames += 1;
        check_time(begun, limits)?;
        if num_frames > limits.max_frames {
            return Err(VideoError::TooLarge { what: "more frames".into(), most: limits.max_frames as u64 });
        }
    }
    if num_frames == 0 {
        return Err(VideoError::Empty);
    }
    Ok(Looked { num_frames, fps: num_frames as f64 * 100.0 / hundredths as f64, size })
}

/// Small files may have many large frames, all of which are decoded up to the last that is taken.
fn check_time(begun: Instant, limits: &Limits) -> Result<(), VideoError> {
    if begun.elapsed() <= limits.max_time {
        return Ok(());
    }
    Err(VideoError::TooSlow { program: "the decoder of GIF files", seconds: limits.max_time.as_secs() })
}

/// The frames of these ascending numbers.
pub(crate) fn frames<E: From<VideoError>>(
    bytes: &[u8],
    numbers: &[usize],
    limits: &Limits,
    mut taker: impl FnMut(&RgbImage) -> Result<(), E>,
) -> Result<(), E> {
    let mut decoder = decoder(bytes, limits, false)?;
    let (width, height) = (usize::from(decoder.width()), usize::from(decoder.height()));
    let mut canvas = vec![0; width * height * 3];
    let (mut wanted, begun) = (numbers.iter().peekable(), Instant::now());
    for number in 0.. {
        let Some(&&next) = wanted.peek() else { return Ok(()) };
        check_time(begun, limits)?;
        let early = || VideoError::Malformed { format: "GIF", reason: format!("it ends before frame {next}") };
        let frame = decoder.read_next_frame().map_err(failed)?.ok_or_else(early)?;
        let before = (frame.dispose == DisposalMethod::Previous).then(|| canvas.clone());
        let (top, left, columns) = (usize::from(frame.top), usize::from(frame.left), usize::from(frame.width));
        // What lies beside the canvas is not seen.
        let rows = frame.buffer.chunks_exact((columns * 4).max(1)).enumerate().filter(|(y, _)| top + y < height);
        let mut cleared = Vec::new();
        for (y, row) in rows {
            let start = ((top + y) * width + left.min(width)) * 3;
            let len = columns.min(width.saturating_sub(left)) * 3;
            for (to, from) in canvas[start..start + len].chunks_exact_mut(3).zip(row.chunks_exact(4)) {
                if from[3] > 0 {
                    to.copy_from_slice(&from[..3]);
                }
            }
            cleared.push(start..start + len);
        }
        let dispose = frame.dispose;
        while wanted.next_if(|&&wanted| wanted == number).is_some() {
            let shown = RgbImage::new(width as u32, height as u32, canvas.clone());
            taker(&shown.map_err(|why| VideoError::Frame { number, reason: why.to_string() })?)?;
        }
        match (dispose, before) {
            (DisposalMethod::Background, _) => cleared.into_iter().for_each(|row| canvas[row].fill(0)),
            (DisposalMethod::Previous, Some(before)) => canvas = before,
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::gif::{Encoder, Frame};

    use super::*;

    const PALETTE: [u8; 12] = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120];

    /// Frames of one colour each: place, size, colour, what becomes of it, hundredths of a second.
    fn animation(frames: &[([u16; 4], u8, DisposalMethod, u16)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, 3, 2, &PALETTE).unwrap();
        for &([left, top, width, height], color, dispose, delay) in frames {
            let buffer = vec![color; usize::from(width * height)].into();
            encoder.write_frame(&Frame { left, top, width, height, delay, dispose, buffer, ..Frame::default() }).unwrap();
        }
        drop(encoder);
        bytes
    }

    fn all(bytes: &[u8], numbers: &[usize]) -> Result<Vec<Vec<u8>>, VideoError> {
        let mut seen = Vec::new();
        frames(bytes, numbers, &Limits::default(), |frame| {
            seen.push(frame.pixels().chunks_exact(3).map(|pixel| pixel[0]).collect());
            Ok::<_, VideoError>(())
        })?;
        Ok(seen)
    }

    #[test]
    fn decoding_ends_when_its_time_is_over() {
        let bytes = animation(&[([0, 0, 3, 2], 0, DisposalMethod::Keep, 20)]);
        let limits = Limits { max_time: Duration::ZERO, ..Limits::default() };
        assert!(matches!(look(&bytes, &limits), Err(VideoError::TooSlow { .. })));
    }

    #[test]
    fn videos_of_a_request_have_their_time_together() {
        let bytes = animation(&[([0, 0, 3, 2], 0, DisposalMethod::Keep, 20)]);
        let video = crate::Video::of_file(bytes, None, &Limits::default()).unwrap();
        let mut spent = Duration::ZERO;
        let decode = |spent: &mut Duration| video.frames(&[0], spent, |_| Ok::<_, VideoError>(()));
        decode(&mut spent).unwrap();
        assert!(spent > Duration::ZERO);
        spent = Limits::default().max_time;
        assert!(matches!(decode(&mut spent), Err(VideoError::TooSlow { .. })));
    }

    #[test]
    fn frames_lie_over_what_those_before_them_left() {
        let bytes = animation(&[
            ([0, 0, 3, 2], 0, DisposalMethod::Keep, 20),
            ([1, 0, 1, 1], 1, DisposalMethod::Previous, 20),
            ([2, 1, 1, 1], 2, DisposalMethod::Background, 20),
            ([0, 0, 1, 1], 3, DisposalMethod::Keep, 0),
        ]);
        let looked = look(&bytes, &Limits::default()).unwrap();
        assert_eq!((looked.num_frames, looked.size), (4, (2, 3)));
        assert!((looked.fps - 4.0 / 0.7).abs() < 1e-9, "{}", looked.fps);
        let expected = [[10; 6], [10, 40, 10, 10, 10, 10], [10, 10, 10, 10, 10, 70], [100, 10, 10, 10, 10, 0]];
        assert_eq!(all(&bytes, &[0, 1, 2, 3]).unwrap(), expected);
        assert_eq!(all(&bytes, &[1, 3]).unwrap(), [expected[1], expected[3]]);
        assert_eq!(all(&bytes, &[2, 2]).unwrap(), [expected[2], expected[2]]);
    }

    #[test]
    fn broken_files_are_errors() {
        let bytes = animation(&[([0, 0, 3, 2], 0, DisposalMethod::Keep, 20)]);
        let error = all(&bytes, &[1]).unwrap_err().to_string();
        assert!(error.contains("it ends before frame 1"), "{error}");
        let small = Limits { max_pixels: 5, ..Limits::default() };
        assert!(look(&bytes, &small).is_err());
        for len in 0..bytes.len() - 1 {
            // Whatever is cut off, there is an answer.
            let _ = look(&bytes[..len], &Limits::default());
            let _ = all(&bytes[..len], &[0]);
        }
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0xff;
            let _ = look(&other, &Limits::default());
            let _ = all(&other, &[0]);
        }
    }
}
