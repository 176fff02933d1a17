//! The portable ISA: eight lanes in an array.

use half::{bf16, f16};

use super::Simd;
use crate::cpu::Isa;
use crate::kv_codes::E4M3_VALUES;

/// Portable code.
pub(crate) struct Scalar;

const LANES: usize = 8;
type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    const ISA: Isa = Isa::Scalar;
    const LANES: usize = LANES;
    const ROWS: usize = 2;
    type V = V;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        p.cast::<V>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        p.cast::<V>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        p.cast::<[u16; LANES]>().read_unaligned().map(|x| f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        p.cast::<[u16; LANES]>().read_unaligned().map(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (V, V) {
        let pairs = p.cast::<[[u16; 2]; LANES]>().read_unaligned();
        (pairs.map(|[even, _]| f32::from_bits(u32::from(even) << 16)), pairs.map(|[_, odd]| f32::from_bits(u32::from(odd) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16_pairs(p: *const u16) -> (V, V) {
        let pairs = p.cast::<[[u16; 2]; LANES]>().read_unaligned();
        (pairs.map(|[even, _]| f16::from_bits(even).to_f32()), pairs.map(|[_, odd]| f16::from_bits(odd).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> V {
        p.cast::<[i8; LANES]>().read_unaligned().map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        p.cast::<[u8; LANES]>().read_unaligned().map(|code| E4M3_VALUES[usize::from(code)] * (1.0 / 256.0))
    }
    #[inline(always)]
    unsafe fn unpack_bf16(v: V, i: usize) -> V {
        v.map(|x| f32::from_bits(x.to_bits() >> (16 * i) << 16))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: V) {
        p.cast::<[u16; LANES]>().write_unaligned(v.map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits()));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: V) {
        p.cast::<[u16; LANES]>().write_unaligned(v.map(|x| bf16::from_f32(x).to_bits()));
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(v: V) -> V {
        // Adding 1.5 * 2^23 pushes the fraction out; inputs are below 2^22.
        v.map(|x| (x + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    unsafe fn scale2(v: V, n: V) -> V {
        zip(v, n, |v, n| v * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn zero_below(v: V, x: V, limit: V) -> V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn select_below(a: V, b: V, x: V, y: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    unsafe fn reaches(v: V, limit: V) -> u32 {
        (0..LANES).fold(0, |bits, i| bits | u32::from(v[i] >= limit[i]) << i)
    }
    #[inline(always)]
    unsafe fn reduce_max(v: V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn reduce_add(v: V) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
}
