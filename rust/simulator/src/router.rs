//! Which replica a request goes to.

use std::collections::HashMap;

use crate::error::SimulationError;
use crate::trace::TraceRequest;

/// Requests that a replica which was sent a prompt's prefix may have more than the idlest one.
const MAX_IMBALANCE: usize = 16;
/// One part in so many of a prompt must have been sent to a replica before, that it is preferred.
const MIN_SHARE: usize = 10;

/// How a router chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouterPolicy {
    /// One replica after the other.
    #[default]
    RoundRobin,
    /// The one with the fewest requests, running or waiting; of several the next in turn.
    LeastLoaded,
    /// The one that was sent the longest beginning of the prompt, if that is a tenth of it and the replica has at most 16
    /// requests more than the idlest one; else as [`Self::LeastLoaded`].
    Prefix,
}

impl RouterPolicy {
    /// All of them, by name.
    pub const NAMES: [(&'static str, Self); 3] =
        [("round_robin", Self::RoundRobin), ("least_loaded", Self::LeastLoaded), ("prefix", Self::Prefix)];
}

impl std::str::FromStr for RouterPolicy {
    type Err = SimulationError;

    fn from_str(name: &str) -> Result<Self, SimulationError> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, policy)| *policy).ok_or_else(|| {
            let names = Self::NAMES.map(|(known, _)| known).join(", ");
            SimulationError::setting("router", &format!("{name:?}"), format!("known routers are {names}"))
        })
    }
}

/// A router, which knows what it sent where and not what replicas have dropped since.
#[derive(Debug)]
pub(crate) struct Router {
    policy: RouterPolicy,
    /// Whose turn it is.
    next: usize,
    /// By prefix: the replicas that were sent some of it, and how many tokens.
    sent: HashMap<u64, Vec<(usize, usize)>>,
}

impl Router {
    pub(crate) fn new(policy: RouterPolicy) -> Self {
        Self { policy, next: 0, sent: HashMap::new() }
    }

    /// The replica for a request; `loads` has the requests of each.
    pub(crate) fn route(&mut self, request: &TraceRequest, loads: &[usize]) -> usize {
        let replica = match self.policy {
            RouterPolicy::RoundRobin => self.next % loads.len(),
            RouterPolicy::LeastLoaded => self.least_loaded(loads),
            RouterPolicy::Prefix => self.home(request, loads).unwrap_or_else(|| self.least_loaded(loads)),
        };
        self.next = replica + 1;
        if let (RouterPolicy::Prefix, Some(prefix)) = (self.policy, request.prefix) {
            let sent = self.sent.entry(prefix.id).or_default();
            match sent.iter_mut().find(|(known, _)| *known == replica) {
                Some((_, len)) => *len = prefix.len.max(*len),
                None => sent.push((replica, prefix.len)),
            }
        }
        replica
    }

    fn least_loaded(&self, loads: &[usize]) -> usize {
        let in_turn = (0..loads.len()).map(|offset| (self.next + offset) % loads.len());
        in_turn.min_by_key(|replica| loads[*replica]).unwrap_or_default()
    }

    fn home(&self, request: &TraceRequest, loads: &[usize]) -> Option<usize> {
        let prefix = request.prefix?;
        let most = loads.iter().min()? + MAX_IMBALANCE;
        let common = |len: usize| len.min(prefix.len).min(request.prompt_tokens);
        let homes = self.sent.get(&prefix.id)?.iter().filter(|(replica, _)| loads[*replica] <= most);
        let (replica, len) = homes.max_by_key(|(replica, len)| (common(*len), std::cmp::Reverse(loads[*replica])))?;
        (common(*len) * MIN_SHARE >= request.prompt_tokens).then_some(*replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Prefix;

    fn request(id: u64, len: usize) -> TraceRequest {
        TraceRequest { prefix: Some(Prefix { id, len }), ..TraceRequest::new(0.0, 100, 10) }
    }

    #[test]
    fn turns_are_taken_and_the_least_loaded_is_found_in_turn() {
        let mut turns = Router::new(RouterPolicy::RoundRobin);
        let plain = TraceRequest::new(0.0, 1, 1);
        assert_eq!([0; 4].map(|_| turns.route(&plain, &[9, 0, 0])), [0, 1, 2, 0]);
        let mut least = Router::new(RouterPolicy::LeastLoaded);
        assert_eq!([[2, 1, 1], [2, 1, 1], [2, 1, 1], [0, 1, 1]].map(|loads| least.route(&plain, &loads)), [1, 2, 1, 0]);
    }

    #[test]
    fn a_prefix_goes_home_unless_home_is_busy_or_it_is_short() {
        let mut router = Router::new(RouterPolicy::Prefix);
        assert_eq!(router.route(&request(1, 50), &[0, 0]), 0);
        assert_eq!(router.route(&request(2, 50), &[0, 0]), 1);
        assert_eq!(router.route(&request(1, 60), &[16, 0]), 0, "16 more are borne");
        assert_eq!(router.route(&request(1, 60), &[17, 0]), 1, "17 are not");
        assert_eq!(router.route(&request(1, 60), &[5, 3]), 1, "both have it: the idler one");
        assert_eq!(router.route(&request(3, 9), &[0, 1]), 0);
        assert_eq!(router.route(&request(3, 9), &[1, 0]), 1, "less than a tenth is no reason");
    }

    #[test]
    fn names_choose_a_policy() {
        assert_eq!("least_loaded".parse::<RouterPolicy>().unwrap(), RouterPolicy::LeastLoaded);
        let error = "random".parse::<RouterPolicy>().unwrap_err().to_string();
        assert!(error.contains("\"random\"") && error.contains("round_robin, least_loaded, prefix"), "{error}");
    }
}
