//! One line a request to standard error: never a word of a prompt or an answer.

use std::{io::Write, time::Instant};

use serde_json::json;

use crate::config::AccessLog;

/// A request, as its line tells of it.
pub struct Line<'a> {
    /// The method.
    pub method: &'a str,
    /// The path, without its query.
    pub path: &'a str,
    /// The response's status.
    pub status: u16,
    /// The request's id.
    pub request_id: &'a str,
    /// Whose key it has.
    pub tenant: Option<&'a str>,
    /// When its head was there.
    pub started: Instant,
}

impl Line<'_> {
    /// Writes the line.
    pub fn write(&self, form: AccessLog) {
        let seconds = self.started.elapsed().as_secs_f64();
        let line = match form {
            AccessLog::Off => return,
            AccessLog::Json => json!({
                "timestamp": openai::response::unix_seconds(),
                "method": self.method,
                "path": self.path,
                "status": self.status,
                "seconds": seconds,
                "request_id": self.request_id,
                "tenant": self.tenant,
            })
            .to_string(),
            AccessLog::Text => format!(
                "{} {} {} {seconds:.3}s {}{}",
                self.method,
                escaped(self.path),
                self.status,
                self.request_id,
                self.tenant.map(|tenant| format!(" {}", escaped(tenant))).unwrap_or_default()
            ),
        };
        // Whoever closed standard error wants no log.
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
}

/// Without control characters, which could forge lines or move a terminal's cursor.
fn escaped(text: &str) -> String {
    text.chars().take(512).flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_path_cannot_forge_a_line() {
        assert_eq!(super::escaped("/v1\nGET /x 200\u{1b}[2J"), "/v1\\nGET /x 200\\u{1b}[2J");
    }
}
