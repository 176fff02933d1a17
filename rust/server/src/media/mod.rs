//! Images, sounds and videos by their addresses: `data:`, `file:` and `http(s):`, each only as far as it is allowed.
//!
//! What a client names is fetched by the server, so an address is a way into whatever the server reaches. `data:` reaches
//! nothing. `file:` is allowed below one folder, as it lies there after all links. `http(s):` is allowed from hosts that are
//! listed: the name is resolved once, no address of it may be private, the connection goes to these addresses, and redirects are
//! not followed. Size, time, pixels and seconds are bounded.

mod address;
mod web;

use std::{
    fmt,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use engine::{
    MediaKind,
    audio::{self, Sound},
    images::{self, RgbImage},
    video::{self, Video},
};
use percent_encoding::percent_decode_str;

use web::Web;

const BASE64: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent));
/// Characters of an address that a message quotes.
const SHOWN: usize = 96;

/// Why there is no image, sound or video at an address, and what would work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaError(pub String);

impl fmt::Display for MediaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MediaError {}

/// Which local files may be read.
#[derive(Debug)]
enum Files {
    None,
    /// Those below this folder, without links in its path.
    Below(PathBuf),
    /// Those that the caller's own process may read.
    All,
}

/// Fetches and decodes images and sounds, and looks at videos.
#[derive(Debug)]
pub struct Media {
    files: Files,
    web: Web,
}

impl Media {
    /// For addresses that clients send: files below `root`, and pages of these hosts.
    ///
    /// # Errors
    /// For a folder that is not there, or a host that is no name.
    pub fn of_clients(root: Option<&Path>, domains: &[String]) -> Result<Self, MediaError> {
        let files = match root {
            None => Files::None,
            Some(root) => {
                let folder = fs::canonicalize(root).ok().filter(|path| path.is_dir());
                let not_there = || MediaError(format!("--allowed-local-media-path: {} is no folder", root.display()));
                Files::Below(folder.ok_or_else(not_there)?)
            }
        };
        let hint = "its operator can allow it with --allowed-media-domains";
        Ok(Self { files, web: Web::new(domains, "--allowed-media-domains", hint)? })
    }

    /// For addresses that the caller writes: any file, and pages of these hosts.
    ///
    /// # Errors
    /// For a host that is no name.
    pub fn of_caller(domains: &[String]) -> Result<Self, MediaError> {
        let hint = "allow it with allowed_media_domains=[...]";
        Ok(Self { files: Files::All, web: Web::new(domains, "allowed_media_domains", hint)? })
    }

    /// The same, for tests: private addresses may be connected to.
    #[doc(hidden)]
    #[must_use]
    pub fn reaching_private(self) -> Self {
        Self { web: self.web.reaching_private(), ..self }
    }

    /// The image at an address, within `limits`. Waits for the disk or the network, 10 seconds for the latter at most.
    ///
    /// # Errors
    /// For an address that is not allowed or has no image; the text quotes its beginning alone.
    pub fn image(&self, url: &str, limits: &images::Limits) -> Result<RgbImage, MediaError> {
        let bytes = self.bytes(url, MediaKind::Image, limits.max_bytes)?;
        images::decode(&bytes, limits).map_err(|error| MediaError(error.to_string()))
    }

    /// The same of a sound.
    ///
    /// # Errors
    /// As [`Self::image`].
    pub fn sound(&self, url: &str, limits: &audio::Limits) -> Result<Sound, MediaError> {
        let bytes = self.bytes(url, MediaKind::Sound, limits.max_bytes)?;
        audio::decode(&bytes, limits).map_err(|error| MediaError(error.to_string()))
    }

    /// The same of a video, which is looked at. `fps`: how many frames a second are taken, or, of frames that are given singly,
    /// how many there are.
    ///
    /// # Errors
    /// As [`Self::image`].
    pub fn video(&self, url: &str, fps: Option<f64>, limits: &video::Limits) -> Result<Video, MediaError> {
        let failed = |error: video::VideoError| MediaError(error.to_string());
        if let Some(frames) = frames_of(url) {
            return Video::of_image_files(&frames?, fps, limits).map_err(failed);
        }
        let bytes = self.bytes(url, MediaKind::Video, limits.max_bytes)?;
        Video::of_file(bytes, fps, limits).map_err(failed)
    }

    /// The bytes of a file at an address.
    pub(crate) fn bytes(&self, url: &str, kind: MediaKind, max_bytes: usize) -> Result<Vec<u8>, MediaError> {
        let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
        match scheme.to_ascii_lowercase().as_str() {
            "data" => data(rest, kind),
            "file" => self.file(rest, kind, max_bytes),
            "http" | "https" => self.web.fetch(url, kind, max_bytes),
            _ => {
                let (shown, noun) = (shorten(url), noun(kind));
                Err(MediaError(format!("{shown:?} is no address of {noun}: give a data:, file: or https: URL")))
            }
        }
    }

