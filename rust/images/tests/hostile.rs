//! Files that are made to harm: they take no more memory than the limits say, and end in an image or an error.

mod common;
#[path = "common/fuzz.rs"]
mod fuzz;

use std::{
    fs,
    panic::{self, AssertUnwindSafe},
    sync::Mutex,
};

use images::{ImageError, Limits, decode};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Memory is counted for the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

/// The result, and how many bytes it took at most.
fn measured<T>(run: impl FnOnce() -> T) -> (T, usize) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let result = run();
    (result, MEMORY.peak_usage().saturating_sub(before))
}

/// Headers alone. libjpeg has memory of its own, but asks for none before the size is known.
#[test]
fn huge_headers_are_refused_before_memory_is_taken() {
    let _guard = ONE_AT_A_TIME.lock();
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xea\x60\0\0\xea\x60\x08\x06\0\0\0".to_vec();
    png.extend(0_u32.to_be_bytes());
    let gif = b"GIF89a\xff\xff\xff\xff\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\0;".to_vec();
    let jpeg = fs::read(goldens::dir().join("images/420.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    let mut huge_jpeg = jpeg;
    huge_jpeg[frame + 5..frame + 9].copy_from_slice(&[0xff, 0, 0xff, 0]);
    let mut lossless = b"RIFF\x1a\0\0\0WEBPVP8L\x0e\0\0\0\x2f".to_vec();
    lossless.extend([0xff, 0xff, 0xff, 0x0f]);
    lossless.extend([0; 9]);
    let mut extended = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0".to_vec();
    extended.extend([0xff, 0xff, 0, 0xff, 0x3f, 0]);
    let mut bmp = b"BM\0\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0".to_vec();
    bmp.extend([0x60, 0xea, 0, 0, 0x60, 0xea, 0, 0, 1, 0, 24, 0]);
    bmp.extend([0; 30]);
    for (name, bytes) in [("PNG", png), ("GIF", gif), ("JPEG", huge_jpeg), ("VP8L", lossless), ("VP8X", extended), ("BMP", bmp)] {
        let (result, bytes) = measured(|| decode(&bytes, &Limits::default()));
        let error = result.unwrap_err();
        // What is missing behind that header is found first.
        assert!(matches!(error, ImageError::TooManyPixels { .. }) || name == "VP8X", "{name}: {error}");
        assert!(bytes < MIB, "{name}: {bytes} bytes");
    }
}

/// 64 MiB lie packed in text, in a colour profile, in pixels.
#[test]
fn packed_chunks_take_no_more_than_the_limits() {
    let _guard = ONE_AT_A_TIME.lock();
    let limits = Limits { max_pixels: 37 * 29, ..Limits::default() };
    for name in ["ztxt", "itxt", "iccp", "idat"] {
        let bytes = fs::read(goldens::dir().join(format!("images/bomb-{name}.png"))).unwrap();
        let (result, taken) = measured(|| decode(&bytes, &limits));
        assert!(taken < 4 * MIB, "{name}: {taken} bytes, {result:?}");
    }
}

/// `cargo run --example fuzz_images` does more of them.
#[test]
fn damaged_files_are_images_or_errors() {
    let _guard = ONE_AT_A_TIME.lock();
    let seeds = fuzz::seeds(&goldens::dir().join("images"));
    let limits = Limits { max_pixels: 100_000, ..Limits::default() };
    let mut random = fuzz::Random(1);
    let mut decoded = 0;
    let (panicked, taken) = measured(|| {
        quietly(|| {
            for _ in 0..100_000 {
                decoded += usize::from(decode(&fuzz::mutated(&mut random, &seeds), &limits).is_ok());
            }
        })
    });
    assert!(!panicked);
    assert!(decoded > 10_000, "only {decoded} decoded");
    // 15 bytes a pixel; a partition of a WebP may say that it has 16 MiB.
    assert!(taken < 20 * MIB, "{taken} bytes");
}

/// Each of them would take time over the whole image.
#[test]
fn more_scans_than_any_image_needs_are_refused() {
    let jpeg = fs::read(goldens::dir().join("images/420-progressive.jpg")).unwrap();
    let last = jpeg.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
    let scan = jpeg[last..jpeg.len() - 2].to_vec();
    let mut bytes = jpeg;
    for _ in 0..100 {
        bytes.splice(last..last, scan.iter().copied());
    }
    let error = decode(&bytes, &Limits::default()).unwrap_err().to_string();
    assert!(error.contains("scans, more than 100"), "{error}");
}

/// The PNG decoder panics over such palettes.
#[test]
fn a_panic_inside_a_decoder_is_an_error() {
    let _guard = ONE_AT_A_TIME.lock();
    let mut bytes = fs::read(goldens::dir().join("images/p.png")).unwrap();
    let length = bytes.windows(4).position(|kind| kind == b"PLTE").unwrap() - 4;
    let old = u32::from_be_bytes(bytes[length..length + 4].try_into().unwrap()) as usize;
    bytes.splice(length + 8 + 1..length + 8 + old, []);
    bytes[length..length + 4].copy_from_slice(&1_u32.to_be_bytes());
    fuzz::mend_checksums(&mut bytes);
    let mut result = None;
    assert!(!quietly(|| result = Some(decode(&bytes, &Limits::default()))));
    let error = result.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("the PNG file cannot be decoded"), "{error}");
}

/// Whether a panic came out. Panics that are caught inside print nothing.
fn quietly(run: impl FnOnce()) -> bool {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    panic::set_hook(hook);
    result.is_err()
}
