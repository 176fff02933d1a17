//! Mixtures of experts: which feed-forward networks a token passes, and with which weights.

use crate::{Activation, Constant, Linear, Norm, StepMetadata, Tensor};

/// What a router makes of its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterScore {
    /// The softmax over all experts (Mixtral, arXiv:2401.04088).
    Softmax,
    /// The softmax over those that were chosen by their logits.
    SoftmaxOfChosen,
    /// The sigmoid of each of those that were chosen by their logits.
    SigmoidOfChosen,
    /// The sigmoid of each (DeepSeek-V3, arXiv:2412.19437).
    Sigmoid,
    /// One after the other, each by the softmax over those whose logits are within `2 * jitter` of the largest, relative to the
    /// larger of both magnitudes (SparseMixer-v2, arXiv:2409.12136).
    Sparsemixer {
        /// `router_jitter_noise`, which acts at inference too.
        jitter: f32,
    },
}

/// Experts are chosen from some groups only (DeepSeek-V2, arXiv:2405.04434).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of equally many experts, in order.
    pub num_groups: usize,
    /// Groups that experts are chosen from.
    pub num_chosen: usize,
    /// A group's score is the sum of its two best; else its best.
    pub by_two_best: bool,
}

/// How experts are chosen. Of equal ones the first is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRule {
    /// Experts a token.
    pub num_chosen: usize,
    /// Scores of the experts.
    pub score: RouterScore,
    /// Groups, if there are any.
    pub groups: Option<ExpertGroups>,
    /// Weights are divided by their sum and this.
    pub normalize: Option<f32>,
    /// Then multiplied by this.
    pub scale: f32,
}

impl RoutingRule {
    /// Fills `chosen`, `[num_chosen]`, with experts and their weights. `logits` and `correction` are `[num_experts]`; the latter
    /// is added to the scores that experts are chosen by, and not to the weights.
    pub fn choose(&self, logits: &[f32], correction: Option<&[f32]>, chosen: &mut [(usize, f32)]) {
        if let RouterScore::Sparsemixer { jitter } = self.score {
            return sparsemixer(logits, jitter, chosen);
        }
        let mut scores = logits.to_vec();
        match self.score {
            RouterScore::Softmax => softmax(&mut scores),
            RouterScore::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
            RouterScore::SoftmaxOfChosen | RouterScore::SigmoidOfChosen | RouterScore::Sparsemixer { .. } => {}
        }
        let mut choice: Vec<f32> = scores.iter().copied().map(comparable).collect();
        for (value, correction) in choice.iter_mut().zip(correction.into_iter().flatten()) {
            *value = comparable(*value + correction);
        }
        if let Some(groups) = self.groups {
            groups.restrict(&mut choice);
        }
        for place in chosen.iter_mut() {
            let best = first_largest(&choice);
            *place = (best, scores[best]);
            choice[best] = f32::NEG_INFINITY;
        }
        if self.score == RouterScore::SigmoidOfChosen {
            for (_, weight) in &mut *chosen {
                *weight = sigmoid(*weight);
            }
        }
        if self.score == RouterScore::SoftmaxOfChosen {
            let mut weights: Vec<_> = chosen.iter().map(|(_, score)| *score).collect();
            softmax(&mut weights);
            chosen.iter_mut().zip(weights).for_each(|((_, weight), value)| *weight = value);
        }
        let sum: f32 = chosen.iter().map(|(_, weight)| *weight).sum();
        for (_, weight) in chosen {
            *weight = self.normalize.map_or(*weight, |eps| *weight / (sum + eps)) * self.scale;
        }
    }
}

