//! The choices a scheduler has, by name.

use std::fmt;
use std::str::FromStr;

use crate::error::UnknownPolicy;

/// A choice with a name. `FromStr` and `Display` of each policy go by [`Self::ALL`].
pub trait Policy: Copy + PartialEq + fmt::Debug + 'static {
    /// What is chosen.
    const KIND: &'static str;
    /// Every choice and its name, the default first.
    const ALL: &'static [(&'static str, Self)];

    /// The name of a choice.
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, policy)| *policy == self).map_or("", |(name, _)| name)
    }

    /// The choice of that name; the error lists the names that work.
    fn from_name(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, policy)| *policy).ok_or_else(|| UnknownPolicy {
            kind: Self::KIND,
            name: name.to_owned(),
            known: Self::ALL.iter().map(|(name, _)| *name).collect(),
        })
    }
}

/// When a waiting request may run beside others. Alone, it always may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdmissionPolicy {
    /// The whole prompt fits into what the running requests leave when their known tokens are computed, and a
    /// hundredth of the pool stays free for them to grow.
    #[default]
    Watermark,
    /// Prompt and `max_tokens` fit, beside those of all that run: nobody is ever preempted.
    Reserved,
    /// Its first chunk fits into what is free now. Fills the pool most, preempts most.
    Optimistic,
    /// Nobody, not even alone: to see what the watchdog does.
    #[cfg(test)]
    Nobody,
}

impl Policy for AdmissionPolicy {
    const KIND: &'static str = "admission policy";
    const ALL: &'static [(&'static str, Self)] =
        &[("watermark", Self::Watermark), ("reserved", Self::Reserved), ("optimistic", Self::Optimistic)];
}

/// Who loses its blocks to a request that ranks above it and finds none. Never one that ranks ahead, nor one that is
/// protected after [`super::SchedulerConfig::max_preemptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VictimPolicy {
    /// The one whose computed tokens cost least to compute again; those in blocks that another request holds as well
    /// cost nothing. Among equals the last.
    #[default]
    LeastCost,
    /// The last.
    Newest,
}

impl Policy for VictimPolicy {
    const KIND: &'static str = "victim policy";
    const ALL: &'static [(&'static str, Self)] = &[("least_cost", Self::LeastCost), ("newest", Self::Newest)];
}

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FairnessPolicy {
    /// The lowest `priority`, then the earliest deadline, then who came first. Without priorities and deadlines it is
    /// first come, first served. A request that waits takes seats and blocks from running ones of a higher `priority`.
    #[default]
    Priority,
    /// Who came first. A request that asks for a priority is refused.
    Fcfs,
    /// As `priority`, but within a priority tenants take turns: each computes one prompt at a time, and their prompts
    /// share a step's tokens by deficit round-robin.
    Drr,
}

impl Policy for FairnessPolicy {
    const KIND: &'static str = "fairness policy";
    const ALL: &'static [(&'static str, Self)] = &[("priority", Self::Priority), ("fcfs", Self::Fcfs), ("drr", Self::Drr)];
}

/// A policy of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policies {
    /// When a waiting request may run beside others.
    pub admission: AdmissionPolicy,
    /// Who loses its blocks to a request that ranks above it and finds none.
    pub victim: VictimPolicy,
    /// Who goes first.
    pub fairness: FairnessPolicy,
}

macro_rules! by_name {
    ($($policy:ty),*) => {$(
        impl fmt::Display for $policy {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $policy {
            type Err = UnknownPolicy;

            fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
                Self::from_name(name)
            }
        }
    )*};
}

by_name!(AdmissionPolicy, VictimPolicy, FairnessPolicy);
