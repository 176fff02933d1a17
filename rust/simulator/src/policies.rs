//! The scheduler's choices, by name.

use paged::{AdmissionPolicy, FairnessPolicy, Policies, Policy, VictimPolicy};

use crate::error::SimulationError;

/// The policies of these names, at most one of a kind; kinds that are not named keep their default.
pub fn policies_of_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Policies, SimulationError> {
    let (mut admission, mut victim, mut fairness) = (None, None, None);
    for name in names {
        let is_known = choose(&mut admission, name)? || choose(&mut victim, name)? || choose(&mut fairness, name)?;
        if !is_known {
            let requirement = format!(
                "admission is {}, victim is {}, fairness is {}",
                names_of::<AdmissionPolicy>(),
                names_of::<VictimPolicy>(),
                names_of::<FairnessPolicy>()
            );
            return Err(SimulationError::setting("policy", &format!("{name:?}"), requirement));
        }
    }
    Ok(Policies {
        admission: admission.unwrap_or_default(),
        victim: victim.unwrap_or_default(),
        fairness: fairness.unwrap_or_default(),
    })
}

/// `false` if the name is none of this kind.
fn choose<P: Policy>(chosen: &mut Option<P>, name: &str) -> Result<bool, SimulationError> {
    let Ok(policy) = P::from_name(name) else { return Ok(false) };
    if let Some(before) = chosen.replace(policy) {
        let requirement = format!("the {} is {:?} already: name one", P::KIND, before.name());
        return Err(SimulationError::setting("policy", &format!("{name:?}"), requirement));
    }
    Ok(true)
}

fn names_of<P: Policy>() -> String {
    P::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_choose_one_policy_of_a_kind() {
        assert_eq!(policies_of_names([]).unwrap(), Policies::default());
        let policies = policies_of_names(["drr", "optimistic"]).unwrap();
        assert_eq!(
            policies,
            Policies { admission: AdmissionPolicy::Optimistic, fairness: FairnessPolicy::Drr, ..Policies::default() }
        );
        let twice = policies_of_names(["reserved", "optimistic"]).unwrap_err().to_string();
        assert!(twice.contains("\"optimistic\"") && twice.contains("\"reserved\" already"), "{twice}");
        let unknown = policies_of_names(["newest", "greedy"]).unwrap_err().to_string();
        assert!(unknown.contains("\"greedy\"") && unknown.contains("priority or fcfs or drr"), "{unknown}");
    }
}