    fn file(&self, rest: &str, kind: MediaKind, max_bytes: usize) -> Result<Vec<u8>, MediaError> {
        if matches!(self.files, Files::None) {
            let text = "file: URLs are not allowed; the server's operator can allow a folder with --allowed-local-media-path";
            return Err(MediaError(text.into()));
        }
        let shown = || shorten(rest).to_owned();
        let example = match kind {
            MediaKind::Image => "image.png",
            MediaKind::Sound => "sound.wav",
            MediaKind::Video => "video.mp4",
        };
        let path = local_path(rest)
            .ok_or_else(|| MediaError(format!("file:{} is no local path: write file:///folder/{example}", shown())))?;
        match &self.files {
            Files::Below(root) => {
                // One answer for all of them: it must not tell what lies elsewhere.
                let outside = || MediaError(format!("file:{} is no file below the folder that the server allows", shown()));
                let real = fs::canonicalize(&path).ok().filter(|real| real.starts_with(root)).ok_or_else(outside)?;
                read(&real, max_bytes).map_err(|why| why.unwrap_or_else(outside))
            }
            Files::All | Files::None => read_file(&path, max_bytes),
        }
    }
}

/// What errors call it.
fn noun(kind: MediaKind) -> &'static str {
    match kind {
        MediaKind::Image => "an image",
        MediaKind::Sound => "a sound",
        MediaKind::Video => "a video",
    }
}

/// What media types of it begin with.
fn media_type(kind: MediaKind) -> &'static str {
    match kind {
        MediaKind::Image => "image/",
        MediaKind::Sound => "audio/",
        MediaKind::Video => "video/",
    }
}

/// The bytes of a file.
///
/// # Errors
/// For a path that is no file, or one of more bytes than `max_bytes`.
pub fn read_file(path: &Path, max_bytes: usize) -> Result<Vec<u8>, MediaError> {
    let unread = |why: &dyn fmt::Display| MediaError(format!("{}: {why}", path.display()));
    if let Err(error) = fs::metadata(path) {
        return Err(unread(&error));
    }
    read(path, max_bytes).map_err(|why| unread(&why.map_or_else(|| "it is no file that can be read".into(), |why| why.0)))
}

/// The bytes of a plain file; an error without a text where it is none.
fn read(path: &Path, max_bytes: usize) -> Result<Vec<u8>, Option<MediaError>> {
    // A pipe would be waited for.
    if !fs::metadata(path).is_ok_and(|data| data.is_file()) {
        return Err(None);
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|_| None)?;
    file.take(max_bytes as u64 + 1).read_to_end(&mut bytes).map_err(|_| None)?;
    if bytes.len() > max_bytes {
        return Err(Some(MediaError(format!("the file has more than the {max_bytes} bytes that are allowed"))));
    }
    Ok(bytes)
}

/// The path of a `file:` URL, behind its scheme.
fn local_path(rest: &str) -> Option<PathBuf> {
    let path = match rest.strip_prefix("//") {
        Some(rest) => rest.strip_prefix("localhost").unwrap_or(rest),
        None => rest,
    };
    let text = percent_decode_str(path).decode_utf8().ok()?;
    (text.starts_with('/') && !text.contains('\0')).then(|| PathBuf::from(text.into_owned()))
}

/// The bytes of a `data:` URL, behind its scheme.
fn data(rest: &str, wanted: MediaKind) -> Result<Vec<u8>, MediaError> {
    let form = || {
        let example = match wanted {
            MediaKind::Image => "image/png",
            MediaKind::Sound => "audio/wav",
            MediaKind::Video => "video/mp4",
        };
        MediaError(format!("a data: URL of {} is written data:{example};base64,...", noun(wanted)))
    };
    let (kind, text) = rest.split_once(',').ok_or_else(form)?;
    let kind = kind.to_ascii_lowercase();
    let given = kind.strip_suffix(";base64").ok_or_else(form)?;
    // An animated GIF is a video.
    let is_gif = wanted == MediaKind::Video && given == "image/gif";
    if !given.starts_with(media_type(wanted)) && !given.starts_with("application/octet-stream") && !is_gif {
        let (shown, noun) = (shorten(given), noun(wanted));
        return Err(MediaError(format!("the data: URL says that it is {shown:?}, which is not {noun}")));
    }
    BASE64.decode(text.trim()).map_err(|error| MediaError(format!("the data: URL is no base64: {error}")))
}

/// The files of frames that a `data:` URL gives singly, as vLLM takes them: `data:video/jpeg;base64,FRAME,FRAME`. `None` for
/// others.
fn frames_of(url: &str) -> Option<Result<Vec<Vec<u8>>, MediaError>> {
    const BEGIN: &str = "data:video/jpeg;base64,";
    let texts = url.get(BEGIN.len()..).filter(|_| url[..BEGIN.len()].eq_ignore_ascii_case(BEGIN))?;
    let decoded = |(number, text): (usize, &str)| {
        BASE64.decode(text.trim()).map_err(|error| MediaError(format!("frame {number} of the video is no base64: {error}")))
    };
    Some(texts.split(',').enumerate().map(decoded).collect())
}

/// The beginning of what a client sent.
fn shorten(text: &str) -> &str {
    text.char_indices().nth(SHOWN).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests;
