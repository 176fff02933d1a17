//! JPEG, by the library that Pillow uses: other decoders differ by up to five levels.

use mozjpeg::{ColorSpace, Decompress, Marker};

use crate::{
    ImageError, Limits, RgbImage,
    decode::malformed,
    orientation::{orientation, upright},
};

const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
const START_OF_SCAN: [u8; 2] = [0xff, 0xda];
const END_OF_IMAGE: [u8; 2] = [0xff, 0xd9];

/// libjpeg reports fatal errors by unwinding with a text; the caller catches it.
pub(crate) fn decode(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let failed = |error| malformed("JPEG", error);
    let decompress = Decompress::with_markers(&[Marker::APP(1), Marker::APP(14)]).from_mem(bytes).map_err(failed)?;
    let (width, height) = (decompress.width(), decompress.height());
    limits.check(width as u32, height as u32)?;
    // libjpeg makes up what is missing at the end of a file; Pillow refuses it.
    let last = |marker: [u8; 2]| bytes.windows(2).rposition(|pair| pair == marker);
    if last(END_OF_IMAGE) < last(START_OF_SCAN) {
        return Err(malformed("JPEG", "it ends too early"));
    }
    let (mut exif, mut xmp, mut adobe) = (None, None, false);
    for marker in decompress.markers() {
        match (marker.marker, marker.data) {
            (Marker::APP(1), data) if data.starts_with(b"Exif\0\0") => exif = exif.or(Some(data.to_vec())),
            (Marker::APP(1), data) => xmp = xmp.or(data.strip_prefix(XMP).map(<[u8]>::to_vec)),
            (_, data) => adobe |= data.starts_with(b"Adobe"),
        }
    }
    let four = matches!(decompress.color_space(), ColorSpace::JCS_CMYK | ColorSpace::JCS_YCCK);
    let pixels = if four {
        let mut started = decompress.to_colorspace(ColorSpace::JCS_CMYK).map_err(failed)?;
        let values: Vec<u8> = started.read_scanlines().map_err(failed)?;
        values.chunks_exact(4).flat_map(|pixel| of_cmyk([pixel[0], pixel[1], pixel[2], pixel[3]], adobe)).collect()
    } else {
        decompress.rgb().map_err(failed)?.read_scanlines().map_err(failed)?
    };
    let image = RgbImage::new(width as u32, height as u32, pixels)?;
    Ok(upright(image, orientation(exif.as_deref(), xmp.as_deref())))
}

/// Pillow's arithmetic. Adobe's files have inks inverted.
fn of_cmyk(inks: [u8; 4], adobe: bool) -> [u8; 3] {
    let [c, m, y, k] = if adobe { inks.map(|ink| 255 - ink) } else { inks };
    let light = u32::from(255 - k);
    [c, m, y].map(|ink| {
        let product = u32::from(ink) * light + 128;
        light.saturating_sub((product + (product >> 8)) >> 8) as u8
    })
}
