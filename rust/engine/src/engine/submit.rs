//! From a caller's request to a submission: everything that can be refused is refused here, on the caller's thread.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use super::{
    Shared,
    output::{Service, Submission},
    prompt::{public_prefix_len, tokenize},
    thread::Command,
};
use crate::{
    EngineError, GenerationRequest, IncrementalDecoder, MAX_CHOICES, Prompt, RequestStream, ServiceParams,
    output_text::OutputText,
    sampler::{ResolvedSampling, Sampler, dry_breaker_ids},
};

/// Validates and tokenises a request and sends it to the engine thread.
pub fn submit(shared: &Shared, request: GenerationRequest) -> Result<RequestStream, EngineError> {
    let submitted = Instant::now();
    if request.n_choices == 0 {
        return Err(EngineError::InvalidArgument("Number of choices must be greater than 0.".into()));
    }
    let num_run = request.best_of.unwrap_or(request.n_choices);
    if num_run < request.n_choices {
        return Err(EngineError::InvalidArgument(format!(
            "best_of is {num_run}, but must be at least n_choices, which is {}",
            request.n_choices
        )));
    }
    if num_run > MAX_CHOICES {
        let name = if request.best_of.is_some() { "best_of" } else { "n_choices" };
        return Err(EngineError::InvalidArgument(format!("{name} is {num_run}; it must be at most {MAX_CHOICES}")));
    }
    let mut params = request.sampling.clone();
    if num_run > request.n_choices {
        // The best choices are told by their log probabilities.
        params.logprobs.get_or_insert(0);
    }
    let resolved = Arc::new(ResolvedSampling::new(&params, &shared.generation_config, shared.vocab_size)?);
    let dry_breakers = match &resolved.dry {
        Some(dry) => dry_breaker_ids(&shared.tokenizer, &dry.sequence_breakers)?,
        None => HashSet::new(),
    };
    let dry_breakers = Arc::new(dry_breakers);
    let (mut prompt_token_ids, text) = tokenize(shared, &request.prompt)?;
    let num_given = prompt_token_ids.len();
    let public_prefix_len = public_prefix_len(shared, &request.prompt, &prompt_token_ids, request.service.public_prefix)?;
    let max_tokens = fit(shared, &request, &mut prompt_token_ids)?;
    let public_prefix_len = public_prefix_len.saturating_sub(num_given - prompt_token_ids.len());
    let service = check_service(&request.service, submitted, public_prefix_len)?;
    // What was cut off is not echoed.
    let text = text.filter(|_| prompt_token_ids.len() == num_given);

    let sampling = &request.sampling;
    let mut stop_token_ids = sampling.stop_token_ids.clone();
    if !sampling.ignore_eos {
        stop_token_ids.extend(shared.tokenizer.eos_ids());
    }
    let count = if shared.one_seed { 0 } else { shared.submitted.fetch_add(1, Ordering::Relaxed) };
    let seed = sampling.seed.or(shared.seed.map(|s| s.wrapping_add(count))).unwrap_or_else(rand::random);
    let sampler = Sampler::new(resolved, seed, &prompt_token_ids, dry_breakers);
    let decoder = match request.prompt {
        Prompt::Chat { .. } => IncrementalDecoder::new(true),
        Prompt::Text(_) | Prompt::TokenIds(_) => IncrementalDecoder::continuing(true),
    };
    let output_text = OutputText::new(decoder, &sampling.stop)?;
    let choices = (0..num_run).map(|i| (sampler.for_choice(i), output_text.clone())).collect();
    let echo = match (request.echo_prompt, text) {
        (false, _) => None,
        (true, Some(text)) => Some(text),
        (true, None) => Some(shared.tokenizer.decode(&prompt_token_ids, false)),
    };
    let (events, receiver) = mpsc::channel();
    let cancel = Arc::new(AtomicBool::new(false));
    let submission = Submission {
        prompt_token_ids: prompt_token_ids.into(),
        max_tokens,
        stop_token_ids,
        logprobs: sampling.logprobs,
        prompt_logprobs: request.echo_prompt && sampling.logprobs.is_some(),
        echo,
        suffix: request.suffix,
        num_returned: request.n_choices,
        stream: request.stream,
        choices,
        service,
        submitted,
        events,
        cancel: Arc::clone(&cancel),
    };
    shared.inbox.send(Command::Submit(Box::new(submission))).map_err(|_| super::ended())?;
    Ok(RequestStream { events: receiver, cancel, wants_logprobs: sampling.logprobs.is_some() })
}

/// How a request is served, in the scheduler's terms.
fn check_service(params: &ServiceParams, submitted: Instant, public_prefix_len: usize) -> Result<Service, EngineError> {
    if params.cache_salt.as_ref().is_some_and(String::is_empty) {
        return Err(EngineError::InvalidArgument(
            "cache_salt is empty: give some text, or leave it out to share with all".into(),
        ));
    }
    if params.public_prefix > 0 && params.cache_salt.is_none() {
        return Err(EngineError::InvalidArgument(
            "a public prefix is what others share in spite of a cache_salt: give one, or leave the prefix out".into(),
        ));
    }
    let deadline = params.deadline.map(|after| {
        let deadline = submitted.checked_add(after).filter(|_| after > Duration::ZERO);
        deadline
            .ok_or_else(|| EngineError::InvalidArgument(format!("deadline is {after:?}: give seconds above 0, or leave it out")))
    });
    Ok(Service {
        priority: params.priority,
        deadline: deadline.transpose()?,
        tenant: params.tenant.as_ref().map_or(0, tenant_number),
        cache_salt: params.cache_salt.clone().unwrap_or_default().into_bytes(),
        public_prefix_len,
    })
}

/// Tenants are told apart by number; should two ever share one, they share a turn.
fn tenant_number(tenant: &String) -> u64 {
    let mut hasher = DefaultHasher::new();
    tenant.hash(&mut hasher);
    hasher.finish()
}

/// Checks the prompt's length, or cuts its start; returns how many tokens may be generated.
fn fit(shared: &Shared, request: &GenerationRequest, prompt: &mut Vec<u32>) -> Result<usize, EngineError> {
    let max_len = shared.max_model_len;
    if request.sampling.max_tokens == Some(0) {
        return Err(EngineError::InvalidArgument("max_tokens must be at least 1.".into()));
    }
    if request.truncate_sequence {
        let reserve = request.sampling.max_tokens.unwrap_or(1);
        // The last token that is generated needs no slot of the pool.
        let keep = max_len.min(shared.servable_tokens.saturating_add(1)).saturating_sub(reserve).max(1);
        if prompt.len() > keep {
            prompt.drain(..prompt.len() - keep);
        }
    }
    if prompt.len() >= max_len {
        return Err(EngineError::InvalidArgument(format!(
            "Prompt sequence length is greater than {}, perhaps consider using truncate_sequence? The prompt has {} tokens, the \
             model's context {max_len}, and at least one token is generated.",
            max_len - 1,
            prompt.len()
        )));
    }
    if prompt.len() > shared.servable_tokens {
        return Err(EngineError::InvalidArgument(format!(
            "the prompt has {} tokens, but the whole KV cache of {} blocks serves sequences of at most {}: shorten the prompt, or give \
             the cache more memory",
            prompt.len(),
            shared.num_blocks,
            shared.servable_tokens
        )));
    }
    let room = max_len - prompt.len();
    Ok(request.sampling.max_tokens.map_or(room, |m| m.min(room)))
}
