//! Resizing against Pillow's, bit for bit: digests of 500 results, which tests/oracle.py wrote.

mod common;

use images::{Filter, ImageError, RgbImage, resize};

fn edge(first: u32, second: u32) -> usize {
    [1, 1 + second % 8, 1 + second % 300, 1 + second % 100, 1 + second % 40][first as usize % 5] as usize
}

#[test]
fn five_hundred_images_are_resized_as_pillow_does() {
    let digests: Vec<_> = include_str!("data/resized.txt").lines().collect();
    assert_eq!(digests.len(), 500);
    for (case, digest) in digests.into_iter().enumerate() {
        let draw = |at| edge(common::noise(at, case), common::noise(at + 1, case));
        let (width, height, to) = (draw(0), draw(2), (draw(6), draw(4)));
        let filter = Filter::from_number(case as u64 % 6).unwrap();
        let result = resize(&common::image(case, width, height), to, filter).unwrap();
        assert_eq!((result.height() as usize, result.width() as usize), to);
        assert_eq!(
            common::digest(result.pixels().iter().copied()),
            digest,
            "case {case}: {width} x {height} to {to:?} by {filter:?}"
        );
    }
}

#[test]
fn a_size_of_nothing_or_of_too_much_is_refused() {
    let image = RgbImage::new(100, 4000, vec![0; 1_200_000]).unwrap();
    assert!(matches!(resize(&image, (0, 5), Filter::Bilinear), Err(ImageError::Unfit { .. })));
    assert!(matches!(resize(&image, (1 << 14, 1 << 14), Filter::Bilinear), Err(ImageError::TooManyPixels { .. })));
    // Not the result is too large, but what lies between the passes.
    assert!(matches!(resize(&image, (1, 1 << 16), Filter::Bilinear), Err(ImageError::TooManyPixels { .. })));
}
