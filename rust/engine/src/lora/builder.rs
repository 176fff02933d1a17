//! From the tensors of an adapter's files to what is done to a model's layers.

use std::sync::{Mutex, PoisonError};

use device::{
    Adapter, DType, EmbeddingDelta, LinearDelta, LinearOptions, LowRank, Magnitude, Precision, WeightView, mmap::Bytes,
};

use super::sites::{Site, SitePart, Sites};
use crate::{EngineError, model::config::FfnConfig};

/// A tensor of an adapter's files, as floats.
#[derive(Clone, Debug, Default)]
pub(super) struct Floats {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Floats {
    /// Its two dimensions.
    pub fn matrix(&self, name: &str) -> Result<[usize; 2], EngineError> {
        match self.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
            _ => Err(invalid(format!("`{name}` has shape {:?} instead of that of a matrix", self.shape))),
        }
    }

    /// With rows as columns.
    pub fn transposed(&self, name: &str) -> Result<Self, EngineError> {
        let [rows, cols] = self.matrix(name)?;
        let values = (0..cols).flat_map(|col| self.values.iter().skip(col).step_by(cols)).copied().collect();
        Ok(Self { shape: vec![cols, rows], values })
    }

    /// Whether all values are numbers.
    pub fn are_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }

    fn row(&self, row: usize, cols: usize) -> &[f32] {
        &self.values[row * cols..(row + 1) * cols]
    }
}

/// A product of low rank for the rows of a module, all of them or those of one expert.
pub(super) struct Product<'a> {
    /// Of what, for errors.
    pub name: &'a str,
    /// `[rank, in_features]`.
    pub a: &'a Floats,
    /// `[out_features, rank]`.
    pub b: &'a Floats,
    /// `[out_features]`.
    pub b_bias: Option<&'a Floats>,
    /// DoRA's `[out_features]`.
    pub magnitude: Option<&'a Floats>,
    pub scale: f32,
    /// Rows are in the order of a Hugging Face checkpoint.
    pub is_hugging_face: bool,
}

/// What an adapter does, as far as its tensors have been seen.
pub(crate) struct AdapterBuilder<'a> {
    pub(super) sites: &'a Sites,
    pub(super) max_rank: usize,
    adapter: Adapter,
    rank: usize,
}

/// An adapter that cannot be used.
pub(super) fn invalid(message: String) -> EngineError {
    EngineError::Adapter { code: "invalid_lora_adapter", message }
}

impl<'a> AdapterBuilder<'a> {
    pub(crate) fn new(sites: &'a Sites, max_rank: usize) -> Self {
        Self { sites, max_rank, adapter: Adapter::default(), rank: 0 }
    }

    /// The adapter, where the device has it, and its largest rank.
    pub(super) fn finish(self) -> Result<(Adapter, usize), EngineError> {
        if self.adapter.bytes() == 0 {
            return Err(invalid("it has no weights".into()));
        }
        Ok((self.sites.backend.load_adapter(self.adapter)?, self.rank))
    }

    /// Adds a product to the rows of a module.
    pub(super) fn product(&mut self, parts: &[SitePart], product: &Product<'_>) -> Result<(), EngineError> {
        for part in parts {
            let low_rank = self.low_rank(part, product)?;
            self.insert(part.site, product.name, LinearDelta::LowRank(low_rank))?;
        }
        Ok(())
    }

    /// Checks a rank, and keeps the largest.
    pub(super) fn check_rank(&mut self, name: &str, rank: usize) -> Result<(), EngineError> {
        if rank == 0 || rank > self.max_rank {
            let message = format!("`{name}` has rank {rank}; from 1 to {} (max_rank) are taken", self.max_rank);
            return Err(EngineError::Adapter { code: "lora_rank_limit_exceeded", message });
        }
        self.rank = self.rank.max(rank);
        Ok(())
    }