impl ExpertGroups {
    /// Takes experts out of the choice whose groups are not chosen.
    fn restrict(self, choice: &mut [f32]) {
        let size = choice.len() / self.num_groups;
        let score = |group: &[f32]| {
            let best = first_largest(group);
            let second = group.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, score)| *score);
            if self.by_two_best { group[best] + second.fold(f32::NEG_INFINITY, f32::max) } else { group[best] }
        };
        let mut scores: Vec<_> = choice.chunks_exact(size).map(score).collect();
        let mut is_chosen = vec![false; self.num_groups];
        for _ in 0..self.num_chosen {
            let best = first_largest(&scores);
            is_chosen[best] = true;
            scores[best] = f32::NEG_INFINITY;
        }
        for (group, is_chosen) in choice.chunks_exact_mut(size).zip(is_chosen) {
            if !is_chosen {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
}

fn sparsemixer(logits: &[f32], jitter: f32, chosen: &mut [(usize, f32)]) {
    let mut left: Vec<f32> = logits.iter().copied().map(comparable).collect();
    for place in chosen {
        let best = first_largest(&left);
        let largest = left[best];
        let is_near = |logit: f32| (largest - logit) / logit.abs().max(largest) <= 2.0 * jitter;
        let near = left.iter().zip(logits).filter(|(left, logit)| left.is_finite() && is_near(**logit));
        *place = (best, 1.0 / near.map(|(left, _)| (left - largest).exp()).sum::<f32>());
        left[best] = f32::NEG_INFINITY;
    }
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for value in &mut *values {
        *value = (*value - largest).exp();
    }
    let sum: f32 = values.iter().sum();
    for value in values {
        *value /= sum;
    }
}

/// A score that compares with others: of a damaged model one that is no number goes last, before those that are taken already.
fn comparable(score: f32) -> f32 {
    if score.is_nan() { f32::MIN } else { score.max(f32::MIN) }
}

/// The place of the first of the largest; 0 where nothing compares.
fn first_largest(values: &[f32]) -> usize {
    let mut best = 0;
    for (place, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = place;
        }
    }
    best
}

/// What an expert makes of its gate and up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `activation(gate) * up`.
    Gated(Activation),
    /// `activation(up)` of experts without a gate.
    Plain(Activation),
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, with the gate at most `limit` and up from `-limit` to `limit` (gpt-oss).
    Clamped {
        /// 1.702 in gpt-oss.
        alpha: f32,
        /// 7 in gpt-oss.
        limit: f32,
    },
}

impl ExpertActivation {
    /// Turns the gate into what [`Self::Clamped`] makes of both.
    pub(crate) fn clamp(alpha: f32, limit: f32, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
            *gate = (u + 1.0) * g / (1.0 + (-alpha * g).exp());
        }
    }
}

/// A feed-forward network.
pub struct Expert {
    /// `[intermediate_size, hidden_size]`; `None` where the activation is [`ExpertActivation::Plain`], and there alone.
    pub gate: Option<Linear>,
    /// `[intermediate_size, hidden_size]`.
    pub up: Linear,
    /// `[hidden_size, intermediate_size]`.
    pub down: Linear,
}

impl Expert {
    /// Its matrices.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> + Clone {
        self.gate.iter().chain([&self.up, &self.down])
    }
}

/// The experts of a layer.
pub struct Experts {
    /// `[num_experts, hidden_size]`, loaded as exact.
    pub router: Linear,
    /// Added to the scores that experts are chosen by, `[num_experts]`.
    pub correction: Option<Constant>,
    /// How they are chosen.
    pub rule: RoutingRule,
    /// All of them, of one shape.
    pub experts: Vec<Expert>,
    /// Of those, and of the shared one.
    pub activation: ExpertActivation,
    /// Weights multiply what goes into an expert (llama4); else what comes out.
    pub scales_input: bool,
    /// The expert that every token passes.
    pub shared: Option<SharedExpert>,
    /// Multiplied into the weights of each in the end, `[num_experts]`, where a backend has
    /// [`ElementwisePhases`](crate::ElementwisePhases).
    pub scales: Option<Constant>,
    /// Norms that parts have of their own; the same holds for these.
    pub norms: Option<PartNorms>,
    /// Matrices into and out of a narrower space that the experts work in, but the shared one; parts have no norms of their own
    /// then.
    pub latent: Option<LatentSpace>,
}

/// A narrower space that experts work in.
pub struct LatentSpace {
    /// `[latent_size, hidden_size]`: makes what goes into an expert.
    pub down: Linear,
    /// `[hidden_size, latent_size]`: of the weighted sum of what they give.
    pub up: Linear,
}

/// Norms of the parts of a mixture whose shared expert is a network beside it (Gemma 4).
pub struct PartNorms {
    /// Of what goes into the router, in place of the experts' norm.
    pub router: Norm,
    /// Of the experts' sum.
    pub sum: Norm,
    /// Of what goes into the shared expert, in place of the experts' norm.
    pub shared: Norm,
    /// Of what the shared expert gives.
    pub shared_sum: Norm,
}

/// An expert that every token passes.
pub struct SharedExpert {
    /// Its network, of a width of its own.
    pub expert: Expert,
    /// `[1, hidden_size]`, loaded as exact: its weight is the sigmoid of this product, else 1 (Qwen2-MoE).
    pub weight: Option<Linear>,
}

