//! As much of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>) as a publisher and a router need: the NULL mechanism, and frames.
//!
//! Peers are not trusted. A length is believed up to a limit, and nothing is allocated for what has not arrived.

use std::io::{Error, ErrorKind, Read, Result, Write};

/// Bytes of a greeting.
pub const GREETING_LEN: usize = 64;
/// The frame is followed by another of the same message.
pub const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Bytes of a command at most.
pub const MAX_COMMAND_BYTES: usize = 4096;
const READY: &[u8] = b"READY";

/// A frame, or a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// It is for the connection, and no part of a message.
    pub is_command: bool,
    /// Another frame of the same message follows.
    pub more: bool,
    /// Its content.
    pub body: Vec<u8>,
}

/// What a socket does, as its peer is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Sends to all that subscribe.
    Pub,
    /// Answers whoever asked.
    Router,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Pub => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn peers(self) -> &'static [&'static [u8]] {
        match self {
            Self::Pub => &[b"SUB", b"XSUB"],
            Self::Router => &[b"REQ", b"DEALER", b"ROUTER"],
        }
    }
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// The greeting of a server of version 3.0 without security.
pub fn greeting() -> [u8; GREETING_LEN] {
    let mut greeting = [0; GREETING_LEN];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Reads a peer's greeting; an error for one that is older than 3.0 or wants security.
pub fn read_greeting(stream: &mut impl Read) -> Result<()> {
    let mut greeting = [0; GREETING_LEN];
    // An older peer waits after ten bytes.
    stream.read_exact(&mut greeting[..11])?;
    if greeting[0] != 0xff || greeting[9] & 1 == 0 {
        return Err(invalid("the peer does not speak ZeroMQ"));
    }
    if greeting[10] < 3 {
        return Err(invalid("the peer speaks a version of ZMTP before 3.0"));
    }
    stream.read_exact(&mut greeting[11..])?;
    if greeting[12..16] != *b"NULL" || greeting[16..32].iter().any(|byte| *byte != 0) {
        return Err(invalid("the peer wants a mechanism other than NULL"));
    }
    Ok(())
}

/// Reads a frame of at most `max_bytes`, or a command of at most [`MAX_COMMAND_BYTES`].
pub fn read_frame(stream: &mut impl Read, max_bytes: usize) -> Result<Frame> {
    let mut head = [0; 2];
    stream.read_exact(&mut head)?;
    let [flags, first] = head;
    let is_command = flags & COMMAND != 0;
    if flags & !(MORE | LONG | COMMAND) != 0 || (is_command && flags & MORE != 0) {
        return Err(invalid("the peer sets flags that frames do not have"));
    }
    let len = if flags & LONG == 0 {
        u64::from(first)
    } else {
        let mut len = [first, 0, 0, 0, 0, 0, 0, 0];
        stream.read_exact(&mut len[1..])?;
        u64::from_be_bytes(len)
    };
    let most = if is_command { MAX_COMMAND_BYTES } else { max_bytes };
    let len = usize::try_from(len).ok().filter(|len| *len <= most).ok_or_else(|| invalid("the peer sends too long a frame"))?;
    let mut body = vec![0; len];
    stream.read_exact(&mut body)?;
    Ok(Frame { is_command, more: flags & MORE != 0, body })
}

/// Appends a frame.
pub fn write_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    if let Ok(len) = u8::try_from(body.len()) {
        out.extend([flags, len]);
    } else {
        out.push(flags | LONG);
        out.extend((body.len() as u64).to_be_bytes());
    }
    out.extend(body);
}

/// Appends a command.
pub fn write_command(out: &mut Vec<u8>, name: &[u8], data: &[u8]) {
    let mut body = vec![name.len() as u8];
    body.extend(name);
    body.extend(data);
    write_frame(out, COMMAND, &body);
}

/// Name and data of a command.
pub fn command(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = body.split_first()?;
    rest.split_at_checked(usize::from(*len))
}

