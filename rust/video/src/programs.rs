//! Files by way of `ffprobe` and `ffmpeg`.
//!
//! A file lies in a temporary folder while they read it. They are told its format, may use no other, and may open files alone and
//! no network; a file that names others is thereby of no use. They have a number of seconds, after which they are ended, and what
//! they write is read only as far as it is expected.

use std::{
    fmt::Write as _,
    io::{self, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use images::RgbImage;
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::{Container, Limits, VideoError, ppm};

/// Bytes that are read of what a program says about a file, or of its errors.
const MAX_SAID: u64 = 64 << 10;
/// Characters of its errors that are shown.
const SHOWN: usize = 200;

/// What is known of a file that has not been decoded.
pub(crate) struct Looked {
    pub(crate) num_frames: usize,
    pub(crate) fps: f64,
    pub(crate) size: (usize, usize),
}

/// A file that programs read, away with what holds it.
fn laid_down(bytes: &[u8]) -> Result<NamedTempFile, VideoError> {
    let lay = || -> io::Result<NamedTempFile> {
        let mut file = NamedTempFile::new()?;
        file.write_all(bytes)?;
        file.flush()?;
        Ok(file)
    };
    lay().map_err(|source| VideoError::Io { what: "the video cannot be laid down for ffmpeg", source })
}

/// The command that reads a file of this format, up to its name.
fn command(program: &'static str, container: Container, limits: &Limits) -> Command {
    let mut command = Command::new(program);
    let demuxer = container.demuxer();
    command.args(["-v", "error", "-protocol_whitelist", "file", "-format_whitelist", demuxer]);
    command.args(["-max_pixels", &limits.max_pixels.to_string(), "-f", demuxer, "-i"]);
    command
}

/// A program that runs, and is ended when its time is over.
struct Running {
    program: &'static str,
    format: &'static str,
    max_time: Duration,
    child: Arc<Process>,
    said: thread::JoinHandle<String>,
    watch: thread::JoinHandle<bool>,
    done: mpsc::Sender<()>,
}

/// A child that does not outlive it, whatever happens to those who read what it writes.
struct Process(Mutex<Child>);

impl Process {
    fn lock(&self) -> MutexGuard<'_, Child> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = self.lock();
        // Of one that has been waited for, both do nothing.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Running {
    fn start(
        mut command: Command,
        program: &'static str,
        format: &'static str,
        max_time: Duration,
    ) -> Result<(Self, ChildStdout), VideoError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => VideoError::NoProgram { format, program },
            _ => VideoError::Io { what: program, source },
        })?;
        let no_pipe = || VideoError::Io { what: program, source: io::ErrorKind::BrokenPipe.into() };
        let stdout = child.stdout.take().ok_or_else(no_pipe)?;
        let stderr = child.stderr.take().ok_or_else(no_pipe)?;
        let said = thread::spawn(move || first_of(stderr));
        let child = Arc::new(Process(Mutex::new(child)));
        let (done, is_done) = mpsc::channel();
        let watched = Arc::downgrade(&child);
        let watch = thread::spawn(move || {
            let is_late = is_done.recv_timeout(max_time) == Err(mpsc::RecvTimeoutError::Timeout);
            if is_late && let Some(child) = watched.upgrade() {
                let _ = child.lock().kill();
            }
            is_late
        });
        Ok((Self { program, format, max_time, child, said, watch, done }, stdout))
    }

    /// Waits for its end; `is_enough`: it need not come to it.
    fn end(self, is_enough: bool) -> Result<(), VideoError> {
        let Self { program, format, max_time, child, said, watch, done } = self;
        if is_enough {
            let _ = child.lock().kill();
        }
        // Once its output is closed it ends by itself, or is ended by the watch.
        let said = said.join().unwrap_or_default();
        let _ = done.send(());
        let is_late = watch.join().unwrap_or(false);
        let status = child.lock().wait();
        if is_enough {
            return Ok(());
        }
        if is_late {
            return Err(VideoError::TooSlow { program, seconds: max_time.as_secs() });
        }
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => {
                let shown: String = said.trim().chars().take(SHOWN).collect();
                Err(VideoError::Malformed { format, reason: format!("{program} says {shown:?}") })
            }
            Err(source) => Err(VideoError::Io { what: program, source }),
        }
    }
}

