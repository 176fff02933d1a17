//! Requests that an operator may end, by the id that they go by.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use openai::ApiError;
use tokio::sync::watch;

type Senders = HashMap<String, Vec<watch::Sender<bool>>>;

/// By id, those that run or wait; clients may give several the same.
#[derive(Debug, Default)]
pub struct Cancels {
    senders: Mutex<Senders>,
}

/// A request's own entry, until it is dropped.
#[derive(Debug)]
pub struct Cancelled {
    cancels: Arc<Cancels>,
    id: String,
    sender: watch::Sender<bool>,
}

impl Cancels {
    fn lock(&self) -> MutexGuard<'_, Senders> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins.
    pub fn register(self: &Arc<Self>, id: &str) -> Cancelled {
        let sender = watch::Sender::new(false);
        self.lock().entry(id.to_owned()).or_default().push(sender.clone());
        Cancelled { cancels: Arc::clone(self), id: id.to_owned(), sender }
    }

    /// Ends the requests with this id; how many there were.
    pub fn cancel(&self, id: &str) -> usize {
        let senders = self.lock();
        let found = senders.get(id).map(Vec::as_slice).unwrap_or_default();
        for sender in found {
            sender.send_replace(true);
        }
        found.len()
    }
}

impl Cancelled {
    /// Becomes true when the request must end.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.sender.subscribe()
    }
}

impl Drop for Cancelled {
    fn drop(&mut self) {
        let mut senders = self.cancels.lock();
        if let Some(entry) = senders.get_mut(&self.id) {
            entry.retain(|sender| !sender.same_channel(&self.sender));
            if entry.is_empty() {
                senders.remove(&self.id);
            }
        }
    }
}

/// What the client of such a request gets.
pub fn error() -> ApiError {
    ApiError::new(499, "server_error", "cancelled", None, "an operator has cancelled the request".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_one_id_end_together_and_leave_nothing() {
        let cancels = Arc::new(Cancels::default());
        let (one, two, other) = (cancels.register("a"), cancels.register("a"), cancels.register("b"));
        assert_eq!(cancels.cancel("a"), 2);
        assert!([&one, &two].iter().all(|entry| *entry.watch().borrow()) && !*other.watch().borrow());
        drop((one, two, other));
        assert!(cancels.lock().is_empty() && cancels.cancel("a") == 0);
    }
}
