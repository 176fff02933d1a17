//! A block outside the pool: a header that says exactly what it is, the block's bytes, and a checksum of both.
//!
//! ```text
//! magic 8 | version u32 | space 32 | key 32 | parent 32 | group u32 | index u32 | num_tokens u32 | tokens u32... |
//! payload bytes u64 | payload | BLAKE3 of all before, 32
//! ```
//!
//! Numbers are little-endian. Whoever reads a record knows every byte of the header it must have, so nothing in a file is
//! ever parsed or trusted: a record is the expected one or it is refused.

use std::ops::Range;

use paged::{TierBlock, TierRecordId};

const MAGIC: &[u8; 8] = b"MPKVTIER";
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 32;
const VERSION_AT: Range<usize> = 8..12;
const SPACE_AT: Range<usize> = 12..44;

/// How the records of one model and KV layout are written.
#[derive(Clone, Debug)]
pub struct RecordFormat {
    /// Digest of all that KV depends on besides the request.
    pub space: [u8; 32],
    /// Tokens a block.
    pub block_size: usize,
    /// Bytes of a block.
    pub payload_bytes: usize,
}

impl RecordFormat {
    /// Bytes of a whole record.
    pub fn record_bytes(&self) -> u64 {
        (self.header_bytes() + self.payload_bytes + CHECKSUM_BYTES) as u64
    }

    /// Bytes before the payload.
    pub fn header_bytes(&self) -> usize {
        SPACE_AT.end + 2 * 32 + 3 * 4 + 4 * self.block_size + 8
    }

    /// The header that the record of `block` has.
    pub fn header(&self, block: &TierBlock) -> Vec<u8> {
        let mut header = Vec::with_capacity(self.header_bytes());
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend(self.space);
        header.extend(block.id.key.0);
        header.extend(block.parent.0);
        for number in [block.id.group, block.index, block.tokens.len() as u32] {
            header.extend(number.to_le_bytes());
        }
        header.extend(block.tokens.iter().flat_map(|token| token.to_le_bytes()));
        header.extend((self.payload_bytes as u64).to_le_bytes());
        header
    }
}

/// What stands at the end of a record.
pub fn checksum(header: &[u8], payload: &[u8]) -> [u8; CHECKSUM_BYTES] {
    *blake3::Hasher::new().update(header).update(payload).finalize().as_bytes()
}

/// Compares what was read with what must stand there.
///
/// # Errors
/// What is wrong with the record, in words.
pub fn verify(expected: &[u8], header: &[u8], payload: &[u8], sum: [u8; CHECKSUM_BYTES]) -> Result<(), &'static str> {
    let differs = |at: Range<usize>| header.get(at.clone()) != expected.get(at);
    if differs(0..MAGIC.len()) {
        return Err("it is not a KV record");
    }
    if differs(VERSION_AT) {
        return Err("it is of another version of the format");
    }
    if differs(SPACE_AT) {
        return Err("it is of another model or KV layout");
    }
    if header != expected {
        return Err("it is the record of another block");
    }
    if checksum(header, payload) != sum {
        return Err("its checksum is wrong");
    }
    Ok(())
}

/// The name of a record's file.
pub fn file_name(id: TierRecordId) -> String {
    format!("{}-{}.kv", hex(&id.key.0), id.group)
}

/// The record that a file is named for, if it is named as one.
pub fn parse_file_name(name: &str) -> Option<TierRecordId> {
    let (key, group) = name.strip_suffix(".kv")?.split_once('-')?;
    let bytes: Vec<u8> = key.as_bytes().chunks(2).map(hex_byte).collect::<Option<_>>()?;
    let id = TierRecordId { key: paged::TierKey(bytes.try_into().ok()?), group: group.parse().ok()? };
    (file_name(id) == name).then_some(id)
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn hex_byte(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}
