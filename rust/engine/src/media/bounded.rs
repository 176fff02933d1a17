//! Layers of a tower whose products are bounded: what goes into each, and what comes out, is kept between two numbers of the
//! checkpoint (Gemma 4, which was trained so that it can be computed with 8 bits).

use device::{Backend, ElementwisePhases, Linear, Norm, Projection, RopeTable, StepMetadata, Tensor};

use super::{
    config::TowerNames,
    tower::{Buffers, Tower},
    tower_layer::TowerLayer,
    weights::TowerWeights,
};
use crate::EngineError;

/// Of what goes into a product, and of what comes out.
#[derive(Clone, Copy)]
struct Bound {
    input: [f32; 2],
    output: [f32; 2],
}

/// Of all products of a layer.
pub(super) struct Bounds {
    qkv: [Bound; 3],
    attn_output: Bound,
    gate: Bound,
    up: Bound,
    down: Bound,
}

impl Bounds {
    /// `named` gives the name of a weight of the layer.
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        names: &TowerNames,
        named: &dyn Fn(&str) -> String,
    ) -> Result<Self, EngineError> {
        let mut bound = |name: &str| {
            let name = named(name.trim_end_matches(".linear"));
            let mut number = |what: &str| Ok::<_, EngineError>(weights.constant(&format!("{name}.{what}"), &[])?[0]);
            let input = [number("input_min")?, number("input_max")?];
            Ok::<_, EngineError>(Bound { input, output: [number("output_min")?, number("output_max")?] })
        };
        let [q, k, v] = names.qkv.map(&mut bound);
        Ok(Self {
            qkv: [q?, k?, v?],
            attn_output: bound(names.attn_output)?,
            gate: bound(names.gate)?,
            up: bound(names.up)?,
            down: bound(names.down)?,
        })
    }
}

/// What products are computed with.
struct Products<'a> {
    backend: &'a dyn Backend,
    phases: &'a dyn ElementwisePhases,
    step: &'a StepMetadata,
}

impl Products<'_> {
    /// `out = linear(x)`, both within the bound.
    fn product(&self, x: &mut Tensor, linear: &Linear, bound: Bound, out: &mut Tensor) {
        self.phases.clamp(x, bound.input);
        self.backend.norm_linear(x, None, &mut [Projection { linear, out: &mut *out }], self.step);
        self.phases.clamp(out, bound.output);
    }

    /// `hidden += norm(x)`, where a layer has such a norm.
    fn add(&self, x: &mut Tensor, norm: Option<&Norm>, hidden: &mut Tensor) {
        self.backend.fetch(x);
        self.backend.fetch(hidden);
        for row in 0..x.rows() {
            if let Some(norm) = norm {
                norm.apply(x.row_mut(row));
            }
            hidden.row_mut(row).iter_mut().zip(x.row(row)).for_each(|(hidden, x)| *hidden += x);
        }
        self.backend.store(hidden);
    }

    /// The normalised hidden states.
    fn normed(&self, hidden: &mut Tensor, norm: &Norm, out: &mut Tensor) {
        self.backend.fetch(hidden);
        out.set_cols(hidden.cols());
        out.set_rows(hidden.rows());
        out.as_mut_slice().copy_from_slice(hidden.as_slice());
        (0..out.rows()).for_each(|row| norm.apply(out.row_mut(row)));
        self.backend.store(out);
    }
}

impl Tower {
    /// A layer whose products are bounded.
    pub(super) fn bounded_layer(
        &self,
        backend: &dyn Backend,
        (layer, bounds): (&TowerLayer, &Bounds),
        (step, rope): (&StepMetadata, Option<&RopeTable>),
        buffers: &mut Buffers,
    ) {
        let phases = backend.elementwise_phases().expect("the plan was refused where nothing bounds rows");
        let products = Products { backend, phases, step };
        let Buffers { hidden, q, k, v, out, inner, bounded, cache, .. } = buffers;
        let [x, second] = bounded.as_mut().expect("buffers of a tower whose products are bounded");
        for ((linear, bound), out) in layer.qkv.iter().zip(bounds.qkv).zip([&mut *q, k, v]) {
            products.normed(hidden, &layer.attn_norm, x);
            products.product(x, linear, bound, out);
        }
        self.attend(backend, layer, (step, rope), [q, k, v, &mut *out], cache, None);
        products.product(out, &layer.attn_output, bounds.attn_output, q);
        products.add(q, layer.inner.as_ref().map(|inner| &inner.post_attn), hidden);
        let gate = layer.gate.as_ref().expect("a gated network");
        for (linear, bound, out) in [(gate, bounds.gate, &mut *inner), (&layer.up, bounds.up, &mut *second)] {
            products.normed(hidden, &layer.ffn_norm, x);
            products.product(x, linear, bound, out);
        }
        phases.gated(self.config.activation, inner, second);
        products.product(inner, &layer.down, bounds.down, q);
        products.add(q, layer.inner.as_ref().map(|inner| &inner.post_ffn), hidden);
    }
}