/// The properties of a READY command.
fn property<'a>(mut data: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        let (name, rest) = command(data)?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        data = rest;
    }
}

/// Opens a connection as a socket of a type: greetings, then READY both ways.
pub fn open(stream: &mut (impl Read + Write), kind: SocketType) -> Result<()> {
    let mut out = greeting().to_vec();
    let mut data = b"\x0bSocket-Type".to_vec();
    data.extend((kind.name().len() as u32).to_be_bytes());
    data.extend(kind.name());
    stream.write_all(&out)?;
    read_greeting(stream)?;
    out.clear();
    write_command(&mut out, READY, &data);
    stream.write_all(&out)?;
    let ready = read_frame(stream, 0)?;
    let peer = command(&ready.body)
        .filter(|(name, _)| ready.is_command && *name == READY)
        .and_then(|(_, data)| property(data, b"Socket-Type"))
        .ok_or_else(|| invalid("the peer does not say what socket it is"))?;
    if !kind.peers().contains(&peer) {
        return Err(invalid("the peer is a socket of a type that does not fit"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_frame_that_is_written_is_read_again_short_and_long() {
        for len in [0, 1, 255, 256, 70_000] {
            let body = vec![7; len];
            let mut bytes = Vec::new();
            write_frame(&mut bytes, MORE, &body);
            let frame = read_frame(&mut &bytes[..], 70_000).unwrap();
            assert_eq!(frame, Frame { is_command: false, more: true, body });
        }
    }

    #[test]
    fn a_length_that_nobody_sends_is_refused_before_anything_is_allocated() {
        for len in [1001, u64::MAX, 1 << 62] {
            let mut bytes = vec![LONG];
            bytes.extend(len.to_be_bytes());
            let error = read_frame(&mut &bytes[..], 1000).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
        assert!(read_frame(&mut &[8, 0][..], 10).is_err(), "a flag that there is not");
        assert!(read_frame(&mut &[MORE | COMMAND, 0][..], 10).is_err(), "a command has one frame");
    }

    #[test]
    fn greetings_that_do_not_fit_are_refused_by_their_reason() {
        let refused = |change: &dyn Fn(&mut [u8; GREETING_LEN])| {
            let mut bytes = greeting();
            change(&mut bytes);
            read_greeting(&mut &bytes[..]).unwrap_err().to_string()
        };
        read_greeting(&mut &greeting()[..]).unwrap();
        assert!(refused(&|bytes| bytes[0] = b'G').contains("does not speak ZeroMQ"));
        assert!(refused(&|bytes| bytes[10] = 1).contains("before 3.0"));
        assert!(refused(&|bytes| bytes[12..17].copy_from_slice(b"CURVE")).contains("NULL"));
        assert!(refused(&|bytes| bytes[16] = b'X').contains("NULL"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) })]

        /// Whatever arrives is a frame or an error.
        #[test]
        fn no_bytes_break_the_reader(mut bytes in proptest::collection::vec(any::<u8>(), 0..100), valid in 0usize..3) {
            if valid > 0 {
                let mut sent = greeting().to_vec();
                write_command(&mut sent, READY, b"\x0bSocket-Type\0\0\0\x03SUB");
                // A valid beginning, with one byte changed or none.
                if valid == 2 && let Some(at) = bytes.first() {
                    let at = usize::from(*at) % sent.len();
                    sent[at] ^= bytes.get(1).copied().unwrap_or(1);
                }
                sent.append(&mut bytes);
                bytes = sent;
            }
            let mut stream = Both(&bytes);
            let _ = open(&mut stream, SocketType::Pub);
            while read_frame(&mut stream, 50).is_ok() {}
            let _ = command(&bytes);
            let _ = property(&bytes, b"Socket-Type");
        }
    }

    struct Both<'a>(&'a [u8]);

    impl Read for Both<'_> {
        fn read(&mut self, out: &mut [u8]) -> Result<usize> {
            self.0.read(out)
        }
    }

    impl Write for Both<'_> {
        fn write(&mut self, bytes: &[u8]) -> Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }
}
