//! A feed-forward network of which each token passes some parts: a mixture of experts.

use std::sync::Arc;

use device::{Expert, ExpertArgs, Experts, LatentSpace, Norm, PartNorms, SharedExpert};

use super::{
    config::{ExpertsConfig, SharedConfig},
    part::{Context, Weights},
};
use crate::{
    EngineError,
    weights::{ExpertIndex, Matrix, Role, WeightId},
};

pub(crate) struct Mixture {
    experts: Experts,
}

/// The roles of a gated network: gate, up, both as one, down.
type Roles = [Role; 4];

const EXPERT: Roles = [Role::ExpertGate, Role::ExpertUp, Role::ExpertGateUp, Role::ExpertDown];
const SHARED: Roles = [Role::SharedGate, Role::SharedUp, Role::SharedGateUp, Role::SharedDown];

impl Mixture {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &ExpertsConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let num_experts = config.num_experts;
        let router = Matrix::new(id(Role::Router), [num_experts, hidden], config.router_bias).exact();
        let correction = config.has_correction.then(|| weights.vector(id(Role::RouterCorrection), num_experts));
        let latent = match config.latent_size {
            None => None,
            Some(size) => Some(LatentSpace {
                down: weights.linear(&Matrix::new(id(Role::LatentDown), [size, hidden], false))?,
                up: weights.linear(&Matrix::new(id(Role::LatentUp), [hidden, size], false))?,
            }),
        };
        let mut network = |[gate, up, gate_up, down]: Roles, width: usize, expert: Option<ExpertIndex>| {
            let bias = config.bias && expert.is_some();
            let cols = config.latent_size.filter(|_| expert.is_some()).unwrap_or(hidden);
            let (gate, up) = if config.is_gated() {
                let [gate, up] = Matrix::fused(id(gate_up), [(gate, width), (up, width)], cols, bias);
                (Some(gate.of_expert(expert)), up)
            } else {
                (None, Matrix::new(id(up), [width, cols], bias))
            };
            let down = Matrix::new(id(down), [cols, width], bias).of_expert(expert);
            Ok::<_, EngineError>(Expert {
                gate: gate.map(|gate| weights.linear(&gate)).transpose()?,
                up: weights.linear(&up.of_expert(expert))?,
                down: weights.linear(&down)?,
            })
        };
        let expert = |index| network(EXPERT, config.intermediate_size, Some(ExpertIndex { index, count: num_experts }));
        let experts = (0..num_experts).map(expert).collect::<Result<_, _>>()?;
        let shared = match config.shared {
            None => None,
            Some(SharedConfig { intermediate_size, is_weighted }) => {
                let expert = network(SHARED, intermediate_size, None)?;
                let weight = Matrix::new(id(Role::SharedWeight), [1, hidden], false).exact();
                let weight = is_weighted.then(|| weights.linear(&weight)).transpose()?;
                Some(SharedExpert { expert, weight })
            }
        };
        let experts = Experts {
            router: weights.linear(&router)?,
            correction: correction.transpose()?,
            rule: config.rule,
            experts,
            activation: config.activation,
            scales_input: config.scales_input,
            shared,
            scales: config.has_own_norms.then(|| weights.vector(id(Role::ExpertScales), num_experts)).transpose()?,
            norms: config.has_own_norms.then(|| part_norms(weights, layer, hidden)).transpose()?,
            latent,
        };
        Ok(Self { experts })
    }

    /// Adds to the hidden state what the experts make of it.
    pub(crate) fn run(&self, norm: Option<&Norm>, post_norm: Option<&Norm>, scale: f32, cx: &mut Context<'_>) {
        let phases = cx.run.backend.expert_phases().expect("the plan was refused where nothing computes experts");
        phases.experts(ExpertArgs { hidden: cx.hidden, norm, experts: &self.experts, post_norm, scale }, cx.step);
    }
}

/// The norms that router, experts and shared expert have of their own. The router's weights are a vector that its normalised
/// input, divided by the square root of the width, is multiplied by.
fn part_norms(weights: &mut dyn Weights, layer: usize, hidden: usize) -> Result<PartNorms, EngineError> {
    let mut norm = |role| weights.norm(WeightId::layer(layer, role), [1, hidden]);
    let [sum, shared, shared_sum] = [norm(Role::ExpertSumNorm)?, norm(Role::SharedNorm)?, norm(Role::SharedSumNorm)?];
    let mut weight = weights.vector(WeightId::layer(layer, Role::RouterNorm), hidden)?;
    let factor = (hidden as f32).sqrt().recip();
    for value in Arc::make_mut(&mut weight) {
        *value *= factor;
    }
    Ok(PartNorms { router: Norm { weight, ..sum.clone() }, sum, shared, shared_sum })
}
