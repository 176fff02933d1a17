//! Responses that are kept, to be read or gone on from: in memory, within a budget of bytes and of time.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use engine::{Media, Message};
use serde_json::Value;

/// Bytes of what is kept at most.
const MAX_BYTES: usize = 64 << 20;
/// What is older is gone.
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// A response that is kept.
pub struct Kept {
    /// As it was sent.
    pub response: Value,
    /// The conversation up to it, its own text at the end.
    pub chat: Vec<Message>,
    tenant: Option<Arc<str>>,
    since: Instant,
    num_bytes: usize,
}

#[derive(Default)]
struct Inner {
    by_id: HashMap<String, Arc<Kept>>,
    /// Oldest first; some may have been deleted.
    order: VecDeque<String>,
    num_bytes: usize,
}

/// Responses by id. The oldest go first.
#[derive(Default)]
pub struct Store {
    inner: Mutex<Inner>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response of a tenant.
    pub fn keep(&self, id: &str, tenant: Option<Arc<str>>, response: Value, chat: Vec<Message>) {
        let num_bytes = response.to_string().len() + chat.iter().map(message_bytes).sum::<usize>();
        let mut inner = self.lock();
        inner.num_bytes += num_bytes;
        inner.order.push_back(id.to_owned());
        inner.by_id.insert(id.to_owned(), Arc::new(Kept { response, chat, tenant, since: Instant::now(), num_bytes }));
        while let Some(oldest) = inner.order.front() {
            let is_old = inner.by_id.get(oldest).is_none_or(|kept| kept.since.elapsed() > MAX_AGE);
            if !is_old && inner.num_bytes <= MAX_BYTES {
                return;
            }
            if let Some(id) = inner.order.pop_front() {
                inner.remove(&id);
            }
        }
    }

    /// A response of this tenant; `None` when it is not there any more.
    pub fn get(&self, id: &str, tenant: Option<&Arc<str>>) -> Option<Arc<Kept>> {
        let kept = self.lock().by_id.get(id).cloned()?;
        (kept.tenant.as_ref() == tenant && kept.since.elapsed() <= MAX_AGE).then_some(kept)
    }

    /// Forgets a response of this tenant; whether it was there.
    pub fn delete(&self, id: &str, tenant: Option<&Arc<str>>) -> bool {
        self.get(id, tenant).is_some() && self.lock().remove(id)
    }
}

fn message_bytes(message: &Message) -> usize {
    message.text().len() + 128 + message.media.iter().map(Media::num_bytes).sum::<usize>()
}

impl Inner {
    fn remove(&mut self, id: &str) -> bool {
        let removed = self.by_id.remove(id);
        self.num_bytes -= removed.as_ref().map_or(0, |kept| kept.num_bytes);
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_when_the_budget_is_used_up() {
        let store = Store::default();
        let large = Value::String("x".repeat(MAX_BYTES / 3));
        for id in ["a", "b", "c", "d"] {
            store.keep(id, None, large.clone(), Vec::new());
        }
        let there = |id| store.get(id, None).is_some();
        assert_eq!(["a", "b", "c", "d"].map(there), [false, false, true, true]);
        assert!(store.delete("c", None) && !store.delete("c", None));
        assert_eq!(store.lock().num_bytes, MAX_BYTES / 3 + 2);
    }

    #[test]
    fn a_tenant_has_no_response_of_another() {
        let store = Store::default();
        store.keep("a", Some("one".into()), Value::Null, Vec::new());
        assert!(store.get("a", None).is_none() && store.get("a", Some(&"two".into())).is_none());
        assert!(!store.delete("a", Some(&"two".into())) && store.get("a", Some(&"one".into())).is_some());
    }
}
