//! What is asked of the simulated engine, and when.

use crate::error::SimulationError;

/// Most tokens of a request, prompt and answer together.
pub const MAX_REQUEST_TOKENS: usize = 1 << 24;

/// Latest time in a trace, in seconds: some thirty years.
const MAX_TIME: f64 = 1e9;

/// Tokens that a request has in common with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// Requests with the same id share tokens.
    pub id: u64,
    /// So many leading tokens, prompt or answer: the turns of a conversation share all of both.
    pub len: usize,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceRequest {
    /// When it comes, in seconds from the start of the trace.
    pub arrival: f64,
    /// At least 1.
    pub prompt_tokens: usize,
    /// At least 1.
    pub output_tokens: usize,
    /// What it shares; `None`: nothing.
    pub prefix: Option<Prefix>,
    /// Whom it belongs to.
    pub tenant: u64,
    /// Lower goes first, under a policy that looks at it.
    pub priority: i32,
    /// When it should have ended, in seconds from the start of the trace.
    pub deadline: Option<f64>,
}

impl TraceRequest {
    /// A request that shares nothing, with the defaults of everything else.
    pub fn new(arrival: f64, prompt_tokens: usize, output_tokens: usize) -> Self {
        Self { arrival, prompt_tokens, output_tokens, prefix: None, tenant: 0, priority: 0, deadline: None }
    }

    /// Tokens when it has ended.
    pub fn num_tokens(&self) -> usize {
        self.prompt_tokens + self.output_tokens
    }
}

/// A trace by columns, all of one length but the optional ones, which may be empty. NaN in an optional column: none.
#[derive(Debug, Clone, Copy, Default)]
pub struct TraceColumns<'a> {
    /// [`TraceRequest::arrival`].
    pub arrival: &'a [f64],
    /// [`TraceRequest::prompt_tokens`].
    pub prompt_tokens: &'a [f64],
    /// [`TraceRequest::output_tokens`].
    pub output_tokens: &'a [f64],
    /// [`Prefix::id`], optional.
    pub prefix_id: &'a [f64],
    /// [`Prefix::len`], needed where there is a prefix id.
    pub prefix_tokens: &'a [f64],
    /// [`TraceRequest::tenant`], optional.
    pub tenant: &'a [f64],
    /// [`TraceRequest::priority`], optional.
    pub priority: &'a [f64],
    /// [`TraceRequest::deadline`], optional.
    pub deadline: &'a [f64],
}

/// Requests that have been checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    requests: Vec<TraceRequest>,
}

/// One row while it is read.
struct Row<'a> {
    index: usize,
    columns: &'a TraceColumns<'a>,
}

impl Trace {
    /// Checks requests; they need not come in order.
    pub fn new(requests: Vec<TraceRequest>) -> Result<Self, SimulationError> {
        for (row, request) in requests.iter().enumerate() {
            let check = |holds: bool, field, value: f64, requirement: String| {
                if holds { Ok(()) } else { Err(SimulationError::Trace { row, field, value, requirement }) }
            };
            let time = || format!("times are from 0 to {MAX_TIME} seconds");
            let count = |least: usize| format!("counts are from {least} to {MAX_REQUEST_TOKENS}");
            let is_time = |time: f64| (0.0..=MAX_TIME).contains(&time);
            let is_count = |tokens: usize| (1..=MAX_REQUEST_TOKENS).contains(&tokens);
            check(is_time(request.arrival), "arrival", request.arrival, time())?;
            check(is_count(request.prompt_tokens), "prompt_tokens", request.prompt_tokens as f64, count(1))?;
            check(is_count(request.output_tokens), "output_tokens", request.output_tokens as f64, count(1))?;
            let num_tokens = request.num_tokens();
            let most = format!("prompt and output together have at most {MAX_REQUEST_TOKENS} tokens, here {num_tokens}");
            check(num_tokens <= MAX_REQUEST_TOKENS, "output_tokens", request.output_tokens as f64, most)?;
            if let Some(prefix) = request.prefix {
                let most = format!("a prefix is no longer than prompt and output together, here {num_tokens}");
                check(prefix.len <= num_tokens, "prefix_tokens", prefix.len as f64, most)?;
            }
            if let Some(deadline) = request.deadline {
                check(is_time(deadline), "deadline", deadline, time())?;
            }
        }
        Ok(Self { requests })
    }

    /// Reads and checks columns.
    pub fn from_columns(columns: &TraceColumns) -> Result<Self, SimulationError> {
        let expected = columns.arrival.len();
        let needed = [("prompt_tokens", columns.prompt_tokens), ("output_tokens", columns.output_tokens)];
        let optional = [
            ("prefix_id", columns.prefix_id),
            ("prefix_tokens", columns.prefix_tokens),
            ("tenant", columns.tenant),
            ("priority", columns.priority),
            ("deadline", columns.deadline),
        ];
        let optional = optional.into_iter().filter(|(_, values)| !values.is_empty());
        for (field, values) in needed.into_iter().chain(optional) {
            if values.len() != expected {
                return Err(SimulationError::ColumnLength { field, len: values.len(), expected });
            }
        }
        Self::new((0..expected).map(|index| Row { index, columns }.read()).collect::<Result<_, _>>()?)
    }

