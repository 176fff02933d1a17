//! Which format a file has, by its first bytes. Programs are told it, so that none of their other readers sees the file: some of
//! these read lists of further files.

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// MP4, QuickTime, 3GP.
    Mp4,
    /// Matroska, WebM.
    Matroska,
    /// AVI.
    Avi,
    /// A transport stream of MPEG.
    MpegTs,
    /// A program stream of MPEG.
    MpegPs,
    /// Ogg.
    Ogg,
    /// Flash video.
    Flv,
    /// ASF, WMV.
    Asf,
}

/// Bytes of a packet of a transport stream.
const TS_PACKET: usize = 188;

impl Container {
    /// That of a file; `None` where it is none of these.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let at = |place: usize, text: &[u8]| bytes.get(place..).is_some_and(|rest| rest.starts_with(text));
        let atoms: [&[u8]; 6] = [b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"];
        Some(match bytes {
            _ if atoms.iter().any(|atom| at(4, atom)) => Self::Mp4,
            [0x1a, 0x45, 0xdf, 0xa3, ..] => Self::Matroska,
            _ if at(0, b"RIFF") && at(8, b"AVI ") => Self::Avi,
            _ if [0, 1, 2].iter().all(|packet| at(packet * TS_PACKET, b"G")) => Self::MpegTs,
            [0, 0, 1, 0xba, ..] => Self::MpegPs,
            _ if at(0, b"OggS") => Self::Ogg,
            _ if at(0, b"FLV\x01") => Self::Flv,
            [0x30, 0x26, 0xb2, 0x75, 0x8e, 0x66, 0xcf, 0x11, ..] => Self::Asf,
            _ => return None,
        })
    }

    /// What errors call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mp4 => "MP4",
            Self::Matroska => "Matroska",
            Self::Avi => "AVI",
            Self::MpegTs => "MPEG-TS",
            Self::MpegPs => "MPEG-PS",
            Self::Ogg => "Ogg",
            Self::Flv => "FLV",
            Self::Asf => "ASF",
        }
    }

    /// What ffmpeg calls the reader of such files.
    pub(crate) fn demuxer(self) -> &'static str {
        match self {
            Self::Mp4 => "mov",
            Self::Matroska => "matroska",
            Self::Avi => "avi",
            Self::MpegTs => "mpegts",
            Self::MpegPs => "mpeg",
            Self::Ogg => "ogg",
            Self::Flv => "flv",
            Self::Asf => "asf",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_known_by_its_first_bytes() {
        let mut stream = vec![0; 3 * TS_PACKET];
        for packet in 0..3 {
            stream[packet * TS_PACKET] = b'G';
        }
        for (bytes, expected) in [
            (&b"\0\0\0\x20ftypisom"[..], Some(Container::Mp4)),
            (b"\x1a\x45\xdf\xa3\x01", Some(Container::Matroska)),
            (b"RIFF\0\0\0\0AVI LIST", Some(Container::Avi)),
            (b"RIFF\0\0\0\0WEBPVP8 ", None),
            (&stream, Some(Container::MpegTs)),
            (&stream[..200], None),
            (b"\0\0\x01\xba\x44", Some(Container::MpegPs)),
            (b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n", None),
            (b"ffconcat version 1.0\nfile secret\n", None),
            (b"", None),
        ] {
            assert_eq!(Container::of(bytes), expected, "{bytes:?}");
        }
    }
}