    fn low_rank(&mut self, part: &SitePart, product: &Product<'_>) -> Result<LowRank, EngineError> {
        let Product { name, a, b, b_bias, magnitude, scale, is_hugging_face } = *product;
        let ([rank, in_features], [out_features, b_rank]) = (a.matrix(name)?, b.matrix(name)?);
        self.check_rank(name, rank)?;
        let sites = self.sites;
        let site = &sites.list[part.site];
        let [num_rows, num_cols] = site.matrix.shape;
        if rank != b_rank || in_features != num_cols || out_features != part.num_rows {
            let message = format!(
                "`{name}` has shapes [{rank}, {in_features}] and [{out_features}, {b_rank}]; the model's layer is [{}, {num_cols}]",
                part.num_rows
            );
            return Err(invalid(message));
        }
        if let Some(floats) = [b_bias, magnitude].into_iter().flatten().find(|floats| floats.values.len() != out_features) {
            let message = format!("`{name}` has {} values beside its product, and {out_features} rows", floats.values.len());
            return Err(invalid(message));
        }
        if b_bias.is_some() {
            self.check_bias(name, site)?;
        }
        let source = |row| part.row(if is_hugging_face { sites.source_row(site, row) } else { row });
        let factors = match magnitude {
            Some(magnitude) => {
                let norms = row_norms(sites, site, &|row, k| scale * b.values[source(row) * rank + k], a, rank)?;
                Some(norms.iter().enumerate().map(|(row, norm)| magnitude.values[source(row)] / norm).collect::<Vec<_>>())
            }
            None => None,
        };
        if factors.iter().flatten().any(|factor| !factor.is_finite()) {
            return Err(invalid(format!("`{name}` has a magnitude for a row of the weight that is zero")));
        }
        let mut transposed = vec![0.0; rank * num_rows];
        for row in 0..num_rows {
            let factor = factors.as_ref().map_or(scale, |factors| scale * factors[row]);
            for (k, value) in b.row(source(row), rank).iter().enumerate() {
                transposed[k * num_rows + row] = value * factor;
            }
        }
        let logit_scale = self.logit_scale(site);
        let mut low_rank = LowRank::new(rank, &a.values, transposed)?;
        low_rank.bias = b_bias.map(|bias| {
            let of_row = |row| bias.values[source(row)] * scale * logit_scale * factors.as_ref().map_or(1.0, |f| f[row]);
            (0..num_rows).map(of_row).collect()
        });
        low_rank.magnitude = factors.map(|factors| Magnitude { factors, bias: self.own_bias(site) });
        Ok(low_rank)
    }

    /// Whether a bias can be added to a layer.
    fn check_bias(&self, name: &str, site: &Site) -> Result<(), EngineError> {
        let layer = site.matrix.id.layer.and_then(|layer| self.sites.config.layers.get(layer));
        let scales_input = layer.is_some_and(|layer| matches!(&layer.ffn, FfnConfig::Experts(experts) if experts.scales_input));
        // A GPU multiplies what comes out by the weight of the expert, which is the same without biases.
        if site.matrix.expert.is_none() || !scales_input || self.sites.backend.memory()?.is_host {
            return Ok(());
        }
        Err(invalid(format!("`{name}` has a bias for an expert whose input is scaled, which only device=\"cpu\" computes")))
    }

    /// What biases of a layer are multiplied by: those of the matrix of logits as its input is.
    fn logit_scale(&self, site: &Site) -> f32 {
        if site.matrix.id.layer.is_none() { self.sites.config.logit_scale } else { 1.0 }
    }

    /// The bias of a layer as it adds it.
    fn own_bias(&self, site: &Site) -> Option<Vec<f32>> {
        let logit_scale = self.logit_scale(site);
        site.bias.as_ref().map(|bias| bias.iter().map(|x| x * logit_scale).collect())
    }

