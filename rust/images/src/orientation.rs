//! How a camera was held, as EXIF and XMP say it.

use image::metadata::Orientation;

use crate::RgbImage;

/// The orientation of an EXIF block, or else of an XMP packet: the first `tiff:Orientation` in it. Pillow looks in the same
/// order.
pub(crate) fn orientation(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Orientation {
    let exif = exif.map(|exif| exif.strip_prefix(b"Exif\0\0").unwrap_or(exif));
    exif.and_then(Orientation::from_exif_chunk).or_else(|| xmp.and_then(of_xmp)).unwrap_or(Orientation::NoTransforms)
}

fn of_xmp(xmp: &[u8]) -> Option<Orientation> {
    const KEY: &[u8] = b"tiff:Orientation";
    xmp.windows(KEY.len()).enumerate().filter(|(_, window)| *window == KEY).find_map(|(at, _)| {
        let value = &xmp[at + KEY.len()..];
        let value = value.strip_prefix(b"=\"").or_else(|| value.strip_prefix(b">"))?;
        Orientation::from_exif(value.first()?.checked_sub(b'0')?)
    })
}

/// Turns the image upright, as Pillow's `ImageOps.exif_transpose` does.
pub(crate) fn upright(image: RgbImage, orientation: Orientation) -> RgbImage {
    match orientation {
        Orientation::NoTransforms => image,
        Orientation::FlipHorizontal => image.mirrored(),
        Orientation::FlipVertical => image.flipped(),
        Orientation::Rotate180 => image.mirrored().flipped(),
        Orientation::Rotate90FlipH => image.transposed(),
        Orientation::Rotate90 => image.transposed().mirrored(),
        Orientation::Rotate270 => image.transposed().flipped(),
        Orientation::Rotate270FlipH => image.transposed().mirrored().flipped(),
    }
}
