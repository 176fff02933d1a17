//! JPEG, by the library that Pillow uses: other decoders differ by up to five levels.

use mozjpeg::{ColorSpace, Decompress, Marker};

use crate::{
    ImageError, Limits, RgbImage,
    decode::malformed,
    orientation::{orientation, upright},
};

const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
/// Files have about ten, and each takes time over the whole image, even if it is empty.
const MAX_SCANS: usize = 100;

/// libjpeg reports fatal errors by unwinding with a text; the caller catches it.
pub(crate) fn decode(bytes: &[u8], limits: &Limits) -> Result<RgbImage, ImageError> {
    let failed = |error| malformed("JPEG", error);
    let decompress = Decompress::with_markers(&[Marker::APP(1)]).from_mem(bytes).map_err(failed)?;
    let (width, height) = (decompress.width(), decompress.height());
    limits.check(width as u32, height as u32)?;
    // libjpeg makes up what is missing at the end of a file; Pillow refuses it.
    let scans = scans(bytes).ok_or_else(|| malformed("JPEG", "it ends too early"))?;
    if scans > MAX_SCANS {
        return Err(malformed("JPEG", format!("it has {scans} scans, more than {MAX_SCANS}")));
    }
    let (mut exif, mut xmp) = (None, None);
    for data in decompress.markers().map(|marker| marker.data) {
        if data.starts_with(b"Exif\0\0") {
            exif = exif.or(Some(data.to_vec()));
        } else {
            xmp = xmp.or(data.strip_prefix(XMP).map(<[u8]>::to_vec));
        }
    }
    let four = matches!(decompress.color_space(), ColorSpace::JCS_CMYK | ColorSpace::JCS_YCCK);
    let pixels = if four {
        let mut started = decompress.to_colorspace(ColorSpace::JCS_CMYK).map_err(failed)?;
        let values: Vec<u8> = started.read_scanlines().map_err(failed)?;
        values.chunks_exact(4).flat_map(|pixel| of_cmyk([pixel[0], pixel[1], pixel[2], pixel[3]])).collect()
    } else {
        decompress.rgb().map_err(failed)?.read_scanlines().map_err(failed)?
    };
    let image = RgbImage::new(width as u32, height as u32, pixels)?;
    Ok(upright(image, orientation(exif.as_deref(), xmp.as_deref())))
}

/// How many scans there are before the end of the image. `None` where there is no end.
fn scans(bytes: &[u8]) -> Option<usize> {
    const STANDALONE: u8 = 0x01;
    let (mut at, mut scans) = (0, 0);
    loop {
        // A byte of 0xff with 0 behind it is one of the coded data.
        at += bytes.get(at..)?.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff))? + 2;
        match bytes[at - 1] {
            0xd9 => return Some(scans),
            STANDALONE | 0xd0..=0xd8 => {}
            marker => {
                scans += usize::from(marker == 0xda);
                at += usize::from(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
            }
        }
    }
}

/// Pillow's arithmetic. Inks are inverted, as Adobe writes them; Pillow takes that for granted.
fn of_cmyk(inks: [u8; 4]) -> [u8; 3] {
    let [c, m, y, k] = inks.map(|ink| 255 - ink);
    let light = u32::from(255 - k);
    [c, m, y].map(|ink| {
        let product = u32::from(ink) * light + 128;
        light.saturating_sub((product + (product >> 8)) >> 8) as u8
    })
}