/// The beginning of what a stream has; the rest is read and forgotten, so that nobody waits.
fn first_of(mut stream: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.by_ref().take(MAX_SAID).read_to_end(&mut bytes);
    let _ = io::copy(&mut stream, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Counts the frames of a file's first video, without decoding them.
pub(crate) fn look(bytes: &[u8], container: Container, limits: &Limits) -> Result<Looked, VideoError> {
    let (file, format) = (laid_down(bytes)?, container.name());
    let mut command = command("ffprobe", container, limits);
    command.arg(file.path());
    command.args(["-select_streams", "v:0", "-count_packets", "-of", "json", "-show_entries"]);
    command.arg("stream=width,height,avg_frame_rate,r_frame_rate,nb_read_packets");
    let (running, stdout) = Running::start(command, "ffprobe", format, limits.max_time)?;
    let text = first_of(stdout);
    running.end(false)?;
    looked(&text, format, limits)
}

/// What ffprobe says of a file.
pub(crate) fn looked(text: &str, format: &'static str, limits: &Limits) -> Result<Looked, VideoError> {
    let malformed = |reason: &str| VideoError::Malformed { format, reason: reason.into() };
    let json: Value = serde_json::from_str(text).map_err(|_| malformed("ffprobe says nothing of it"))?;
    let stream = json["streams"].get(0).ok_or_else(|| malformed("it has no video"))?;
    let side = |key: &str| stream[key].as_u64().filter(|side| *side > 0).ok_or_else(|| malformed("its video has no size"));
    let (height, width) = (side("height")?, side("width")?);
    if height.saturating_mul(width) > limits.max_pixels {
        return Err(VideoError::TooLarge { what: format!("frames of {width} x {height} pixels"), most: limits.max_pixels });
    }
    let num_frames = stream["nb_read_packets"].as_str().and_then(|count| count.parse::<usize>().ok()).unwrap_or(0);
    if num_frames == 0 {
        return Err(malformed("its video has no frames"));
    }
    if num_frames > limits.max_frames {
        return Err(VideoError::TooLarge { what: format!("{num_frames} frames"), most: limits.max_frames as u64 });
    }
    let rate = |key: &str| stream[key].as_str().and_then(ratio);
    let fps = rate("avg_frame_rate").or_else(|| rate("r_frame_rate")).ok_or_else(|| malformed("its video has no rate"))?;
    Ok(Looked { num_frames, fps, size: (height as usize, width as usize) })
}

/// `30000/1001` as a number.
fn ratio(text: &str) -> Option<f64> {
    let (over, under) = text.split_once('/')?;
    let value = over.parse::<f64>().ok()? / under.parse::<f64>().ok()?;
    (value > 0.0 && value <= 1000.0).then_some(value)
}

/// The frames of these ascending numbers. A file may have a few less than it has packets: the last is then given again.
pub(crate) fn frames<E: From<VideoError>>(
    (bytes, container): (&[u8], Container),
    numbers: &[usize],
    limits: &Limits,
    mut taker: impl FnMut(RgbImage) -> Result<(), E>,
) -> Result<(), E> {
    let Some(last) = numbers.last() else { return Ok(()) };
    let (file, format) = (laid_down(bytes)?, container.name());
    let mut command = command("ffmpeg", container, limits);
    command.arg(file.path()).args(["-nostdin", "-map", "0:v:0", "-an", "-sn", "-dn", "-vsync", "passthrough"]);
    command.args(["-vf", &select(numbers), "-frames:v", &numbers.len().to_string()]);
    command.args(["-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]);
    let (running, stdout) = Running::start(command, "ffmpeg", format, limits.max_time)?;
    let mut stream = BufReader::with_capacity(1 << 16, stdout);
    let mut kept: Option<RgbImage> = None;
    for (index, number) in numbers.iter().enumerate() {
        // Numbers that are there several times are written once.
        if index > 0 && numbers[index - 1] == *number {
            continue;
        }
        match ppm::read(&mut stream, limits.max_pixels) {
            Ok(Some(frame)) => {
                let times = numbers[index..].iter().take_while(|other| *other == number).count();
                for _ in 0..times {
                    if let Err(error) = taker(frame.clone()) {
                        running.end(true)?;
                        return Err(error);
                    }
                }
                kept = Some(frame);
            }
            Ok(None) => {
                running.end(false)?;
                let missing = numbers.len() - index;
                let early = || VideoError::Malformed { format, reason: format!("it ends before frame {number} of {}", last + 1) };
                // Packets at its end may be of frames that are not shown.
                let Some(frame) = kept.filter(|_| missing * 8 <= numbers.len().max(8)) else { return Err(early().into()) };
                return (0..missing).try_for_each(|_| taker(frame.clone()));
            }
            Err(source) => {
                // One that goes on writing is not waited for.
                running.end(source.kind() != io::ErrorKind::UnexpectedEof)?;
                return Err(VideoError::Malformed { format, reason: source.to_string() }.into());
            }
        }
    }
    Ok(running.end(true)?)
}

/// A filter that lets the frames of these numbers through, each once. Sums within sums keep its terms from nesting deep.
fn select(numbers: &[usize]) -> String {
    let mut text = String::from("select=");
    let mut sums = Vec::new();
    for numbers in numbers.chunks(32) {
        let mut sum = String::new();
        for (index, number) in numbers.iter().enumerate() {
            let _ = write!(sum, "{}eq(n\\,{number})", if index == 0 { "" } else { "+" });
        }
        sums.push(format!("({sum})"));
    }
    text.push_str(&sums.join("+"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_ends_with_those_who_read_it() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let (running, _stdout) = Running::start(command, "sleep", "no file", Duration::from_secs(100)).unwrap();
        let place = std::path::PathBuf::from(format!("/proc/{}", running.child.lock().id()));
        assert!(place.exists());
        let panicking = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _running = running;
            panic!("a defect of the reader");
        }));
        // One that was ended and not waited for would still be there.
        assert!(panicking.is_err() && !place.exists());
    }

    #[test]
    fn rates_are_ratios() {
        assert_eq!(ratio("30000/1001"), Some(30000.0 / 1001.0));
        assert_eq!([ratio("0/0"), ratio("1/0"), ratio("30"), ratio("-3/1")], [None; 4]);
    }

    #[test]
    fn a_filter_names_its_frames() {
        assert_eq!(select(&[0, 7]), "select=(eq(n\\,0)+eq(n\\,7))");
        assert_eq!(select(&(0..33).collect::<Vec<_>>()).matches("+(").count(), 1);
    }
}
