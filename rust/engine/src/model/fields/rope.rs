//! What config.json says of rotations.

use device::RopeStyle;
use serde_json::Value;

use super::{Fields, HfFields};
use crate::{
    EngineError,
    model::{
        config::MAX_SIZE,
        rope::{RopeAxes, RopeConfig, RopeScaling},
    },
};

const ROPE_TYPES: &str = "default, linear, llama3, longrope, proportional, yarn";

/// What yarn multiplies rotations and scores by, where a file says nothing else.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 }
}

impl HfFields<'_> {
    /// The rotation of a layer type, where that part of each head rotates unless the file has another. `rope_parameters` holds
    /// everything in newer files, by layer type where there are several; older ones have `rope_scaling` and `rope_theta`.
    pub fn rope(&self, layer_type: &str, head_dim: usize, usual_part: f64) -> Result<RopeConfig, EngineError> {
        let mut fields = self.rope_object()?;
        if let Some(nested) = fields.as_ref().map(|f| f.child(layer_type)).transpose()?.flatten() {
            fields = Some(nested);
        }
        let number = |key: &str| match fields.as_ref().map(|f| f.number(key)).transpose()?.flatten() {
            Some(value) => Ok(Some(value)),
            None => self.number(key),
        };
        let theta = number("rope_theta")?.unwrap_or(10_000.0);
        let rotary_dim = (number("partial_rotary_factor")?.unwrap_or(usual_part) * head_dim as f64) as usize;
        let scaling = fields.as_ref().map_or(Ok(RopeScaling::None), |fields| self.rope_scaling(fields))?;
        // Hunyuan's rope is called dynamic, and is not.
        let theta = match fields.as_ref().map(|fields| fields.number("alpha")).transpose()?.flatten() {
            Some(alpha) => theta * alpha.powf(head_dim as f64 / (head_dim as f64 - 2.0)),
            None => theta,
        };
        let kind = fields.as_ref().map(|fields| fields.text("rope_type")).transpose()?.flatten();
        if kind.as_deref() == Some("proportional") {
            let scaling = RopeScaling::Partial(rotary_dim / 2);
            return Ok(RopeConfig { style: RopeStyle::Neox, theta, rotary_dim: head_dim, scaling, axes: None });
        }
        Ok(RopeConfig { style: RopeStyle::Neox, theta, rotary_dim, scaling, axes: None })
    }

    /// By which coordinates the language models of some that see rotate.
    pub fn rope_axes(&self) -> Result<Option<RopeAxes>, EngineError> {
        let Some(fields) = self.rope_object()? else { return Ok(None) };
        let size = |value: &Value| value.as_u64().filter(|n| *n <= MAX_SIZE as u64).map(|n| n as usize);
        let sections = fields.typed("mrope_section", "a list of three sizes", |value| {
            let sizes: Option<Vec<_>> = value.as_array()?.iter().map(size).collect();
            <[usize; 3]>::try_from(sizes?).ok()
        })?;
        let takes_turns = fields.flag("mrope_interleaved")?.unwrap_or(false);
        Ok(sections.map(|sections| RopeAxes { sections, takes_turns }))
    }

    /// The same of those whose axes take turns over `pairs` pairs, with these sections unless the file has others.
    pub fn axes_in_turns(&self, pairs: usize, usual: [usize; 3]) -> Result<Option<RopeAxes>, EngineError> {
        if let Some(rope) = self.rope_object()?
            && rope.flag("mrope_interleaved")? == Some(false)
        {
            return Err(rope.error("mrope_interleaved", "is false; implemented: true"));
        }
        let of = |axis: usize| (0..pairs).filter(|pair| pair % 3 == axis && *pair < 3 * usual[axis]).count();
        let (rows, columns) = (of(1), of(2));
        let sections = self.rope_axes()?.map_or([pairs - rows - columns, rows, columns], |axes| axes.sections);
        Ok(Some(RopeAxes { sections, takes_turns: true }))
    }

    fn rope_scaling(&self, fields: &Self) -> Result<RopeScaling, EngineError> {
        let kind = match fields.text("rope_type")? {
            Some(kind) => kind,
            None => match fields.text("type")? {
                Some(kind) => kind,
                None if fields.value("factor").is_some() => return Err(fields.error("rope_type", "is missing beside a factor")),
                None => "default".into(),
            },
        };
        let needed = |key: &str| fields.number(key)?.ok_or_else(|| fields.error(key, format!("is missing for {kind} rope")));
        let list = |key: &str| fields.numbers(key)?.ok_or_else(|| fields.error(key, format!("is missing for {kind} rope")));
        let max_positions = self.required_size("max_position_embeddings")?;
        let given = match fields.size("original_max_position_embeddings")? {
            Some(n) => Some(n),
            None => self.size("original_max_position_embeddings")?,
        };
        let original = given.unwrap_or(max_positions);
        Ok(match &kind[..] {
            // Transformers takes mrope for another name of it.
            "default" | "mrope" => RopeScaling::None,
            "dynamic" if fields.value("alpha").is_some() => RopeScaling::None,
            // The base changes beyond that length, which no request is.
            "dynamic" if original >= max_positions => RopeScaling::None,
            "dynamic" => {
                return Err(fields.error(
                    "rope_type",
                    format!("is `dynamic`, whose base changes with the length, so that cached keys would not hold; implemented: {ROPE_TYPES}"),
                ));
            }
            // The caller says which part turns.
            "proportional" => match fields.number("factor")? {
                None | Some(1.0) => RopeScaling::None,
                Some(factor) => {
                    return Err(fields.error("factor", format!("is {factor}; implemented for proportional rope: 1")));
                }
            },
            "linear" => RopeScaling::Linear(needed("factor")?),
            "yarn" => fields.yarn(original, max_positions)?,
            "llama3" => RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: needed("low_freq_factor")?,
                high_freq_factor: needed("high_freq_factor")?,
                original_max_positions: original,
            },
            "longrope" | "su" => {
                let stretch = match given {
                    Some(original) => max_positions as f64 / original as f64,
                    None => fields.number("factor")?.unwrap_or(1.0),
                };
                // phimoe has one factor a table, and they are the same.
                let (short, long) = (fields.number("short_mscale")?, fields.number("long_mscale")?);
                if short != long {
                    return Err(fields.error("short_mscale", "is not what `long_mscale` is; one factor for both is implemented"));
                }
                let attention_factor = match fields.number("attention_factor")?.or(short) {
                    Some(factor) => factor,
                    None if stretch <= 1.0 => 1.0,
                    None => (1.0 + stretch.ln() / (original as f64).ln()).sqrt(),
                };
                RopeScaling::LongRope {
                    short: list("short_factor")?,
                    long: list("long_factor")?,
                    original_max_positions: original,
                    attention_factor: attention_factor as f32,
                }
            }
            other => return Err(fields.error("rope_type", format!("is `{other}`; implemented: {ROPE_TYPES}"))),
        })
    }

    fn yarn(&self, original: usize, max_positions: usize) -> Result<RopeScaling, EngineError> {
        let factor = self.number("factor")?.unwrap_or(max_positions as f64 / original as f64);
        let given = [self.number("mscale")?, self.number("mscale_all_dim")?];
        let attention_factor = match (self.number("attention_factor")?, given) {
            (Some(factor), _) => factor,
            (None, [Some(rotations), Some(scores)]) if rotations != 0.0 && scores != 0.0 => {
                yarn_mscale(factor, rotations) / yarn_mscale(factor, scores)
            }
            _ => yarn_mscale(factor, 1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
            original_max_positions: original,
            truncate: self.flag("truncate")?.unwrap_or(true),
            attention_factor: attention_factor as f32,
        })
    }

    /// What says how the model rotates: newer files have `rope_parameters`, older ones `rope_scaling`.
    fn rope_object(&self) -> Result<Option<Self>, EngineError> {
        match self.child("rope_parameters")? {
            Some(fields) => Ok(Some(fields)),
            None => self.child("rope_scaling"),
        }
    }

    /// A value of that.
    pub fn rope_value(&self, key: &str) -> Result<Option<Value>, EngineError> {
        Ok(self.rope_object()?.and_then(|fields| fields.value(key)))
    }

    /// A number of that.
    pub fn rope_number(&self, key: &str) -> Result<Option<f64>, EngineError> {
        Ok(self.rope_object()?.map(|fields| fields.number(key)).transpose()?.flatten())
    }
}
