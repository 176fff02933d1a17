//! Tokens of a vocabulary that have vectors as images or sounds have them, in place of token embeddings (Gemma 3n).

use std::{ops::Range, sync::Arc};

use device::Backend;

use super::{config::ProjectorNorm, projector::Projector, weights::TowerWeights};
use crate::{EngineError, model::decoder::VectorRows};

/// Which tokens these are.
#[derive(Clone, Debug, PartialEq)]
pub struct HardTokens {
    /// Their ids.
    pub tokens: Range<u32>,
    /// Rows of their table, of which the first is that of the first token.
    pub count: usize,
    /// Of these rows, before they become vectors.
    pub norm: ProjectorNorm,
    /// As many rows of a prompt every sound has: behind its own vectors comes that of a token.
    pub filled: Option<Filled>,
}

/// What a sound is filled up to, and with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// Rows of a prompt.
    pub num_rows: usize,
    /// The token.
    pub token_id: u32,
}

/// Their table.
pub(super) struct HardVectors {
    config: HardTokens,
    /// Behind the norm, `[tokens, width]`.
    rows: Vec<f32>,
    /// Of the decoder's width, when they were first asked for.
    vectors: Option<Arc<Vec<f32>>>,
}

impl HardVectors {
    /// Of states of `width` values; `place` is what the names begin with.
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        places: &[&'static str],
        (config, width): (&HardTokens, usize),
    ) -> Result<Self, EngineError> {
        let place = weights.place(places, "embedding.weight")?;
        let table = weights.constant(&format!("{place}embedding.weight"), &[config.count, width])?;
        let ProjectorNorm { name, kind, eps, offset } = config.norm;
        let norm = weights.norm(&format!("{place}{name}"), width, (kind, eps, offset))?;
        let mut rows = table[..config.tokens.len() * width].to_vec();
        rows.chunks_exact_mut(width).for_each(|row| norm.apply(row));
        Ok(Self { config: config.clone(), rows, vectors: None })
    }

    fn vectors(&mut self, backend: &dyn Backend, projector: &Projector) -> Result<Arc<Vec<f32>>, EngineError> {
        if let Some(vectors) = &self.vectors {
            return Ok(Arc::clone(vectors));
        }
        let width = self.rows.len() / self.config.tokens.len().max(1);
        let vectors = Arc::new(projector.project(backend, self.rows.clone(), width)?);
        self.rows = Vec::new();
        self.vectors = Some(Arc::clone(&vectors));
        Ok(vectors)
    }

    /// The rows of a step that have such tokens, with their vectors.
    pub(super) fn of_step(
        &mut self,
        (backend, projector): (&dyn Backend, &Projector),
        token_ids: &[u32],
    ) -> Result<Option<VectorRows>, EngineError> {
        let first = self.config.tokens.start;
        let own = |(row, id): (usize, &u32)| self.config.tokens.contains(id).then(|| (row as u32, id - first));
        let rows: Vec<_> = token_ids.iter().enumerate().filter_map(own).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        Ok(Some(VectorRows { vectors: self.vectors(backend, projector)?, num_planes: 1, rows }))
    }

    /// The vectors of a sound, filled up to as many as every sound has.
    pub(super) fn fill(
        &mut self,
        (backend, projector): (&dyn Backend, &Projector),
        vectors: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        let Some(Filled { num_rows, token_id }) = self.config.filled else { return Ok(()) };
        let hidden = projector.out_features();
        let all = self.vectors(backend, projector)?;
        let row = (token_id - self.config.tokens.start) as usize;
        while vectors.len() < num_rows * hidden {
            vectors.extend_from_slice(&all[row * hidden..][..hidden]);
        }
        Ok(())
    }
}
