//! Files that ffmpeg makes, and those that it must not be led astray by. Tests that need the program pass where it is not there.

#![allow(missing_docs)]

use std::{path::Path, process::Command, time::Duration};

use video::{Limits, Video, VideoError};

/// A file of ffmpeg's test picture, or nothing where there is no ffmpeg.
fn made(folder: &Path, name: &str, options: &[&str]) -> Option<Vec<u8>> {
    let path = folder.join(name);
    let mut command = Command::new("ffmpeg");
    command.args(["-v", "error", "-f", "lavfi", "-i", "testsrc=size=64x48:rate=10:duration=3"]).args(options).arg(&path);
    let Ok(status) = command.status() else {
        eprintln!("skipped: ffmpeg is not on PATH");
        return None;
    };
    assert!(status.success());
    Some(std::fs::read(path).unwrap())
}

fn pixels(video: &Video, numbers: &[usize]) -> Result<Vec<Vec<u8>>, VideoError> {
    let mut all = Vec::new();
    video.frames(numbers, &mut Duration::default(), |frame| {
        all.push(frame.pixels().to_vec());
        Ok::<_, VideoError>(())
    })?;
    Ok(all)
}

#[test]
fn frames_are_those_of_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    for (name, options) in [("a.avi", &["-c:v", "ffv1"][..]), ("a.mkv", &["-c:v", "ffv1"]), ("a.mp4", &["-c:v", "mpeg4"])] {
        let Some(bytes) = made(folder.path(), name, options) else { return };
        let video = Video::of_file(bytes, None, &Limits::default()).unwrap();
        assert_eq!((video.num_frames(), video.fps(), video.size()), (30, 10.0, (48, 64)), "{name}");
        let all = pixels(&video, &(0..30).collect::<Vec<_>>()).unwrap();
        assert!(all.windows(2).filter(|pair| pair[0] != pair[1]).count() > 20, "{name}: frames differ");
        let some = pixels(&video, &[0, 7, 7, 29]).unwrap();
        assert_eq!(some, [&all[0], &all[7], &all[7], &all[29]].map(Clone::clone), "{name}");
    }
}

#[test]
fn limits_hold() {
    let folder = tempfile::tempdir().unwrap();
    let Some(bytes) = made(folder.path(), "a.mkv", &["-c:v", "ffv1"]) else { return };
    let usual = Limits::default();
    for (limits, said) in [
        (Limits { max_pixels: 1000, ..usual }, "1000"),
        (Limits { max_frames: 20, ..usual }, "30 frames, more than the 20"),
        (Limits { max_bytes: 100, ..usual }, "more than the 100"),
        (Limits { max_time: Duration::ZERO, ..usual }, "ffprobe took longer"),
    ] {
        let error = Video::of_file(bytes.clone(), None, &limits).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    // What is cut off is an error or fewer frames, and never more.
    for len in (64..bytes.len()).step_by(bytes.len() / 7) {
        if let Ok(video) = Video::of_file(bytes[..len].to_vec(), None, &usual) {
            let numbers: Vec<_> = (0..video.num_frames()).collect();
            assert!(pixels(&video, &numbers).map_or(0, |all| all.len()) <= 30);
        }
    }
    // An error of the taker's ends the program.
    let video = Video::of_file(bytes, None, &usual).unwrap();
    let mut seen = 0;
    let ended = video.frames(&(0..30).collect::<Vec<_>>(), &mut Duration::default(), |_| {
        seen += 1;
        if seen == 3 { Err(VideoError::Empty) } else { Ok(()) }
    });
    assert!(matches!(ended, Err(VideoError::Empty)) && seen == 3);
}

#[test]
fn lists_of_other_files_are_no_videos() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret.txt");
    std::fs::write(&secret, "secret").unwrap();
    let playlist = format!("#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile://{}\n#EXT-X-ENDLIST\n", secret.display());
    for text in [playlist.clone(), format!("ffconcat version 1.0\nfile {}\n", secret.display())] {
        let error = Video::of_file(text.into_bytes(), None, &Limits::default()).unwrap_err();
        assert!(matches!(error, VideoError::UnknownFormat { .. }), "{error}");
    }
    // One that begins as a video does is read as one.
    let error = Video::of_file([b"\0\0\0\x08free", playlist.as_bytes()].concat(), None, &Limits::default()).unwrap_err();
    assert!(matches!(error, VideoError::Malformed { .. } | VideoError::NoProgram { .. }), "{error}");
}

#[test]
fn frames_that_are_given_singly_have_one_size() {
    let frame = |width, level| images::RgbImage::new(width, 2, vec![level; 6 * width as usize]).unwrap();
    let limits = Limits::default();
    let video = Video::of_frames(vec![frame(3, 1), frame(3, 2)], Some(4.0), &limits).unwrap();
    assert_eq!((video.num_frames(), video.fps(), video.size(), video.num_bytes()), (2, 4.0, (2, 3), 36));
    assert_eq!(pixels(&video, &[1]).unwrap(), [[2; 18]]);
    for (frames, fps, limits, said) in [
        (vec![frame(3, 1), frame(4, 1)], None, limits, "frame 1 of the video: it has 4 x 2 pixels, and the first one 3 x 2"),
        (vec![], None, limits, "no frames"),
        (vec![frame(3, 1)], Some(0.0), limits, "fps is 0"),
        (vec![frame(3, 1)], Some(f64::NAN), limits, "fps is NaN"),
        (vec![frame(3, 1); 3], None, Limits { max_kept_pixels: 17, ..limits }, "18 pixels together, more than the 17"),
    ] {
        let error = Video::of_frames(frames, fps, &limits).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(Video::of_image_files(&[b"no image"], None, &limits).unwrap_err().to_string().contains("frame 0"));
}