    /// The requests, in the order given.
    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    pub(crate) fn into_requests(self) -> Vec<TraceRequest> {
        self.requests
    }
}

impl Row<'_> {
    fn read(&self) -> Result<TraceRequest, SimulationError> {
        let columns = self.columns;
        let tokens = MAX_REQUEST_TOKENS as f64;
        let id = self.optional(columns.prefix_id, "prefix_id", 0.0, MAX_ID)?;
        let prefix = match (id, self.optional(columns.prefix_tokens, "prefix_tokens", 0.0, tokens)?) {
            (Some(id), Some(len)) => Some(Prefix { id: id as u64, len: len as usize }),
            (Some(_), None) => return Err(self.error("prefix_tokens", f64::NAN, "a prefix needs its length")),
            (None, Some(len)) if len > 0.0 => return Err(self.error("prefix_tokens", len, "without a `prefix_id` only 0 works")),
            (None, _) => None,
        };
        Ok(TraceRequest {
            arrival: columns.arrival[self.index],
            prompt_tokens: self.whole(columns.prompt_tokens[self.index], "prompt_tokens", 1.0, tokens)? as usize,
            output_tokens: self.whole(columns.output_tokens[self.index], "output_tokens", 1.0, tokens)? as usize,
            prefix,
            tenant: self.optional(columns.tenant, "tenant", 0.0, MAX_ID)?.unwrap_or(0.0) as u64,
            priority: self.optional(columns.priority, "priority", i32::MIN.into(), i32::MAX.into())?.unwrap_or(0.0) as i32,
            deadline: columns.deadline.get(self.index).copied().filter(|deadline| !deadline.is_nan()),
        })
    }

    fn optional(&self, column: &[f64], field: &'static str, least: f64, most: f64) -> Result<Option<f64>, SimulationError> {
        let value = column.get(self.index).copied().filter(|value| !value.is_nan());
        value.map(|value| self.whole(value, field, least, most)).transpose()
    }

    fn whole(&self, value: f64, field: &'static str, least: f64, most: f64) -> Result<f64, SimulationError> {
        if value.fract() == 0.0 && (least..=most).contains(&value) {
            Ok(value)
        } else {
            Err(self.error(field, value, format!("whole numbers from {least} to {most} work")))
        }
    }

    fn error(&self, field: &'static str, value: f64, requirement: impl Into<String>) -> SimulationError {
        SimulationError::Trace { row: self.index, field, value, requirement: requirement.into() }
    }
}

/// Whole numbers up to here are exact in a column.
const MAX_ID: f64 = 9_007_199_254_740_992.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn columns<'a>() -> TraceColumns<'a> {
        TraceColumns { arrival: &[0.0, 1.0], prompt_tokens: &[3.0, 4.0], output_tokens: &[5.0, 6.0], ..TraceColumns::default() }
    }

    fn refused(columns: &TraceColumns) -> String {
        Trace::from_columns(columns).unwrap_err().to_string()
    }

    #[test]
    fn columns_become_requests() {
        let trace = Trace::from_columns(&TraceColumns {
            prefix_id: &[f64::NAN, 7.0],
            prefix_tokens: &[f64::NAN, 2.0],
            tenant: &[1.0, f64::NAN],
            priority: &[-2.0, f64::NAN],
            deadline: &[f64::NAN, 9.5],
            ..columns()
        })
        .unwrap();
        let first = TraceRequest { tenant: 1, priority: -2, ..TraceRequest::new(0.0, 3, 5) };
        let prefix = Some(Prefix { id: 7, len: 2 });
        assert_eq!(trace.requests(), [first, TraceRequest { prefix, deadline: Some(9.5), ..TraceRequest::new(1.0, 4, 6) }]);
    }

    #[test]
    fn every_bad_value_is_named_with_its_row() {
        let bad: [(&str, TraceColumns); 9] = [
            ("arrival", TraceColumns { arrival: &[0.0, -1.0], ..columns() }),
            ("arrival", TraceColumns { arrival: &[0.0, f64::NAN], ..columns() }),
            ("prompt_tokens", TraceColumns { prompt_tokens: &[3.0, 0.0], ..columns() }),
            ("prompt_tokens", TraceColumns { prompt_tokens: &[3.0, 1.5], ..columns() }),
            ("output_tokens", TraceColumns { output_tokens: &[3.0, 1e15], ..columns() }),
            ("output_tokens", TraceColumns { output_tokens: &[3.0, 16_777_216.0], ..columns() }),
            ("prefix_tokens", TraceColumns { prefix_id: &[f64::NAN, 0.0], ..columns() }),
            ("prefix_tokens", TraceColumns { prefix_tokens: &[0.0, 2.0], ..columns() }),
            ("deadline", TraceColumns { deadline: &[f64::NAN, f64::INFINITY], ..columns() }),
        ];
        for (field, columns) in bad {
            let error = refused(&columns);
            assert!(error.contains("row 1") && error.contains(field), "{field}: {error}");
        }
        let long = TraceColumns { prefix_id: &[0.0, 0.0], prefix_tokens: &[8.0, 11.0], ..columns() };
        assert!(refused(&long).contains("row 1: `prefix_tokens` is 11"));
        assert!(refused(&TraceColumns { tenant: &[1.0], ..columns() }).contains("`tenant` has 1 values and `arrival` has 2"));
    }
}
