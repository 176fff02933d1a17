//! Several engines behind a router, in virtual time.

use crate::error::SimulationError;
use crate::result::SimulationResult;
use crate::router::{Router, RouterPolicy};
use crate::simulation::{Simulation, SimulationConfig, by_arrival, first_arrival, longest};
use crate::trace::{Trace, TraceRequest};

/// Most replicas of a simulation.
const MAX_REPLICAS: usize = 4096;

/// What became of one replica.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaResult {
    /// Rows of the trace that went to it, by arrival.
    pub rows: Vec<usize>,
    /// What it made of them: its requests are these rows. Its seconds begin with the first arrival of the whole trace.
    pub result: SimulationResult,
}

/// Replicas of one engine, each with a pool of its own, under way. Requests are sent on when they come; the router sees how many
/// each replica has at the end of the step that is then under way.
pub struct Fleet {
    trace: Vec<TraceRequest>,
    /// Rows by arrival.
    order: Vec<usize>,
    num_routed: usize,
    router: Router,
    replicas: Vec<Simulation>,
    rows: Vec<Vec<usize>>,
    /// Replicas that have run to the end.
    num_done: usize,
}

impl Fleet {
    /// Idle replicas before the first arrival.
    pub fn new(
        trace: Trace,
        config: &SimulationConfig,
        num_replicas: usize,
        policy: RouterPolicy,
    ) -> Result<Self, SimulationError> {
        if !(1..=MAX_REPLICAS).contains(&num_replicas) {
            let requirement = format!("from 1 to {MAX_REPLICAS} work");
            return Err(SimulationError::setting("replicas", &num_replicas, requirement));
        }
        let trace = trace.into_requests();
        let replica = || Simulation::idle(config, longest(&trace), first_arrival(&trace));
        let replicas = (0..num_replicas).map(|_| replica()).collect::<Result<_, _>>()?;
        let rows = vec![Vec::new(); num_replicas];
        Ok(Self { order: by_arrival(&trace), trace, num_routed: 0, router: Router::new(policy), replicas, rows, num_done: 0 })
    }

    /// Runs to the end.
    pub fn run(mut self) -> Result<Vec<ReplicaResult>, SimulationError> {
        while self.advance()? {}
        Ok(self.into_results())
    }

    /// Goes on to the next arrival, or behind the last one by a step of a replica; `false` when all is over.
    pub fn advance(&mut self) -> Result<bool, SimulationError> {
        if let Some(&row) = self.order.get(self.num_routed) {
            let request = self.trace[row];
            for replica in &mut self.replicas {
                replica.run_until(request.arrival)?;
            }
            let loads: Vec<_> = self.replicas.iter().map(Simulation::num_requests).collect();
            let chosen = self.router.route(&request, &loads);
            self.replicas[chosen].push(request);
            self.rows[chosen].push(row);
            self.num_routed += 1;
            return Ok(true);
        }
        while let Some(replica) = self.replicas.get_mut(self.num_done) {
            if replica.advance()? {
                return Ok(true);
            }
            self.num_done += 1;
        }
        Ok(false)
    }

    /// What has been found so far, one a replica.
    pub fn into_results(self) -> Vec<ReplicaResult> {
        let replicas = self.replicas.into_iter().map(Simulation::into_result);
        self.rows.into_iter().zip(replicas).map(|(rows, result)| ReplicaResult { rows, result }).collect()
    }
}
