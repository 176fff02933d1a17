//! Calls on lines of their own that lack the marker before them.

use super::{super::Tool, Found};

/// What a call is told by that has no marker before it.
pub(super) struct Alone<'a> {
    /// Before its name.
    pub open: String,
    /// Behind its name.
    pub after_name: String,
    /// One of these follows.
    pub next: [String; 2],
    /// One of these is called.
    pub tools: &'a [Tool],
}

impl Alone<'_> {
    /// Where such a call is in a text that begins a line or, if `is_in_line`, goes on with one. A line is one that has the
    /// name of a tool and nothing else, and what follows it is an argument or the end of the call: other text may well mention
    /// how calls are written.
    pub fn find(&self, text: &str, is_in_line: bool) -> Found {
        let mut begin = 0;
        for line in text.split_inclusive('\n') {
            let at = begin + line.len() - line.trim_start_matches(BLANKS).len();
            if begin > 0 || !is_in_line {
                match self.begins(&text[at..]) {
                    Begins::Yes => return Found::At(at),
                    Begins::Perhaps => return Found::Perhaps(at),
                    Begins::No => {}
                }
            }
            begin += line.len();
        }
        Found::Perhaps(text.len())
    }

    fn begins(&self, text: &str) -> Begins {
        let behind_open = match behind(text, &self.open) {
            Ok(rest) => rest,
            Err(begins) => return begins,
        };
        let of_tool = |tool: &Tool| self.begins_with_name(behind_open, &tool.name);
        self.tools.iter().map(of_tool).max().unwrap_or(Begins::No)
    }

    fn begins_with_name(&self, text: &str, name: &str) -> Begins {
        let behind_name = behind(text, name).and_then(|rest| behind(rest, &self.after_name));
        let behind_line = behind_name.and_then(|rest| behind(rest.trim_start_matches(BLANKS), "\n"));
        match behind_line {
            Ok(rest) => {
                let of_next = |next: &String| behind(rest.trim_start(), next).map_or_else(|begins| begins, |_| Begins::Yes);
                self.next.iter().map(of_next).max().unwrap_or(Begins::No)
            }
            Err(begins) => begins,
        }
    }
}

/// Spaces within a line.
const BLANKS: [char; 2] = [' ', '\t'];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Begins {
    No,
    Perhaps,
    Yes,
}

/// What stands behind a marker with which a text begins; else whether it may begin with it when more comes.
fn behind<'a>(text: &'a str, marker: &str) -> Result<&'a str, Begins> {
    let is_beginning = if marker.starts_with(text) { Begins::Perhaps } else { Begins::No };
    text.strip_prefix(marker).ok_or(is_beginning)
}
