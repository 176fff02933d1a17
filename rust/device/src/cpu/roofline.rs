//! How fast this machine reads memory, the roof of decoding, which streams every weight once a token; and how fast it multiplies
//! by tiles, the roof of prompts where there is AMX.

#[cfg(target_arch = "x86_64")]
#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;
use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{Isa, ThreadPool};
use crate::{DeviceError, mmap::Pages};

/// Bytes a worker claims at a time; a huge page.
const GRAIN: usize = 2 << 20;
/// Bytes ahead of use that memory is prefetched.
const AHEAD: usize = 2048;
/// Passes over the buffer that are timed at least, and for how long.
const MIN_PASSES: usize = 5;
const MIN_TIME: Duration = Duration::from_millis(500);

/// What [`read_bandwidth`] measured, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadBandwidth {
    /// The median pass.
    pub median: f64,
    /// The fastest pass.
    pub best: f64,
}

/// Memory that is read to measure bandwidth.
pub struct ReadBuffer {
    pages: Pages<u64>,
    /// Words in use, whole pages of 2 MiB.
    words: usize,
    /// The word that is read next.
    next: usize,
}

impl ReadBuffer {
    /// A buffer of `bytes`, rounded up to whole pages of 2 MiB, on huge pages where the system has them.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        let words = bytes.max(1).div_ceil(GRAIN).checked_mul(GRAIN / size_of::<u64>());
        let words = words.ok_or_else(|| DeviceError::Shape(format!("a buffer of {bytes} bytes overflows")))?;
        let mut pages = Pages::<u64>::zeroed(words)?;
        pages.advise_huge();
        // Untouched pages would all be the one zero page.
        (0..).zip(pages.as_mut_slice()).for_each(|(i, word)| *word = i);
        Ok(Self { pages, words, next: 0 })
    }

    /// Bytes of the buffer.
    pub fn len_bytes(&self) -> usize {
        self.words * size_of::<u64>()
    }

    /// Reads the next `bytes`, at most the whole buffer, with all workers of `pool` and the loads of `isa`; returns the seconds
    /// it took.
    pub fn read(&mut self, pool: &ThreadPool, isa: Isa, bytes: usize) -> f64 {
        let words = (bytes / size_of::<u64>()).min(self.words);
        if self.next + words > self.words {
            self.next = 0;
        }
        let part = &self.pages.as_slice()[self.next..self.next + words];
        self.next += words;
        let grain = (GRAIN / size_of::<u64>()).min(words.div_ceil(8 * pool.num_threads()).next_multiple_of(512));
        let (start, sum) = (Instant::now(), AtomicU64::new(0));
        pool.for_each_range(words, grain, &|a, b| {
            sum.fetch_xor(xor(isa, &part[a..b]), Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        std::hint::black_box(sum.into_inner());
        seconds
    }
}

/// Reads a buffer of `bytes` (rounded up to whole pages of 2 MiB) again and again with all workers of `pool` and the loads of
/// `isa`.
pub fn read_bandwidth(pool: &ThreadPool, isa: Isa, bytes: usize) -> Result<ReadBandwidth, DeviceError> {
    let mut buffer = ReadBuffer::new(bytes)?;
    let mut seconds = Vec::new();
    let start = Instant::now();
    while seconds.len() < MIN_PASSES || start.elapsed() < MIN_TIME {
        seconds.push(buffer.read(pool, isa, buffer.len_bytes()));
    }
    seconds.sort_by(f64::total_cmp);
    let rate = |seconds: f64| buffer.len_bytes() as f64 / seconds;
    Ok(ReadBandwidth { median: rate(seconds[seconds.len() / 2]), best: rate(seconds[0]) })
}

/// Operations a second of tile products on operands in the level 1 cache, four loads for four products, all workers of `pool`
/// together: the fastest pass. `None` without AMX.
pub fn tile_flops(pool: &ThreadPool) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::{
            Amx,
            amx::{ActTile, K_TILE, PANEL, Tiles, WeightTile},
        };
        /// On cache lines, as those of weights are.
        #[repr(align(64))]
        struct Operands {
            w: WeightTile,
            a: ActTile,
        }
        // Some milliseconds of a processor; of the model of one as long.
        let products = if cfg!(any(test, amx_model)) { 1 << 8 } else { 1 << 16 };
        let amx = Amx::detect()?;
        let operands = Operands { a: [0; _], w: [0; _] };
        let pass = || {
            let start = Instant::now();
            pool.for_each_share(pool.num_threads(), 1, &|_, start, end| {
                let mut tiles = Tiles::new(amx);
                for _ in start..end {
                    tiles.zero();
                    for _ in 0..products {
                        tiles.multiply(amx.has_fp16(), [&operands.a, &operands.a], &operands.w);
                    }
                }
            });
            start.elapsed().as_secs_f64()
        };
        let (start, mut best) = (Instant::now(), pass());
        while start.elapsed() < MIN_TIME {
            best = best.min(pass());
        }
        Some((pool.num_threads() * products * 2 * PANEL * PANEL * K_TILE) as f64 / best)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = pool;
        None
    }
}

