//! From the bytes of a video to its frames.
//!
//! An animated GIF, and frames that are given singly, are decoded here. Files of other formats are decoded by the programs
//! `ffprobe` and `ffmpeg`, which are looked for on `PATH`: see [`programs`].
//!
//! A [`Video`] has been looked at and not decoded: how many frames it has is known, and [`Video::frames`] gives those that are
//! wanted one by one, so that nobody needs memory for all of them.
#![forbid(unsafe_code)]

mod container;
mod gif;
mod ppm;
mod programs;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use images::{ImageError, RgbImage};

pub use container::Container;

/// What a video may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the file, or of the files of all frames.
    pub max_bytes: usize,
    /// Width times height of a frame.
    pub max_pixels: u64,
    /// Frames of a file, those that are not taken included.
    pub max_frames: usize,
    /// Pixels of frames that are given singly, together.
    pub max_kept_pixels: u64,
    /// Time to look at the videos of a request together, and as much again to decode them.
    pub max_time: Duration,
}

impl Default for Limits {
    /// 64 MiB, 36 million pixels a frame, a million frames, 256 million pixels of frames given singly, 60 seconds.
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_pixels: 36_000_000,
            max_frames: 1_000_000,
            max_kept_pixels: 256_000_000,
            max_time: Duration::from_secs(60),
        }
    }
}

/// Why there is no video, or not all of its frames.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VideoError {
    /// It is over a limit.
    #[error("the video has {what}, more than the {most} that are allowed")]
    TooLarge {
        /// What there is too much of, with its number.
        what: String,
        /// What is allowed.
        most: u64,
    },
    /// The bytes are of no known format.
    #[error("the video is no MP4, QuickTime, Matroska, WebM, AVI, MPEG, Ogg, FLV, ASF or GIF file; it begins with {begin:02x?}")]
    UnknownFormat {
        /// The first bytes, at most eight.
        begin: Vec<u8>,
    },
    /// The programs that decode it are not there.
    #[error(
        "a video in {format} is decoded by the programs ffmpeg and ffprobe, and {program} is not on PATH: install ffmpeg, or give \
         an animated GIF, or frames singly"
    )]
    NoProgram {
        /// Of the file.
        format: &'static str,
        /// Which is missing.
        program: &'static str,
    },
    /// A program takes too long.
    #[error("{program} took longer than the {seconds} seconds that were left for the videos of the request")]
    TooSlow {
        /// Which.
        program: &'static str,
        /// What is allowed.
        seconds: u64,
    },
    /// The file breaks its format, or has no frames.
    #[error("the video in {format} cannot be decoded: {reason}")]
    Malformed {
        /// Of the file.
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// A number of frames a second that makes no sense.
    #[error("fps is {0}; it must be a number over 0 and not over 1000")]
    Fps(f64),
    /// There is no frame.
    #[error("the video has no frames")]
    Empty,
    /// A frame cannot be decoded, or frames have different sizes.
    #[error("frame {number} of the video: {reason}")]
    Frame {
        /// From 0.
        number: usize,
        /// Why not.
        reason: String,
    },
    /// The file cannot be laid down for the programs, or they cannot be talked to.
    #[error("{what}: {source}")]
    Io {
        /// What was done.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Where frames come from.
#[derive(Clone, PartialEq)]
enum Source {
    Frames(Arc<[RgbImage]>),
    Gif(Arc<[u8]>),
    File(Arc<[u8]>, Container),
}

/// A video, looked at and not decoded.
#[derive(Clone, PartialEq)]
pub struct Video {
    source: Source,
    num_frames: usize,
    fps: f64,
    size: (usize, usize),
    wanted_fps: Option<f64>,
    limits: Limits,
}

impl fmt::Debug for Video {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_frames, fps, size, wanted_fps, .. } = self;
        let mut shown = f.debug_struct("Video");
        shown.field("num_frames", num_frames).field("fps", fps).field("size", size).field("wanted_fps", wanted_fps).finish()
    }
}

/// A usable number of frames a second.
fn checked_fps(fps: f64) -> Result<f64, VideoError> {
    if fps > 0.0 && fps <= 1000.0 { Ok(fps) } else { Err(VideoError::Fps(fps)) }
}

/// How many frames ffprobe says that a file has, how many a second, and their height and width.
///
/// # Errors
/// For what makes no sense, or is over the limits.
#[doc(hidden)]
pub fn told_by_ffprobe(text: &str, limits: &Limits) -> Result<(usize, f64, (usize, usize)), VideoError> {
    programs::looked(text, "MP4", limits).map(|looked| (looked.num_frames, looked.fps, looked.size))
}

