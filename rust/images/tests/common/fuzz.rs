//! Images with damage.
#![allow(dead_code, reason = "each user has a use for a part")]

use std::{fs, path::Path};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// Less than `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// The images of a folder, without those that are slow by design, in the order of their names.
pub fn seeds(dir: &Path) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending != "json") && !path.display().to_string().contains("bomb-"));
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// One to eight changes of a random seed: bytes, numbers, cuts, repeats, parts of another. Headers are hit as often as the rest.
pub fn mutated(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(8) {
        if bytes.is_empty() {
            break;
        }
        let reach = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(80) };
        let at = random.below(reach);
        match random.below(7) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            3 => {
                let number = [0_u32, 1, 0xffff, 0x7fff_ffff, u32::MAX][random.below(5)].to_be_bytes();
                let end = bytes.len().min(at + 4);
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            4 => bytes.truncate(at),
            5 => {
                let end = bytes.len().min(at + random.below(200));
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                let part = other[from..other.len().min(from + random.below(200))].to_vec();
                let end = bytes.len().min(at + part.len());
                bytes.splice(at..end, part);
            }
        }
    }
    if random.below(4) > 0 {
        mend_checksums(&mut bytes);
    }
    bytes
}

/// A PNG decoder would look at nothing behind a wrong checksum.
pub fn mend_checksums(bytes: &mut [u8]) {
    if !bytes.starts_with(b"\x89PNG") {
        return;
    }
    let mut at = 8;
    while let Some(length) = bytes.get(at..at + 4) {
        let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
        let Some(covered) = bytes.get(at + 4..).and_then(|rest| rest.get(..length.saturating_add(4))) else { return };
        let checksum = crc32(covered).to_be_bytes();
        at += 8 + length;
        let Some(place) = bytes.get_mut(at..at + 4) else { return };
        place.copy_from_slice(&checksum);
        at += 4;
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}
