//! Batches that are kept, and the socket that sends them again.

use std::{
    collections::VecDeque,
    io::{Error, Write},
    net::TcpStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{
    peers::{self, Bytes, locked},
    zmtp::{self, MORE, SocketType},
};

/// The number behind the last batch of a replay.
pub const END: [u8; 8] = [0xff; 8];
/// Frames of a request at most.
const MAX_FRAMES: usize = 4;

/// The last batches, by their numbers.
pub struct Kept {
    batches: Mutex<VecDeque<(u64, Bytes)>>,
    max_batches: usize,
    max_bytes: usize,
    /// Somebody asked for more than is kept.
    pub misses_some: AtomicBool,
    /// Replays so far.
    pub replays: AtomicU64,
}

impl Kept {
    /// Keeps so many batches of so many bytes in all at most, and the last one always.
    pub fn new(max_batches: usize, max_bytes: usize) -> Self {
        let (misses_some, replays) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { batches: Mutex::default(), max_batches, max_bytes, misses_some, replays }
    }

    /// Keeps a batch, and lets the oldest go for it; `bytes` is the sum of those that are kept.
    pub fn keep(&self, number: u64, payload: Bytes, bytes: &mut usize) {
        let mut batches = locked(&self.batches);
        *bytes += payload.len();
        batches.push_back((number, payload));
        while batches.len() > self.max_batches || (*bytes > self.max_bytes && batches.len() > 1) {
            *bytes -= batches.pop_front().map_or(0, |(_, payload)| payload.len());
        }
    }

    /// The batches from a number on.
    fn from(&self, start: u64) -> Vec<(u64, Bytes)> {
        let batches = locked(&self.batches);
        if batches.front().is_some_and(|(first, _)| *first > start) {
            self.misses_some.store(true, Ordering::SeqCst);
        }
        batches.iter().filter(|(number, _)| *number >= start).cloned().collect()
    }

    /// Serves a connection: each request is an empty frame and the number to begin with; each batch of the answer is an empty
    /// frame, its number and its payload, the last with [`END`] and nothing.
    pub fn serve(&self, stream: &Arc<TcpStream>) -> Result<(), Error> {
        peers::open(stream, SocketType::Router)?;
        let mut stream = &**stream;
        loop {
            let Some(start) = read_request(&mut stream)? else { continue };
            self.replays.fetch_add(1, Ordering::Relaxed);
            for (number, payload) in self.from(start) {
                stream.write_all(&answer(&number.to_be_bytes(), &payload))?;
            }
            stream.write_all(&answer(&END, b""))?;
        }
    }
}

fn answer(number: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(payload.len() + 32);
    zmtp::write_frame(&mut out, MORE, b"");
    zmtp::write_frame(&mut out, MORE, number);
    zmtp::write_frame(&mut out, 0, payload);
    out
}

/// The number that a request names; `None` for a command.
fn read_request(stream: &mut (impl std::io::Read + Write)) -> Result<Option<u64>, Error> {
    let mut frames = Vec::new();
    loop {
        let frame = zmtp::read_frame(stream, 256)?;
        if frame.is_command {
            if let Some((b"PING", data)) = zmtp::command(&frame.body) {
                let mut pong = Vec::new();
                zmtp::write_command(&mut pong, b"PONG", data.get(2..).unwrap_or_default());
                stream.write_all(&pong)?;
            }
            if frames.is_empty() {
                return Ok(None);
            }
            continue;
        }
        let more = frame.more;
        frames.push(frame.body);
        if frames.len() > MAX_FRAMES {
            return Err(Error::other("a request for a replay has too many frames"));
        }
        if !more {
            break;
        }
    }
    match &frames[..] {
        [delimiter, number] if delimiter.is_empty() => number.as_slice().try_into().ok(),
        _ => None,
    }
    .map(|number| Some(u64::from_be_bytes(number)))
    .ok_or_else(|| Error::other("a request for a replay must be an empty frame and a number of 8 bytes"))
}
