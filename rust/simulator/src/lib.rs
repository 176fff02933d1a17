//! The production scheduler and block pool in virtual time, against a cost model of a device.
//!
//! A [`Simulation`] feeds the requests of a [`Trace`] to the very [`paged::Scheduler`] that an engine runs, lets each
//! step last as long as a [`CostModel`] says, and writes down when every token came and what the KV memory held
//! meanwhile. Instead of the paged pool it can run one of the three allocators that the PagedAttention paper
//! (arXiv 2309.06180, section 6.1) compares with, see [`Allocator`]. A [`Fleet`] is several such engines behind a router.
//!
//! There is no clock, no randomness and no I/O: the same trace gives the same result, bit for bit.

mod buddy;
mod contiguous;
mod cost;
mod error;
mod fleet;
mod memory;
mod paged_server;
mod policies;
mod result;
mod router;
mod server;
mod simulation;
mod timeline;
mod trace;

pub use buddy::{Buddy, Chunk};
pub use cost::{CostModel, PRESETS, Preset};
pub use error::SimulationError;
pub use fleet::{Fleet, ReplicaResult};
pub use memory::MemoryByKind;
pub use policies::policies_of_names;
pub use result::{Ending, RequestRecord, SimulationResult, Totals};
pub use router::RouterPolicy;
pub use server::Allocator;
pub use simulation::{Simulation, SimulationConfig};
pub use timeline::Interval;
pub use trace::{MAX_REQUEST_TOKENS, Prefix, Trace, TraceColumns, TraceRequest};
