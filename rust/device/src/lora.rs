//! Adapters: what is added to a model's linear layers for the rows of a step that ask for it (LoRA, Hu et al. 2021,
//! arXiv:2106.09685; DoRA, Liu et al. 2024, arXiv:2402.09353). A row without an adapter keeps its bits.

use std::{
    any::Any,
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use crate::{DType, DeviceError, Linear, WeightView, mmap::Bytes};

/// Floats of a product of low rank: `out += (x @ a^T) @ b`, and what else changes with it.
pub struct LowRank {
    /// `[rank, in_features]`, F32.
    a: WeightView,
    /// The transpose of what PEFT calls B, with the scale in it, `[rank, out_features]`.
    b: Vec<f32>,
    /// Added to the output, `[out_features]`.
    pub bias: Option<Vec<f32>>,
    /// Of DoRA: multiplies the layer's own product before anything is added; `b` has it already.
    pub magnitude: Option<Magnitude>,
}

/// DoRA's factors of the rows of a weight.
pub struct Magnitude {
    /// `[out_features]`: the learnt norm of each row over the one that it has with its product of low rank.
    pub factors: Vec<f32>,
    /// The layer's own bias, which the factors do not multiply.
    pub bias: Option<Vec<f32>>,
}

impl LowRank {
    /// `a` is `[rank, in_features]`, `b` is `[rank, out_features]` with the scale in it.
    ///
    /// Errors: [`DeviceError::Shape`] when they are not of `rank` rows, or those are empty.
    pub fn new(rank: usize, a: &[f32], b: Vec<f32>) -> Result<Self, DeviceError> {
        if rank == 0 || a.is_empty() || b.is_empty() || !a.len().is_multiple_of(rank) || !b.len().is_multiple_of(rank) {
            let (a, b) = (a.len(), b.len());
            return Err(DeviceError::Shape(format!("a product of rank {rank} of {a} and {b} values")));
        }
        let bytes = a.iter().flat_map(|value| value.to_le_bytes()).collect();
        let a = WeightView::new(DType::F32, rank, a.len() / rank, Bytes::from_vec(bytes))?;
        Ok(Self { a, b, bias: None, magnitude: None })
    }

    /// Rows of its factors.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// `[rank, in_features]`, F32.
    pub fn a(&self) -> &WeightView {
        &self.a
    }

    /// `[rank, out_features]`, with the scale in it.
    pub fn b(&self) -> &[f32] {
        &self.b
    }

    /// Row `k` of `b`, `[out_features]`.
    pub fn b_row(&self, k: usize) -> &[f32] {
        let cols = self.b.len() / self.rank();
        &self.b[k * cols..(k + 1) * cols]
    }

    fn floats(&self) -> usize {
        let magnitude = self.magnitude.as_ref().map_or(0, |m| m.factors.len() + m.bias.as_deref().map_or(0, <[f32]>::len));
        self.rank() * self.a.cols + self.b.len() + self.bias.as_deref().map_or(0, <[f32]>::len) + magnitude
    }
}

/// What an adapter does to a linear layer.
pub enum LinearDelta {
    /// Adds a product of low rank.
    LowRank(LowRank),
    /// Another weight, loaded by the same backend, stands in its place.
    Replaced(Linear),
    /// Some rows of the weight are others.
    Rows {
        /// Which, each below `out_features`.
        ids: Vec<u32>,
        /// `[ids, in_features]`, F32.
        rows: WeightView,
    },
}

/// What an adapter does to the token embedding.
#[derive(Default)]
pub struct EmbeddingDelta {
    /// Rows that are others, `[hidden_size]` each.
    pub rows: HashMap<u32, Vec<f32>>,
    /// Another table, `[vocab_size, hidden_size]`, stands in its place.
    pub table: Option<WeightView>,
    /// Is added.
    pub low_rank: Option<EmbeddingProduct>,
}

/// A product of low rank: of a token its row of `a` times `b`.
pub struct EmbeddingProduct {
    /// Columns of `a`.
    pub rank: usize,
    /// `[vocab_size, rank]`.
    pub a: Vec<f32>,
    /// `[rank, hidden_size]`, with the scale in it.
    pub b: Vec<f32>,
}

impl EmbeddingDelta {
    /// Changes a row of the embedding, `[hidden_size]`, to what it is with the adapter.
    pub fn apply(&self, id: u32, out: &mut [f32]) {
        if let Some(table) = &self.table {
            crate::quant::dequantize_row(table.dtype, table.row(id as usize), out);
        }
        if let Some(EmbeddingProduct { rank, a, b }) = &self.low_rank {
            for (x, b) in a[id as usize * rank..][..*rank].iter().zip(b.chunks_exact(out.len())) {
                out.iter_mut().zip(b).for_each(|(out, b)| *out += x * b);
            }
        }
        if let Some(row) = self.rows.get(&id) {
            out.copy_from_slice(row);
        }
    }

    fn bytes(&self) -> u64 {
        let low_rank = self.low_rank.as_ref().map_or(0, |product| product.a.len() + product.b.len());
        let rows: usize = self.rows.values().map(Vec::len).sum();
        let table = self.table.as_ref().map_or(0, |table| table.bytes().len());
        ((low_rank + rows) * size_of::<f32>() + table) as u64
    }
}

/// The weights of an adapter, by the site of the linear layer ([`Linear::site`]).
#[derive(Default)]
pub struct Adapter {
    sites: HashMap<u32, LinearDelta>,
    /// Of the token embedding.
    pub embedding: Option<EmbeddingDelta>,
    loaded: Option<Loaded>,
}

/// What a device made of an adapter, whose weights the host then has no longer.
struct Loaded {
    sites: BTreeSet<u32>,
    bytes: u64,
    weights: Arc<dyn Any + Send + Sync>,
}

impl Adapter {
    /// What it does to a layer of this site; false if something did already.
    pub fn insert(&mut self, site: u32, delta: LinearDelta) -> bool {
        self.sites.insert(site, delta).is_none()
    }

    /// What it does to a layer; `None` too where a device has its weights.
    pub fn delta(&self, linear: &Linear) -> Option<&LinearDelta> {
        self.sites.get(&linear.site?)
    }

    /// Whether it does something to a layer.
    pub fn changes(&self, linear: &Linear) -> bool {
        let is_loaded = |site: &u32| self.loaded.as_ref().is_some_and(|loaded| loaded.sites.contains(site));
        linear.site.is_some_and(|site| self.sites.contains_key(&site) || is_loaded(&site))
    }

    /// What a device made of an adapter that changes these sites, in so many bytes.
    pub(crate) fn on_device(sites: BTreeSet<u32>, bytes: u64, weights: Arc<dyn Any + Send + Sync>) -> Self {
        Self { loaded: Some(Loaded { sites, bytes, weights }), ..Self::default() }
    }

    /// What a device made of it.
    ///
    /// # Panics
    /// When that is no `T`: another backend loaded it.
    pub(crate) fn weights<T: Any>(&self) -> &T {
        let weights = self.loaded.as_ref().and_then(|loaded| loaded.weights.downcast_ref());
        weights.expect("an adapter of this backend, and another one loaded it")
    }

    /// What it does to each site.
    pub(crate) fn deltas(&self) -> impl Iterator<Item = (u32, &LinearDelta)> {
        self.sites.iter().map(|(site, delta)| (*site, delta))
    }

    /// Bytes that it keeps.
    pub fn bytes(&self) -> u64 {
        let of_delta = |delta: &LinearDelta| match delta {
            LinearDelta::LowRank(low_rank) => (low_rank.floats() * size_of::<f32>()) as u64,
            LinearDelta::Replaced(linear) => linear.bytes(),
            LinearDelta::Rows { ids, rows } => (size_of_val(&ids[..]) + rows.bytes().len()) as u64,
        };
        let loaded = self.loaded.as_ref().map_or(0, |loaded| loaded.bytes);
        self.sites.values().map(of_delta).sum::<u64>() + self.embedding.as_ref().map_or(0, EmbeddingDelta::bytes) + loaded
    }
}

/// The rows of a step with an adapter.
#[derive(Clone)]
pub struct AdapterRows {
    /// Theirs.
    pub adapter: Arc<Adapter>,
    /// By increasing number; no two entries have one in common.
    pub rows: Vec<u32>,
}

impl std::fmt::Debug for AdapterRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdapterRows").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl AdapterRows {
    /// Of rows that were chosen from those of a step, by their numbers there.
    pub fn of_chosen(all: &[Self], chosen: &(impl Iterator<Item = u32> + Clone)) -> Vec<Self> {
        let of_one = |one: &Self| Self {
            adapter: Arc::clone(&one.adapter),
            rows: (0..).zip(chosen.clone()).filter(|(_, row)| one.rows.binary_search(row).is_ok()).map(|(i, _)| i).collect(),
        };
        all.iter().map(of_one).filter(|one| !one.rows.is_empty()).collect()
    }

    /// Whether any of them does something to one of these layers.
    pub fn touch<'a>(all: &[Self], linears: impl IntoIterator<Item = &'a Linear>) -> bool {
        !all.is_empty() && linears.into_iter().any(|linear| all.iter().any(|one| one.adapter.changes(linear)))
    }
}
