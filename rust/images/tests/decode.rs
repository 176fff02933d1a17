//! Pixels against Pillow's, and files that are broken or too large.

mod common;

use std::fs;

use images::{ImageError, Limits, RgbImage, decode};
use serde_json::{Map, Value};

/// Among them JPEG and lossy WebP: no level differs.
#[test]
fn files_of_every_kind_have_the_pixels_that_pillow_has() {
    let dir = goldens::dir().join("images");
    let digests: Map<String, Value> = serde_json::from_slice(&fs::read(dir.join("digests.json")).unwrap()).unwrap();
    assert_eq!(digests.len(), 50);
    for (name, wanted) in digests {
        let image =
            decode(&fs::read(dir.join(&name)).unwrap(), &Limits::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let digest = common::digest(image.pixels().iter().copied());
        assert_eq!(format!("{}x{} {digest}", image.width(), image.height()), wanted, "{name}");
    }
}

#[test]
fn an_image_is_as_large_as_its_values() {
    assert!(RgbImage::new(2, 1, vec![0; 6]).is_ok());
    for (width, height, values) in [(0, 1, 0), (2, 1, 5), (u32::MAX, u32::MAX, 3)] {
        assert!(matches!(RgbImage::new(width, height, vec![0; values]), Err(ImageError::Shape { .. })));
    }
}

#[test]
fn bytes_that_are_no_image_are_refused_with_the_formats_that_are() {
    for bytes in [&b""[..], b"P", b"%PDF-1.7 something", b"II*\0 a TIFF"] {
        let error = decode(bytes, &Limits::default()).unwrap_err();
        assert!(error.to_string().contains("no PNG, JPEG, WebP, GIF or BMP file"), "{error}");
    }
}

#[test]
fn limits_hold() {
    let dir = goldens::dir().join("images");
    for name in ["rgb.png", "420.jpg", "lossy.webp", "lossless.webp", "animated.gif", "rgb.bmp"] {
        let bytes = fs::read(dir.join(name)).unwrap();
        let allowed = Limits { max_bytes: bytes.len(), max_pixels: 37 * 29 };
        decode(&bytes, &allowed).unwrap_or_else(|error| panic!("{name}: {error}"));
        let error = decode(&bytes, &Limits { max_pixels: 37 * 29 - 1, ..allowed }).unwrap_err();
        assert!(matches!(error, ImageError::TooManyPixels { .. }), "{name}: {error}");
        let error = decode(&bytes, &Limits { max_bytes: bytes.len() - 1, ..allowed }).unwrap_err();
        assert!(matches!(error, ImageError::TooManyBytes { .. }), "{name}: {error}");
    }
}

#[test]
fn a_file_that_ends_too_early_is_an_error() {
    let dir = goldens::dir().join("images");
    for name in [
        "rgb.png",
        "p.png",
        "420.jpg",
        "420-progressive.jpg",
        "cmyk.jpg",
        "lossy.webp",
        "lossless.webp",
        "interlaced.gif",
        "rgb.bmp",
    ] {
        let bytes = fs::read(dir.join(name)).unwrap();
        let end = bytes.len() * 4 / 5;
        for end in [end / 9, end / 2, end] {
            assert!(decode(&bytes[..end], &Limits::default()).is_err(), "{name} of {end} bytes");
        }
    }
}