/// Arguments of [`ExpertPhases::experts`]: `hidden += post_norm(sum of weight * expert(norm(hidden))) * scale`.
///
/// [`ExpertPhases::experts`]: crate::ExpertPhases::experts
pub struct ExpertArgs<'a> {
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub hidden: &'a mut Tensor,
    /// Of what goes into router and experts.
    pub norm: Option<&'a Norm>,
    /// The experts. A row's are added in order, the shared one last.
    pub experts: &'a Experts,
    /// Of their sum.
    pub post_norm: Option<&'a Norm>,
    /// Multiplied in before the addition, else 1.
    pub scale: f32,
}

/// Feed-forward networks that are mixtures of experts.
pub trait ExpertPhases {
    /// Chooses the experts of each row, and adds what they give to the residual stream.
    fn experts(&self, args: ExpertArgs<'_>, step: &StepMetadata);
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: RoutingRule =
        RoutingRule { num_chosen: 2, score: RouterScore::Softmax, groups: None, normalize: None, scale: 1.0 };

    fn choose(rule: RoutingRule, logits: &[f32], correction: Option<&[f32]>) -> Vec<(usize, f32)> {
        let mut chosen = vec![(0, 0.0); rule.num_chosen];
        rule.choose(logits, correction, &mut chosen);
        chosen
    }

    fn assert_close(chosen: &[(usize, f32)], expected: &[(usize, f32)]) {
        assert_eq!(chosen.len(), expected.len());
        for (a, b) in chosen.iter().zip(expected) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{chosen:?}, not {expected:?}");
        }
    }

    #[test]
    fn the_largest_are_chosen_and_of_equal_ones_the_first() {
        let logits = [0.0, 2.0_f32.ln(), 4.0_f32.ln(), 2.0_f32.ln()];
        assert_close(&choose(RULE, &logits, None), &[(2, 4.0 / 9.0), (1, 2.0 / 9.0)]);
        let normalized = RoutingRule { normalize: Some(0.0), scale: 3.0, ..RULE };
        assert_close(&choose(normalized, &logits, None), &[(2, 2.0), (1, 1.0)]);
        let of_chosen = RoutingRule { score: RouterScore::SoftmaxOfChosen, ..RULE };
        assert_close(&choose(of_chosen, &logits, None), &[(2, 2.0 / 3.0), (1, 1.0 / 3.0)]);
    }

    #[test]
    fn a_correction_decides_the_choice_and_not_the_weight() {
        let sigmoid = RoutingRule { score: RouterScore::Sigmoid, ..RULE };
        let chosen = choose(sigmoid, &[0.0, 3.0_f32.ln(), -1.0], Some(&[0.0, 0.0, 1.0]));
        assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [2, 1]);
        assert_close(&chosen[1..], &[(1, 0.75)]);
    }

    #[test]
    fn groups_are_chosen_by_their_best_or_by_their_two_best() {
        let scores = [0.9_f32, 0.1, 0.6, 0.5, 0.2, 0.7];
        let logits = scores.map(f32::ln);
        let groups = |by_two_best| Some(ExpertGroups { num_groups: 3, num_chosen: 1, by_two_best });
        let of = |by_two_best| {
            let rule = RoutingRule { groups: groups(by_two_best), score: RouterScore::Sigmoid, ..RULE };
            // Sigmoids are not the scores, and have their order.
            choose(rule, &logits, None).iter().map(|(expert, _)| *expert).collect::<Vec<_>>()
        };
        assert_eq!((of(false), of(true)), (vec![0, 1], vec![2, 3]));
    }

    #[test]
    fn experts_are_chosen_once_each_whatever_their_scores_are() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for score in [
                RouterScore::Softmax,
                RouterScore::Sigmoid,
                RouterScore::SoftmaxOfChosen,
                RouterScore::SigmoidOfChosen,
                RouterScore::Sparsemixer { jitter: 0.1 },
            ] {
                for logits in [[bad; 4], [1.0, bad, 2.0, bad]] {
                    let mut chosen: Vec<_> = choose(RoutingRule { num_chosen: 4, score, ..RULE }, &logits, None)
                        .iter()
                        .map(|(expert, _)| *expert)
                        .collect();
                    chosen.sort_unstable();
                    assert_eq!(chosen, [0, 1, 2, 3], "{score:?} {logits:?}");
                }
            }
        }
    }

    #[test]
    fn a_sparsemixer_weighs_each_expert_among_those_near_it() {
        let rule = RoutingRule { score: RouterScore::Sparsemixer { jitter: 0.1 }, ..RULE };
        // 9 is near 10, and 7.5 is not; 7.5 is near 9.
        let chosen = choose(rule, &[7.5, 10.0, 9.0], None);
        let near = |difference: f32| 1.0 / (1.0 + (-difference).exp());
        assert_close(&chosen, &[(1, near(1.0)), (2, near(1.5))]);
    }
}
