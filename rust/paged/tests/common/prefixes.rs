//! Prefixes and whose they are, told apart exactly.

use std::collections::HashMap;

/// Numbers prefixes: equal numbers are equal prefixes, without any hashing that could collide.
#[derive(Default)]
pub struct Prefixes {
    ids: HashMap<(usize, u32), usize>,
    texts: HashMap<(usize, Vec<u8>), usize>,
    pub(super) parents: Vec<usize>,
}

impl Prefixes {
    fn push(&mut self, parent: usize) -> usize {
        self.parents.push(parent);
        self.parents.len() - 1
    }

    fn text(&mut self, parent: usize, text: &[u8]) -> usize {
        if let Some(&id) = self.texts.get(&(parent, text.to_vec())) {
            return id;
        }
        let id = self.push(parent);
        self.texts.insert((parent, text.to_vec()), id);
        id
    }

    /// Numbers of the prefixes that end at each token.
    pub fn chain(&mut self, owner: &Owner, tokens: &[u32]) -> Vec<usize> {
        let mut at = self.text(usize::MAX, &owner.identity);
        let mut chain = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            if position == owner.num_public_tokens && !owner.salt.is_empty() {
                at = self.text(at, &owner.salt);
            }
            at = if let Some(&id) = self.ids.get(&(at, token)) {
                id
            } else {
                let id = self.push(at);
                self.ids.insert((at, token), id);
                id
            };
            chain.push(at);
        }
        chain
    }
}

/// Whose KV is whose.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Owner {
    pub identity: Vec<u8>,
    pub salt: Vec<u8>,
    /// As asked for; those in whole blocks are public.
    pub public_prefix_len: usize,
    pub num_public_tokens: usize,
    pub skip_prefix_lookup: bool,
}

impl Owner {
    pub fn new(identity: &[u8]) -> Self {
        Self { identity: identity.to_vec(), ..Self::default() }
    }

    /// The owner of a request with a prompt of so many tokens, none behind which is public.
    pub(super) fn with_prompt(&self, num_prompt_tokens: usize, block_size: usize) -> Self {
        let public_prefix_len = self.public_prefix_len.min(num_prompt_tokens);
        Self { public_prefix_len, num_public_tokens: public_prefix_len / block_size * block_size, ..self.clone() }
    }

    pub fn salted(salt: &[u8], public_prefix_len: usize) -> Self {
        Self { salt: salt.to_vec(), public_prefix_len, ..Self::default() }
    }
}