    /// Another weight in the place of a module's.
    pub(super) fn replace(
        &mut self,
        parts: &[SitePart],
        name: &str,
        weight: &Floats,
        bias: Option<&Floats>,
    ) -> Result<(), EngineError> {
        let [rows, cols] = weight.matrix(name)?;
        for part in parts {
            let site = &self.sites.list[part.site];
            if (rows, cols) != (part.num_rows, site.matrix.shape[1]) {
                return Err(invalid(format!(
                    "`{name}` has shape [{rows}, {cols}]; the model's layer is [{}, {}]",
                    part.num_rows, site.matrix.shape[1]
                )));
            }
            let logit_scale = self.logit_scale(site);
            let source = |row| part.row(self.sites.source_row(site, row));
            let num_rows = part.own_rows;
            let values: Vec<f32> = (0..num_rows).flat_map(|row| weight.row(source(row), cols)).copied().collect();
            let bias = match bias {
                Some(bias) if bias.values.len() == rows => {
                    Some((0..num_rows).map(|row| bias.values[source(row)] * logit_scale).collect())
                }
                Some(bias) => return Err(invalid(format!("the bias of `{name}` has {} values", bias.values.len()))),
                None => self.own_bias(site),
            };
            if bias.is_some() {
                self.check_bias(name, site)?;
            }
            let precision = if site.matrix.is_exact { Precision::Exact } else { self.sites.precision };
            let options = LinearOptions { name: name.to_owned(), precision, bias };
            let linear = self.sites.backend.load_linear(&view(num_rows, cols, &values)?, &options)?;
            self.insert(part.site, name, LinearDelta::Replaced(linear))?;
        }
        Ok(())
    }

    /// Other rows of the matrix of logits.
    pub(super) fn replace_rows(&mut self, site: usize, name: &str, ids: &[u32], rows: &Floats) -> Result<(), EngineError> {
        if self.sites.list[site].bias.is_some() {
            return Err(invalid(format!("`{name}` has trained rows, and the model's logits have a bias: that is not supported")));
        }
        let [num_rows, cols] = rows.matrix(name)?;
        let rows = view(num_rows, cols, &rows.values)?;
        self.insert(site, name, LinearDelta::Rows { ids: ids.to_vec(), rows })
    }

    /// What it does to the token embedding.
    pub(super) fn embedding(&mut self) -> &mut EmbeddingDelta {
        self.adapter.embedding.get_or_insert_default()
    }

    fn insert(&mut self, site: usize, name: &str, delta: LinearDelta) -> Result<(), EngineError> {
        // Sites have a number if they are numbered at all.
        let number = self.sites.list[site].linear.site.unwrap_or_default();
        if self.adapter.insert(number, delta) {
            return Ok(());
        }
        Err(invalid(format!("`{name}` belongs to a layer that another of its tensors changes already")))
    }
}

/// Rows of floats as a weight.
pub(super) fn view(rows: usize, cols: usize, values: &[f32]) -> Result<WeightView, EngineError> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Ok(WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes))?)
}

/// Rows of a weight whose norms are computed at once.
const NORMED_ROWS: usize = 256;

/// The norm of each row of a weight with its product of low rank, `weight[row] + sum over k of b(row, k) * a[k]`.
fn row_norms(
    sites: &Sites,
    site: &Site,
    b: &(dyn Fn(usize, usize) -> f32 + Sync),
    a: &Floats,
    rank: usize,
) -> Result<Vec<f32>, EngineError> {
    let [rows, cols] = site.matrix.shape;
    let mut norms = vec![0.0; rows];
    let mut values = vec![0.0; NORMED_ROWS.min(rows) * cols];
    for (chunk, first) in norms.chunks_mut(NORMED_ROWS).zip((0..).step_by(NORMED_ROWS)) {
        let values = &mut values[..chunk.len() * cols];
        sites.backend.read_rows(&site.linear, first, values)?;
        let lines: Vec<_> = values.chunks_exact_mut(cols).zip(chunk).map(Mutex::new).collect();
        sites.backend.for_each(lines.len(), &|line| {
            let (values, norm) = &mut *lines[line].lock().unwrap_or_else(PoisonError::into_inner);
            for k in 0..rank {
                let b = b(first + line, k);
                values.iter_mut().zip(a.row(k, cols)).for_each(|(value, a)| *value += b * a);
            }
            **norm = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
        });
    }
    Ok(norms)
}