impl Video {
    /// Of a file's bytes. `wanted_fps`: how many frames a second are to be taken; the model's own number unless given.
    ///
    /// # Errors
    /// For files over the limits, of other formats, or broken; where a program that is needed is not there.
    pub fn of_file(bytes: Vec<u8>, wanted_fps: Option<f64>, limits: &Limits) -> Result<Self, VideoError> {
        let wanted_fps = wanted_fps.map(checked_fps).transpose()?;
        if bytes.len() > limits.max_bytes {
            return Err(VideoError::TooLarge { what: format!("{} bytes", bytes.len()), most: limits.max_bytes as u64 });
        }
        let limits = *limits;
        if bytes.starts_with(b"GIF8") {
            let gif::Looked { num_frames, fps, size } = gif::look(&bytes, &limits)?;
            return Ok(Self { source: Source::Gif(bytes.into()), num_frames, fps, size, wanted_fps, limits });
        }
        let unknown = || VideoError::UnknownFormat { begin: bytes[..bytes.len().min(8)].to_vec() };
        let container = Container::of(&bytes).ok_or_else(unknown)?;
        let programs::Looked { num_frames, fps, size } = programs::look(&bytes, container, &limits)?;
        Ok(Self { source: Source::File(bytes.into(), container), num_frames, fps, size, wanted_fps, limits })
    }

    /// Of frames, all of which are taken: `fps` of them a second, 2 unless given.
    ///
    /// # Errors
    /// For none, too many, or such of unequal size.
    pub fn of_frames(frames: Vec<RgbImage>, fps: Option<f64>, limits: &Limits) -> Result<Self, VideoError> {
        let fps = checked_fps(fps.unwrap_or(2.0))?;
        let first = frames.first().ok_or(VideoError::Empty)?.size();
        if let Some(number) = frames.iter().position(|frame| frame.size() != first) {
            let ((height, width), own) = (first, frames[number].size());
            let reason = format!("it has {} x {} pixels, and the first one {width} x {height}", own.1, own.0);
            return Err(VideoError::Frame { number, reason });
        }
        let pixels = (first.0 as u64 * first.1 as u64).saturating_mul(frames.len() as u64);
        if pixels > limits.max_kept_pixels {
            return Err(VideoError::TooLarge { what: format!("{pixels} pixels together"), most: limits.max_kept_pixels });
        }
        let num_frames = frames.len();
        Ok(Self { source: Source::Frames(frames.into()), num_frames, fps, size: first, wanted_fps: None, limits: *limits })
    }

    /// Of the files of images, as [`Self::of_frames`].
    ///
    /// # Errors
    /// As there, and for a file that is no image.
    pub fn of_image_files<B: AsRef<[u8]>>(files: &[B], fps: Option<f64>, limits: &Limits) -> Result<Self, VideoError> {
        let mut frames = Vec::with_capacity(files.len().min(1024));
        let mut left = limits.max_kept_pixels;
        for (number, file) in files.iter().enumerate() {
            let of_frame = images::Limits { max_pixels: limits.max_pixels.min(left), ..images::Limits::default() };
            let refused = |why: ImageError| VideoError::Frame { number, reason: why.to_string() };
            let frame = images::decode(file.as_ref(), &of_frame).map_err(refused)?;
            left -= frame.pixels().len() as u64 / 3;
            frames.push(frame);
        }
        Self::of_frames(frames, fps, limits)
    }

    /// How many frames there are.
    pub fn num_frames(&self) -> usize {
        self.num_frames
    }

    /// How many there are a second.
    pub fn fps(&self) -> f64 {
        self.fps
    }

    /// Height and width of a frame in pixels; one that is turned may have them the other way round.
    pub fn size(&self) -> (usize, usize) {
        self.size
    }

    /// How many frames a second the caller wants to be taken.
    pub fn wanted_fps(&self) -> Option<f64> {
        self.wanted_fps
    }

    /// The frames, where they were given singly.
    pub fn given(&self) -> Option<&[RgbImage]> {
        if let Source::Frames(frames) = &self.source { Some(frames) } else { None }
    }

    /// The bytes of the file, where it is one.
    pub fn file(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Frames(_) => None,
            Source::Gif(bytes) | Source::File(bytes, _) => Some(bytes),
        }
    }

    /// Bytes that it takes.
    pub fn num_bytes(&self) -> usize {
        let of_frames = || self.given().unwrap_or_default().iter().map(|frame| frame.pixels().len()).sum();
        self.file().map_or_else(of_frames, <[u8]>::len)
    }

    /// The same, which may take this long to decode, whatever it took to look at it.
    #[must_use]
    pub fn with_time(mut self, max_time: Duration) -> Self {
        self.limits.max_time = max_time;
        self
    }

    /// Hands the frames of these ascending numbers to `taker`, in order. `spent` is the time that other videos of a request took,
    /// which counts against the limit of this one; what it takes is added.
    ///
    /// # Errors
    /// For a file that ends too early, or takes a program too long; and that of `taker`, which ends the work.
    pub fn frames<E: From<VideoError>>(
        &self,
        numbers: &[usize],
        spent: &mut Duration,
        mut taker: impl FnMut(&RgbImage) -> Result<(), E>,
    ) -> Result<(), E> {
        let (begun, limits) = (Instant::now(), Limits { max_time: self.limits.max_time.saturating_sub(*spent), ..self.limits });
        let done = match &self.source {
            Source::Frames(frames) => numbers.iter().try_for_each(|&number| taker(frames.get(number).ok_or(VideoError::Empty)?)),
            Source::Gif(bytes) => gif::frames(bytes, numbers, &limits, taker),
            Source::File(bytes, container) => programs::frames((bytes, *container), numbers, &limits, |frame| taker(&frame)),
        };
        *spent += begun.elapsed();
        done
    }
}
