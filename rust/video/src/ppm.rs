//! Images as ffmpeg writes them into a pipe: PPM (`P6`), one behind the other.

use std::io::{self, BufRead};

use images::RgbImage;

/// Characters of a header at most.
const MAX_HEADER: usize = 64;

/// The next image of a stream, of so many pixels at most; `None` at its end.
///
/// # Errors
/// For a stream that is something else, and one that ends within an image.
pub(crate) fn read(stream: &mut impl BufRead, max_pixels: u64) -> io::Result<Option<RgbImage>> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the program's output {what}"));
    if stream.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let mut left = MAX_HEADER;
    if word(stream, &mut left)? != b"P6" {
        return Err(wrong("is no PPM image"));
    }
    let mut number = || {
        let word = word(stream, &mut left)?;
        let number = std::str::from_utf8(&word).ok().and_then(|word| word.parse::<u32>().ok());
        number.ok_or_else(|| wrong("has no size"))
    };
    let (width, height, levels) = (number()?, number()?, number()?);
    let pixels = u64::from(width) * u64::from(height);
    if levels != 255 || pixels == 0 || pixels > max_pixels {
        return Err(wrong(&format!("has an image of {width} x {height} pixels and {levels} levels")));
    }
    let mut values = vec![0; usize::try_from(pixels * 3).map_err(|_| wrong("is too large"))?];
    stream.read_exact(&mut values)?;
    RgbImage::new(width, height, values).map(Some).map_err(|why| wrong(&why.to_string()))
}

/// The bytes up to the next blank, which is taken as well.
fn word(stream: &mut impl BufRead, left: &mut usize) -> io::Result<Vec<u8>> {
    let mut word = Vec::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        *left = left.checked_sub(1).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        if byte[0].is_ascii_whitespace() {
            return Ok(word);
        }
        word.push(byte[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_follow_each_other() {
        let mut stream = &b"P6\n2 1\n255\n\x01\x02\x03\x04\x05\x06P6\n1 1\n255\n\x07\x08\x09"[..];
        let first = read(&mut stream, 2).unwrap().unwrap();
        assert_eq!((first.width(), first.height(), first.pixels()), (2, 1, &[1, 2, 3, 4, 5, 6][..]));
        assert_eq!(read(&mut stream, 2).unwrap().unwrap().pixels(), [7, 8, 9]);
        assert!(read(&mut stream, 2).unwrap().is_none());
    }

    #[test]
    fn what_is_no_image_is_an_error() {
        let long = [b"P6\n".to_vec(), vec![b'1'; 100]].concat();
        for stream in [
            &b"P5\n1 1\n255\n\x01"[..],
            b"P6\n4 4\n255\n",
            b"P6\n1 1\n255\n\x01",
            b"P6\n0 1\n255\n",
            b"P6\n1 1\n65535\n\x01",
            b"P6\n4294967295 4294967295\n255\n",
            b"P6\n-1 1\n255\n",
            b"P6\n1",
            &long,
        ] {
            assert!(read(&mut &stream[..], 8).is_err(), "{stream:?}");
        }
    }
}