/// A size that no cache holds: twice the last-level cache and at least 1 GB, but at most half of the memory that is available.
pub fn beyond_caches() -> usize {
    let wanted = last_level_cache(Path::new("/sys/devices/system/cpu/cpu0/cache")).saturating_mul(2).max(1_000_000_000);
    wanted.min(usize::try_from(crate::host_memory().available_bytes / 2).unwrap_or(usize::MAX))
}

/// Bytes of the largest cache that the system tells of, 0 when it tells of none.
fn last_level_cache(caches: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(caches) else { return 0 };
    let sizes = entries.filter_map(|entry| {
        let text = std::fs::read_to_string(entry.ok()?.path().join("size")).ok()?;
        text.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
    });
    sizes.max().unwrap_or(0)
}

/// All words, xored.
fn xor(isa: Isa, words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    match isa.min(Isa::detect()) {
        // SAFETY: both ISAs have AVX-512.
        Isa::Avx512 | Isa::Amx => return unsafe { xor_avx512(words) },
        // SAFETY: the machine has the ISA.
        Isa::Avx2 => return unsafe { xor_avx2(words) },
        Isa::Scalar => {}
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = isa;
    words.iter().fold(0, |sum, word| sum ^ word)
}

/// Four lines at a time, in as many registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn xor_avx512(words: &[u64]) -> u64 {
    let (lines, rest) = words.as_chunks::<32>();
    let mut sums = [_mm512_setzero_si512(); 4];
    for four in lines {
        for (sum, line) in sums.iter_mut().zip(four.as_chunks::<8>().0) {
            // A prefetch may be of any address.
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_byte_add(AHEAD).cast());
            // SAFETY: a line is 64 bytes.
            *sum = _mm512_xor_si512(*sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
        }
    }
    let mut lanes = [0_u64; 8];
    let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
    // SAFETY: `lanes` is 64 bytes.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
    xor(Isa::Scalar, &lanes) ^ xor(Isa::Scalar, rest)
}

/// Four lines at a time, half a line a register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn xor_avx2(words: &[u64]) -> u64 {
    let (lines, rest) = words.as_chunks::<32>();
    let mut sums = [_mm256_setzero_si256(); 8];
    for four in lines {
        for (sums, line) in sums.as_chunks_mut::<2>().0.iter_mut().zip(four.as_chunks::<8>().0) {
            // A prefetch may be of any address.
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_byte_add(AHEAD).cast());
            for (sum, half) in sums.iter_mut().zip(line.as_chunks::<4>().0) {
                // SAFETY: half a line is 32 bytes.
                *sum = _mm256_xor_si256(*sum, unsafe { _mm256_loadu_si256(half.as_ptr().cast()) });
            }
        }
    }
    let mut lanes = [0_u64; 4];
    let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
    // SAFETY: `lanes` is 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
    xor(Isa::Scalar, &lanes) ^ xor(Isa::Scalar, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isa_reads_every_word() {
        for len in [0, 1, 31, 32, 33, 100, 256] {
            for changed in 0..len {
                let mut words: Vec<u64> = (0..len as u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
                words[changed] ^= 1 << (changed % 64);
                let expected = words.iter().fold(0, |sum, word| sum ^ word);
                for isa in Isa::ALL {
                    assert_eq!(xor(isa, &words), expected, "{} of {len} words", isa.name());
                }
            }
        }
    }

    #[test]
    fn a_buffer_is_read_at_a_speed() {
        let measured = read_bandwidth(&ThreadPool::new(2).unwrap(), Isa::detect(), 3 << 20).unwrap();
        assert!(measured.median > 0.0 && measured.best >= measured.median, "{measured:?}");
        assert!(read_bandwidth(&ThreadPool::new(1).unwrap(), Isa::Scalar, usize::MAX).is_err());
    }

    #[test]
    fn tiles_multiply_at_a_speed_where_there_are_any() {
        let flops = tile_flops(&ThreadPool::new(2).unwrap());
        assert!(flops.is_none_or(|flops| flops > 0.0) && flops.is_some() == (Isa::detect() == Isa::Amx), "{flops:?}");
    }

    #[test]
    fn the_largest_cache_is_the_last_level() {
        let caches = std::env::temp_dir().join(format!("mistral-paged-caches-{}", std::process::id()));
        for (index, size) in ["48K\n", "2048K\n", "491520K\n", "unknown\n"].iter().enumerate() {
            std::fs::create_dir_all(caches.join(format!("index{index}"))).unwrap();
            std::fs::write(caches.join(format!("index{index}/size")), size).unwrap();
        }
        assert_eq!(last_level_cache(&caches), 480 << 20);
        std::fs::remove_dir_all(&caches).unwrap();
        assert_eq!(last_level_cache(&caches), 0);
    }
}
