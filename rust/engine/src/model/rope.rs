//! Rotary position embeddings (Su et al. 2021, `RoFormer`) and the ways to stretch them.

use std::{f64::consts::TAU, sync::Arc};

use device::{RopeStyle, RopeTable};

use super::config::{DecoderConfig, positive};
use crate::EngineError;

/// One kind of rotation.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Pairing of the elements.
    pub style: RopeStyle,
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that rotate.
    pub rotary_dim: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
    /// Which coordinates of a token it rotates by; `None`: a token has one, its position.
    pub axes: Option<RopeAxes>,
}

/// Rotation by three coordinates: time, row and column. Those of text are equal (M-RoPE of Qwen2-VL, arXiv:2409.12191).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeAxes {
    /// Pairs of elements that rotate by each.
    pub sections: [usize; 3],
    /// Pairs take turns, as far as the sections of rows and columns go (Qwen3-VL); else sections follow each other.
    pub takes_turns: bool,
}

impl RopeAxes {
    /// The coordinate that a pair of elements rotates by.
    fn axis(self, pair: usize) -> usize {
        let [time, rows, columns] = self.sections;
        if self.takes_turns {
            return if pair < 3 * [time, rows, columns][pair % 3] { pair % 3 } else { 0 };
        }
        usize::from(pair >= time) + usize::from(pair >= time + rows)
    }
}

/// How frequencies are stretched to longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency is divided by the factor.
    Linear(f64),
    /// Low frequencies are divided by the factor, high ones are not (Llama 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths over `original_max_positions / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_positions / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// Context length before stretching.
        original_max_positions: usize,
    },
    /// Low frequencies are divided by the factor, high ones are not, and those between by something between (Peng et al. 2023,
    /// `YaRN`, arXiv:2309.00071).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Turns over the original context from which frequencies are high.
        beta_fast: f64,
        /// Turns up to which they are low.
        beta_slow: f64,
        /// Context length before stretching.
        original_max_positions: usize,
        /// Whether the first and the last frequency between are whole numbers.
        truncate: bool,
        /// Multiplied into cosines and sines.
        attention_factor: f32,
    },
    /// Not at all, and elements turn the other way round (nanochat).
    Backwards,
    /// As many frequencies as this are what they are, and the others 0: those elements do not turn (Gemma 4).
    Partial(usize),
    /// Each frequency has its own divisor, `[rotary_dim / 2]`.
    Factors(Vec<f32>),
    /// Divisors for prompts within the original context and for longer ones (Ding et al. 2024, `LongRoPE`).
    LongRope {
        /// `[rotary_dim / 2]`.
        short: Vec<f32>,
        /// `[rotary_dim / 2]`.
        long: Vec<f32>,
        /// Context length before stretching.
        original_max_positions: usize,
        /// Multiplied into cosines and sines.
        attention_factor: f32,
    },
}

/// Which row of the rope tables stands for each position of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeRows {
    /// The row of position 0: the number of the request's table.
    pub first: u32,
    /// Rows a position.
    pub num_tables: u32,
}

impl Default for RopeRows {
    fn default() -> Self {
        Self { first: 0, num_tables: 1 }
    }
}

impl RopeRows {
    /// The row of a position, for `StepMetadata::rope_positions`. Positions are below [`MAX_SIZE`](super::config::MAX_SIZE) and
    /// there are two tables at most, so rows fit.
    pub fn row(self, position: usize) -> u32 {
        position as u32 * self.num_tables + self.first
    }
}

impl RopeConfig {
    /// How many tables this kind has.
    pub fn num_tables(&self) -> usize {
        if matches!(self.scaling, RopeScaling::LongRope { .. }) { 2 } else { 1 }
    }

    /// Which of them serves a request with such a prompt.
    pub fn table(&self, num_prompt_tokens: usize) -> usize {
        match self.scaling {
            RopeScaling::LongRope { original_max_positions, .. } => usize::from(num_prompt_tokens > original_max_positions),
            _ => 0,
        }
    }

