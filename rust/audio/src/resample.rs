//! Other rates: a low-pass filter, read where samples of the other rate lie.

use std::f64::consts::PI;

/// Zeros of the sinc function on each side of its middle.
const NUM_ZEROS: f64 = 64.0;
/// Where the filter cuts, of half the lower rate.
const ROLLOFF: f64 = 0.947;
/// Places between two samples of which weights are kept; those between are interpolated, for rates that are no usual ones.
const MAX_PHASES: u64 = 2048;
/// Of the Kaiser window: what is cut comes through with less than -120 dB.
const BETA: f64 = 14.77;

/// The samples of a sound at another rate. It has as many as begin within the sound, so `ceil(len * to / from)`.
///
/// Each is a sum over [`NUM_ZEROS`] zeros of a sinc function on each side, under a Kaiser window, as libraries of the best
/// quality have them (librosa's `soxr_hq` and `kaiser_best`).
pub(crate) fn resample(samples: &[f32], from: u32, to: u32) -> Vec<f32> {
    if from == to {
        return samples.to_vec();
    }
    let divisor = gcd(from, to);
    let (up, down) = (u64::from(to / divisor), u64::from(from / divisor));
    let num_out = (samples.len() as u64 * up).div_ceil(down) as usize;
    let cutoff = ROLLOFF * (f64::from(to) / f64::from(from)).min(1.0);
    let reach = (NUM_ZEROS / cutoff).ceil() as i64;
    let sum = |at: usize, taps: &[f32]| {
        let first = (at as u64 * down / up) as i64 - reach;
        let taps = taps.get((-first).max(0) as usize..).unwrap_or_default();
        let inside = &samples[(first.max(0) as usize).min(samples.len())..];
        taps.iter().zip(inside).map(|(tap, sample)| f64::from(*tap) * f64::from(*sample)).sum::<f64>()
    };
    // How far an output lies behind the sample before it.
    let fraction = |at: usize| (at as u64 * down % up) as f64 / up as f64;
    if up <= MAX_PHASES {
        // Outputs `up` apart lie equally between samples.
        let phases: Vec<_> = (0..num_out.min(up as usize)).map(|at| phase(fraction(at), cutoff, reach)).collect();
        return (0..num_out).map(|at| sum(at, &phases[at % phases.len()]) as f32).collect();
    }
    let phases: Vec<_> = (0..=MAX_PHASES).map(|at| phase(at as f64 / MAX_PHASES as f64, cutoff, reach)).collect();
    let output = |at: usize| {
        let place = fraction(at) * MAX_PHASES as f64;
        let (before, behind) = (place as usize, place.fract());
        ((1.0 - behind) * sum(at, &phases[before]) + behind * sum(at, &phases[before + 1])) as f32
    };
    (0..num_out).map(output).collect()
}

/// Weights of the samples from `reach` before to `reach` behind, for a place that lies `fraction` behind one of them.
fn phase(fraction: f64, cutoff: f64, reach: i64) -> Vec<f32> {
    let most = bessel(BETA);
    let weight = |at: i64| {
        let x = (at as f64 - fraction) * cutoff;
        let within = 1.0 - (x / NUM_ZEROS).powi(2);
        if within <= 0.0 {
            return 0.0;
        }
        let sinc = if x == 0.0 { 1.0 } else { (PI * x).sin() / (PI * x) };
        (cutoff * sinc * bessel(BETA * within.sqrt()) / most) as f32
    };
    (-reach..=reach + 1).map(weight).collect()
}

/// The modified Bessel function of the first kind of order 0.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..200 {
        term *= (x / 2.0 / f64::from(k)).powi(2);
        sum += term;
        if term < sum * 1e-17 {
            break;
        }
    }
    sum
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(rate: u32, hertz: f64, len: usize) -> Vec<f32> {
        (0..len).map(|at| (2.0 * PI * hertz * at as f64 / f64::from(rate)).sin() as f32).collect()
    }

    #[test]
    fn a_tone_stays_what_it_is() {
        for (from, to) in
            [(44_100, 16_000), (8000, 16_000), (48_000, 16_000), (22_050, 16_000), (11_025, 16_000), (16_001, 16_000)]
        {
            let (given, wanted) = (tone(from, 440.0, from as usize), tone(to, 440.0, to as usize));
            let got = resample(&given, from, to);
            assert_eq!(got.len(), wanted.len(), "{from}");
            let inner = 1000..to as usize - 1000;
            let most = got[inner.clone()].iter().zip(&wanted[inner]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 2e-6, "{from}: {most}");
        }
    }

    #[test]
    fn what_a_lower_rate_cannot_have_is_gone() {
        let got = resample(&tone(44_100, 9000.0, 44_100), 44_100, 16_000);
        let most = got[1000..15_000].iter().map(|value| value.abs()).fold(0.0, f32::max);
        assert!(most < 2e-6, "{most}");
        assert_eq!(resample(&[1.0], 44_100, 16_000).len(), 1);
        assert_eq!(resample(&[0.5; 3], 8000, 16_000).len(), 6);
    }
}