    pub(crate) fn validate(&self, head_dim: usize) -> Result<(), String> {
        let dim = self.rotary_dim;
        if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
            return Err(format!(
                "{dim} elements of a head rotate; it must be an even number up to the head dimension {head_dim}"
            ));
        }
        let factors = |name: &str, values: &[f32]| {
            if values.len() != dim / 2 {
                return Err(format!("there are {} rope {name}, but {} rotating pairs", values.len(), dim / 2));
            }
            values.iter().try_for_each(|v| positive(&format!("rope {name}"), *v))
        };
        positive("rope base", self.theta)?;
        if let Some(axes) = self.axes {
            let pairs = axes.sections.iter().try_fold(0_usize, |sum, pairs| sum.checked_add(*pairs));
            if pairs != Some(dim / 2) {
                return Err(format!("sections of {:?} pairs are not the {} that rotate", axes.sections, dim / 2));
            }
        }
        match &self.scaling {
            RopeScaling::None | RopeScaling::Backwards => Ok(()),
            RopeScaling::Partial(turning) if (1..=dim / 2).contains(turning) => Ok(()),
            RopeScaling::Partial(turning) => Err(format!("{turning} of {} pairs turn", dim / 2)),
            RopeScaling::Linear(factor) => positive("rope factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                positive("rope factor", *factor)?;
                positive("rope low_freq_factor", *low_freq_factor)?;
                positive("original context length of the rope", *original_max_positions as f64)?;
                // Llama 4 has the same for both: nothing is between.
                if high_freq_factor == low_freq_factor {
                    return Ok(());
                }
                positive("distance of the rope high_freq_factor from low_freq_factor", high_freq_factor - low_freq_factor)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, attention_factor, .. } => {
                positive("rope factor", *factor)?;
                positive("rope beta_slow", *beta_slow)?;
                positive("distance of the rope beta_fast from beta_slow", beta_fast - beta_slow)?;
                positive("original context length of the rope", *original_max_positions as f64)?;
                positive("distance of the rope base from 1", self.theta - 1.0)?;
                positive("rope attention factor", *attention_factor)
            }
            RopeScaling::Factors(values) => factors("frequency factors", values),
            RopeScaling::LongRope { short, long, original_max_positions, attention_factor } => {
                positive("original context length of the rope", *original_max_positions as f64)?;
                factors("short factors", short)?;
                factors("long factors", long)?;
                positive("rope attention factor", *attention_factor)
            }
        }
    }

    /// Frequencies of a table, `[rotary_dim / 2]`, rounded to f32 as the models were trained with.
    pub(crate) fn frequencies(&self, table: usize) -> Vec<f32> {
        let divisors = match &self.scaling {
            RopeScaling::Factors(values) => Some(values),
            RopeScaling::LongRope { short, long, .. } => Some(if table == 0 { short } else { long }),
            _ => None,
        };
        let between = self.yarn_range();
        (0..self.rotary_dim / 2)
            .map(|i| {
                let plain = self.theta.powf(-((2 * i) as f64) / self.rotary_dim as f64);
                let frequency = match self.scaling {
                    RopeScaling::Linear(factor) => plain / factor,
                    RopeScaling::Backwards => -plain,
                    RopeScaling::Partial(turning) if i >= turning => 0.0,
                    RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_positions } => {
                        let turns = original_max_positions as f64 * plain / TAU;
                        let between = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                        let high_share = if high > low { between } else { f64::from(u8::from(turns >= low)) };
                        plain * (high_share + (1.0 - high_share) / factor)
                    }
                    RopeScaling::Yarn { factor, .. } => {
                        let low_share = ((i as f64 - between.0) / (between.1 - between.0)).clamp(0.0, 1.0);
                        plain / factor * low_share + plain * (1.0 - low_share)
                    }
                    _ => divisors.map_or(plain, |d| plain / f64::from(d[i])),
                };
                frequency as f32
            })
            .collect()
    }

    /// The indices of the last high and of the first low frequency of yarn.
    fn yarn_range(&self) -> (f64, f64) {
        let RopeScaling::Yarn { beta_fast, beta_slow, original_max_positions, truncate, .. } = self.scaling else {
            return (0.0, 1.0);
        };
        let index =
            |turns: f64| self.rotary_dim as f64 * (original_max_positions as f64 / (turns * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (index(beta_fast), index(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min((self.rotary_dim - 1) as f64));
        (low, if low == high { high + 0.001 } else { high })
    }

    /// Multiplied into cosines and sines.
    pub(crate) fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::LongRope { attention_factor, .. } | RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// The tables of one kind of rotation as far as positions have been used; see [`DecoderConfig::num_rope_tables`].
pub(crate) struct GrowingRope {
    rows: RopeTable,
    num_rows: usize,
    /// By table.
    frequencies: Vec<Vec<f32>>,
    max_positions: usize,
    factor: f32,
    axes: Option<RopeAxes>,
}

impl GrowingRope {
    /// Without rows at first. A kind with fewer tables than the model repeats its own.
    pub(crate) fn new(rope: &RopeConfig, config: &DecoderConfig) -> Self {
        Self {
            rows: RopeTable { style: rope.style, rotary_dim: rope.rotary_dim, cos: Arc::default(), sin: Arc::default() },
            num_rows: 0,
            frequencies: (0..config.num_rope_tables()).map(|table| rope.frequencies(table)).collect(),
            max_positions: config.max_position_embeddings,
            factor: rope.attention_factor(),
            axes: rope.axes,
        }
    }

    /// Bytes of the table of one kind once `num_rows` rows have been used.
    pub(crate) fn bytes(rope: &RopeConfig, config: &DecoderConfig, num_rows: usize) -> u64 {
        let rows = rows_to_make(num_rows, config.max_position_embeddings * config.num_rope_tables());
        rows as u64 * rope.rotary_dim as u64 * size_of::<f32>() as u64
    }

    /// Makes at least `num_rows` rows, and some more so that this happens seldom. An [`EngineError::Internal`] when there is no
    /// memory for them.
    pub(crate) fn grow(&mut self, num_rows: usize) -> Result<(), EngineError> {
        if num_rows <= self.num_rows {
            return Ok(());
        }
        let num_tables = self.frequencies.len();
        let end = rows_to_make(num_rows, self.max_positions * num_tables);
        let values = end * self.rows.rotary_dim / 2;
        let (cos, sin) = (Arc::make_mut(&mut self.rows.cos), Arc::make_mut(&mut self.rows.sin));
        for table in [&mut *cos, &mut *sin] {
            table.try_reserve_exact(values - table.len()).map_err(|e| {
                EngineError::Internal(format!(
                    "a rope table of {end} rows cannot get its {} bytes: {e}",
                    values * size_of::<f32>()
                ))
            })?;
        }
        for row in self.num_rows..end {
            let position = (row / num_tables) as f32;
            for frequency in &self.frequencies[row % num_tables] {
                // The angle is rounded to f32, as in training.
                let (sine, cosine) = f64::from(position * frequency).sin_cos();
                cos.push(cosine as f32 * self.factor);
                sin.push(sine as f32 * self.factor);
            }
        }
        self.num_rows = end;
        Ok(())
    }

    pub(crate) fn table(&self) -> &RopeTable {
        &self.rows
    }

    /// A table with a row for each of these coordinates.
    pub(crate) fn table_of(&self, coordinates: &[[u32; 3]]) -> RopeTable {
        let pairs = self.frequencies[0].len();
        let (mut cos, mut sin) = (Vec::with_capacity(coordinates.len() * pairs), Vec::with_capacity(coordinates.len() * pairs));
        for coordinates in coordinates {
            for (pair, frequency) in self.frequencies[0].iter().enumerate() {
                let position = coordinates[self.axes.map_or(0, |axes| axes.axis(pair))] as f32;
                let (sine, cosine) = f64::from(position * frequency).sin_cos();
                cos.push(cosine as f32 * self.factor);
                sin.push(sine as f32 * self.factor);
            }
        }
        RopeTable { cos: cos.into(), sin: sin.into(), ..self.rows }
    }
}

/// Some more than are needed, so that growing happens seldom, but no more than there are.
fn rows_to_make(num_rows: usize, max_rows: usize) -> usize {
    num_rows.next_power_of_two().max(256).min(max_rows).max(num_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { style: RopeStyle::Neox, theta: 10_000.0, rotary_dim: 4, scaling, axes: None }
    }

    /// Wavelengths of 2 pi and 200 pi against one bound.
    #[test]
    fn llama3_may_have_nothing_between_high_and_low() {
        let of = |high_freq_factor| {
            rope(RopeScaling::Llama3 { factor: 16.0, low_freq_factor: 1.0, high_freq_factor, original_max_positions: 64 })
        };
        of(1.0).validate(4).unwrap();
        assert_eq!(of(1.0).frequencies(0), [1.0, 0.01 / 16.0]);
        assert!(of(0.5).validate(4).is_err());
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 64 };
        // Wavelengths of 2 pi and 200 pi against bounds of 16 and 64.
        assert_eq!(rope(scaling).frequencies(0), [1.0, 0.01 / 8.0]);
    }

    fn longrope(max_positions: usize) -> GrowingRope {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0, 1.0],
            long: vec![2.0, 4.0],
            original_max_positions: 64,
            attention_factor: 1.0,
        };
        let rope = rope(scaling);
        let frequencies = (0..2).map(|table| rope.frequencies(table)).collect();
        let rows = RopeTable { style: rope.style, rotary_dim: 4, cos: Arc::default(), sin: Arc::default() };
        GrowingRope { rows, num_rows: 0, frequencies, max_positions, factor: 1.0, axes: None }
    }

    #[test]
    fn both_tables_grow_with_the_positions_used() {
        let mut rope = longrope(1 << 27);
        let long = RopeRows { first: 1, num_tables: 2 };
        let short = RopeRows { first: 0, num_tables: 2 };
        rope.grow(long.row(300) as usize + 1).unwrap();
        assert_eq!(rope.num_rows, 1024, "600 rows and some more, whatever the model's context");
        rope.grow(long.row(700) as usize + 1).unwrap();
        for (rows, divisors) in [(short, [1.0, 1.0]), (long, [2.0, 4.0])] {
            for position in [0, 1, 300, 700] {
                let row = rows.row(position) as usize;
                for (pair, (frequency, divisor)) in [1.0_f64, 0.01].into_iter().zip(divisors).enumerate() {
                    let angle = position as f64 * frequency / divisor;
                    let got = (rope.table().cos[row * 2 + pair], rope.table().sin[row * 2 + pair]);
                    let close = |got: f32, want: f64| (f64::from(got) - want).abs() < 1e-4;
                    assert!(close(got.0, angle.cos()) && close(got.1, angle.sin()), "{rows:?}, position {position}: {got:?}");
                }
            }
        }
    }

    #[test]
    fn pairs_rotate_by_the_coordinate_of_their_section() {
        let of = |sections, takes_turns| {
            let axes = RopeAxes { sections, takes_turns };
            (0..8).map(move |pair| axes.axis(pair)).collect::<Vec<_>>()
        };
        assert_eq!(of([2, 3, 3], false), [0, 0, 1, 1, 1, 2, 2, 2]);
        assert_eq!(of([4, 2, 2], true), [0, 1, 2, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn rows_without_memory_are_an_error() {
        let error = longrope(usize::MAX >> 8).grow(1 << 55).unwrap_err().to_string();
        assert!(error.contains("rows cannot get"), "{error}");
    }
}
