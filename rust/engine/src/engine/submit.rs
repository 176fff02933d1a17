//! From a caller's request to a [`SubmittedRequest`]: everything that can be refused is refused here, on the caller's thread.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZeroU32,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use device::TokenSet;
use paged::Tenant;

use super::{
    RequestHandle, Shared,
    output::{AllowedTokens, PromptLogprobs, Service, SubmittedRequest, ThinkingBudget, WaitingTokens},
    prompt::{media_of, public_prefix_len, tokenize},
    sequence::{Origin, Sequence, Source},
    thread::Command,
};
use crate::{
    AdapterChoice, CallChoice, EmbeddingConfig, EngineError, EventSink, GenerationRequest, IncrementalDecoder, KeptPrompt,
    MAX_CHOICES, MediaKind, OutputKind, Prompt, SamplingParams, ServiceParams,
    event_sink::Outbox,
    grammar::Compiled,
    lora::{Generation, Registry},
    media::{
        PromptItem,
        prompt::{PromptItems, with_row_ids},
    },
    output_text::OutputText,
    sampler::{ResolvedSampling, Sampler, bad_word_ids, check_num_logprobs, dry_breaker_ids},
    tools::{MARK, Reading, answer_grammar},
};

/// Tokens at the end of a prompt, in which it shows whether the answer begins with reasoning.
const MARKER_TOKENS: usize = 16;

/// Validates and tokenizes a request and sends it to the engine thread; its events go to `sink`.
pub fn submit(shared: &Shared, request: GenerationRequest, sink: Box<dyn EventSink>) -> Result<RequestHandle, EngineError> {
    let submitted_at = Instant::now();
    check_running(shared).and_then(|()| check_kind(shared, request.output))?;
    check_together(&request)?;
    let num_run = check_choices(&request)?;
    let mut params = request.sampling.clone();
    if num_run > request.n_choices {
        // The best choices are told by their log probabilities.
        params.logprobs.get_or_insert(0);
    }
    let resolved = Arc::new(ResolvedSampling::new(&params, &shared.generation_config, shared.vocab_size)?);
    let breakers = resolved.dry.as_ref().map(|dry| dry_breaker_ids(&shared.tokenizer, &dry.sequence_breakers));
    let dry_breakers = breakers.transpose()?.unwrap_or_default();
    let bad_words = bad_word_ids(&shared.tokenizer, &request.sampling.bad_words)?;
    let service = check_service(&request.service, submitted_at)?;
    let adapter = find_adapter(shared, &request)?;
    let (prompt, source) = go_on_from(shared, request.prompt, &request.service)?;
    let media = if let Prompt::Chat { messages, .. } = &prompt { media_of(shared, messages)? } else { Vec::new() };
    let adapter = own_adapter(shared, (request.adapter.as_ref(), adapter), &media, source.as_ref())?;
    let (mut prompt_token_ids, text) = tokenize(shared, &prompt, (&media, source.as_ref().is_some_and(Sequence::has_media)))?;
    let num_given = prompt_token_ids.len();
    let reading = reading(shared, &prompt, &prompt_token_ids)?;
    let grammar = compile_grammar(shared, &request.sampling, &prompt, reading.as_ref())?;
    cut(request.kept_prompt, &mut prompt_token_ids)?;
    let public_prefix_len = public_prefix_len(shared, &prompt, (&prompt_token_ids, &media), request.service.public_prefix)?;
    let asked = request.sampling.max_tokens.or(shared.generation_config.max_tokens(num_given));
    let max_tokens = fit_output(shared, (request.output, asked), request.truncate_sequence, &mut prompt_token_ids)?;
    let echoed = if request.echo_prompt { request.n_choices.saturating_mul(prompt_token_ids.len()) } else { 0 };
    check_num_logprobs(request.prompt_logprobs, prompt_token_ids.len())?;
    check_num_logprobs(request.sampling.logprobs, num_run.saturating_mul(max_tokens).saturating_add(echoed))?;
    let items = place_media(shared, &media, source.as_ref(), &prompt_token_ids, num_given)?;
    // What was cut off is not echoed.
    let text = text.filter(|_| prompt_token_ids.len() == num_given);

    let mut sampling = request.sampling;
    let stop_token_ids = ids_that_end(shared, &prompt, &mut sampling)?;
    let number = shared.submitted.fetch_add(1, Ordering::Relaxed);
    let own_seed = |s: u64| if shared.one_seed { s } else { s.wrapping_add(number) };
    let seed = sampling.seed.or(shared.seed.map(own_seed)).unwrap_or_else(rand::random);
    let only = all_but(shared, resolved.allowed.clone(), &forbidden_markers(shared, &prompt, grammar.is_some()))?;
    let thinking = thinking_budget(shared, &prompt, reading.as_ref())?;
    let allowed = allowed_tokens(shared, only, sampling.min_tokens, &stop_token_ids, thinking)?;
    let sampler = Sampler::new(resolved, seed, &prompt_token_ids, Arc::new(dry_breakers)).without(bad_words);
    // What a grammar begins with is not dropped.
    let stands_alone = grammar.is_none() && matches!(prompt, Prompt::Chat { .. });
    let decoder = decoder(stands_alone, !sampling.include_special_tokens).showing(markers(reading.as_ref()));
    let output_text = OutputText::new(decoder, &sampling.stop)?;
    let mut constraints = grammar.map_or_else(Vec::new, |grammar| grammar.begin(num_run)).into_iter();
    let choices = (0..num_run).map(|i| (sampler.for_choice(i), output_text.clone(), constraints.next())).collect();
    let echo = request.echo_prompt.then(|| text.unwrap_or_else(|| shared.tokenizer.decode(&prompt_token_ids, false)));
    let scheduled_token_ids: Arc<[u32]> = with_row_ids(items.as_deref(), &prompt_token_ids).into();
    let source = source.map(|sequence| Source::new(sequence, &scheduled_token_ids));
    let origin = Origin {
        tokenizer: Arc::clone(&shared.tokenizer),
        num_prompt_tokens: prompt_token_ids.len(),
        conversation: None,
        cache_salt: request.service.cache_salt.unwrap_or_default().into_bytes(),
        public_prefix_len: public_prefix_len.saturating_sub(num_given - prompt_token_ids.len()),
        adapter,
        items,
        second: prompt.second(),
    }
    .of(prompt, source.as_ref());
    let cancel = Arc::new(AtomicBool::new(false));
    let prompt_token_ids: Arc<[u32]> = prompt_token_ids.into();
    let waiting = Arc::new(WaitingTokens::add(&shared.waiting_tokens, prompt_token_ids.len(), origin.adapter.clone()));
    let adapter_generation = origin.adapter.as_ref().map(|generation| generation.id.clone());
    let submitted = SubmittedRequest {
        number,
        prompt_token_ids: Arc::clone(&prompt_token_ids),
        scheduled_token_ids,
        max_tokens,
        stop_token_ids,
        logprobs: sampling.logprobs,
        prompt_logprobs: PromptLogprobs {
            echoed: sampling.logprobs.filter(|_| request.echo_prompt),
            apart: request.prompt_logprobs,
        },
        return_token_ids: request.return_token_ids,
        echo,
        suffix: request.suffix,
        num_returned: request.n_choices,
        output: request.output,
        stream: request.stream,
        origin,
        keep: request.service.keep.then(|| shared.inbox.clone()),
        source,
        allowed,
        reading,
        choices,
        service,
        submitted_at,
        waiting: Arc::clone(&waiting),
        outbox: Outbox::new(sink, Arc::clone(&cancel)),
    };
    shared.inbox.send(Command::Submit(Box::new(submitted))).map_err(|_| super::ended())?;
    Ok(RequestHandle {
        number,
        inbox: shared.inbox.clone(),
        cancel,
        wants_logprobs: sampling.logprobs.is_some(),
        adapter_generation,
        prompt_token_ids,
        waiting,
    })
}

/// As [`fit`], by what a request ends with.
fn fit_output(
    shared: &Shared,
    (output, asked): (OutputKind, Option<usize>),
    truncate: bool,
    prompt: &mut Vec<u32>,
) -> Result<usize, EngineError> {
    match output {
        OutputKind::Tokens => fit(shared, asked, truncate, prompt),
        OutputKind::Vector => fit(shared, Some(1), truncate, prompt),
        OutputKind::Embedding => check_embedding_len(shared, prompt.len()),
    }
}

/// The images and sounds of a prompt in their places: its own, or those of the sequence that it goes on from by tokens.
fn place_media(
    shared: &Shared,
    media: &[Vec<Arc<PromptItem>>],
    source: Option<&Sequence>,
    token_ids: &[u32],
    num_given: usize,
) -> Result<Option<Arc<PromptItems>>, EngineError> {
    let placed = match &shared.media {
        Some(configs) if !media.is_empty() => Some(Arc::new(
            PromptItems::place(configs, shared.has_rope_axes, &media.concat(), token_ids)
                .map_err(|error| if token_ids.len() < num_given { cut_media() } else { error })?,
        )),
        _ => source.and_then(|sequence| sequence.origin.items.clone()),
    };
    if placed.is_some() && token_ids.len() < num_given {
        return Err(cut_media());
    }
    if let Some(placed) = placed.as_ref().filter(|placed| placed.are_crossed) {
        let num_places: usize = placed.items.iter().map(|placed| placed.positions.len()).sum();
        let of_images = placed.items.first().map(|placed| placed.item.token_id);
        if token_ids.iter().filter(|id| Some(**id) == of_images).count() != num_places {
            let text = "what comes behind a sequence has the token of an image: send the image in a message";
            return Err(EngineError::InvalidArgument(text.into()));
        }
    }
    let longest = placed.iter().flat_map(|placed| &placed.spans).map(|(first, end)| (end - first) as usize).max().unwrap_or(0);
    if longest > shared.longest_span {
        return Err(EngineError::InvalidArgument(format!(
            "an image takes {longest} tokens, which one step must compute, and steps have {} at most: give max_num_batched_tokens \
             more, or make the image smaller",
            shared.longest_span
        )));
    }
    Ok(placed)
}

fn cut_media() -> EngineError {
    EngineError::InvalidArgument(
        "a prompt with images or sounds cannot be cut: leave out truncate_sequence and truncate_prompt_tokens, or shorten it"
            .into(),
    )
}

/// Whether requests are taken at all.
fn check_running(shared: &Shared) -> Result<(), EngineError> {
    match shared.lost.get() {
        _ if shared.draining.load(Ordering::SeqCst) => Err(super::draining()),
        Some(why) => Err(EngineError::DeviceLost(why.clone())),
        None => Ok(()),
    }
}

/// The tokens that end the text, taken from what was asked.
fn ids_that_end(shared: &Shared, prompt: &Prompt, sampling: &mut SamplingParams) -> Result<Vec<u32>, EngineError> {
    let mut ids = std::mem::take(&mut sampling.stop_token_ids);
    if !sampling.ignore_eos {
        ids.extend(shared.tokenizer.eos_ids());
        if matches!(prompt, Prompt::Gap { .. }) {
            ids.extend(shared.tokenizer.gap_ends()?);
        }
    }
    Ok(ids)
}

/// Refuses what does not go together.
fn check_together(request: &GenerationRequest) -> Result<(), EngineError> {
    check_output(request)?;
    check_whole(request)
}

/// Of a prompt for what goes between two texts, none is dropped: the rest would mean something else.
fn check_whole(request: &GenerationRequest) -> Result<(), EngineError> {
    let cuts = [("truncate_sequence", request.truncate_sequence), ("truncate_prompt_tokens", request.kept_prompt.is_some())];
    match cuts.iter().find(|(_, is_asked)| *is_asked && matches!(request.prompt, Prompt::Gap { .. })) {
        None => Ok(()),
        Some((name, _)) => {
            Err(EngineError::InvalidArgument(format!("{name} would cut a prompt that has a text behind it: leave it out")))
        }
    }
}

/// An answer to a chat stands alone; other prompts go on.
fn decoder(stands_alone: bool, skip_special_tokens: bool) -> IncrementalDecoder {
    if stands_alone { IncrementalDecoder::new(skip_special_tokens) } else { IncrementalDecoder::continuing(skip_special_tokens) }
}

/// The grammar of the answer, compiled. What it cannot be combined with is refused: together they may leave no token.
fn compile_grammar(
    shared: &Shared,
    sampling: &SamplingParams,
    prompt: &Prompt,
    reading: Option<&Reading>,
) -> Result<Option<Arc<Compiled>>, EngineError> {
    let own = sampling.grammar.as_ref();
    let rules = match (prompt, reading) {
        (Prompt::Chat { options, .. }, Some(reading)) => {
            answer_grammar(reading, &options.tools, &shared.tokenizer, own.is_some())?
        }
        _ => None,
    };
    if own.is_none() && rules.is_none() {
        return Ok(None);
    }
    let given = [
        ("ignore_eos", sampling.ignore_eos),
        ("min_tokens", sampling.min_tokens > 0),
        ("allowed_token_ids", sampling.allowed_token_ids.is_some()),
        ("bad_words", !sampling.bad_words.is_empty()),
    ];
    if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
        return Err(EngineError::InvalidArgument(format!(
            "{name} goes with free text only, and a grammar, or that of the tools, says what the text must be: leave one of them out"
        )));
    }
    match (rules, own) {
        (Some(rules), own) => shared.grammars.compile_rules(&rules, own).map(Some),
        (None, Some(grammar)) => shared.grammars.compile(grammar).map(Some),
        (None, None) => Ok(None),
    }
}

/// How an answer to a chat is taken apart, if there may be more than text.
fn reading(shared: &Shared, prompt: &Prompt, prompt_token_ids: &[u32]) -> Result<Option<Reading>, EngineError> {
    let (Prompt::Chat { options, .. }, Some(dialect)) = (prompt, &shared.dialect) else { return Ok(None) };
    let tools = &options.tools;
    if let Some(name) = tools.only.iter().flatten().find(|name| tools.tools.iter().all(|tool| tool.name != **name)) {
        return Err(EngineError::InvalidArgument(format!("tool_choice names {name:?}, which is none of the tools")));
    }
    if tools.choice == CallChoice::Required && tools.callable().next().is_none() {
        return Err(EngineError::InvalidArgument(
            "tool_choice asks for a call, and there are no tools to be called: give some".into(),
        ));
    }
    let end = &prompt_token_ids[prompt_token_ids.len().saturating_sub(MARKER_TOKENS)..];
    let reading = Reading::new(dialect, tools, &shared.tokenizer.decode(end, false));
    Ok(reading.is_needed().then_some(reading))
}

/// Tokens with which calls begin, where tools are given and none may be called. A grammar allows none of them either.
fn forbidden_markers(shared: &Shared, prompt: &Prompt, has_grammar: bool) -> Vec<u32> {
    let (Prompt::Chat { options, .. }, Some(dialect)) = (prompt, &shared.dialect) else { return Vec::new() };
    let tools = &options.tools;
    if tools.choice != CallChoice::None || tools.tools.is_empty() || has_grammar {
        return Vec::new();
    }
    dialect.call_tokens(&shared.tokenizer)
}

/// Special tokens that mark reasoning or calls, with what is read in their place.
fn markers(reading: Option<&Reading>) -> Arc<[(u32, String)]> {
    let markers = reading.map_or(&[][..], |reading| &reading.dialect.markers);
    markers.iter().map(|(id, spelling)| (*id, format!("{MARK}{spelling}"))).collect()
}

/// Leaves the part of a prompt that is asked for.
fn cut(kept: Option<KeptPrompt>, prompt: &mut Vec<u32>) -> Result<(), EngineError> {
    let Some(kept) = kept else { return Ok(()) };
    if kept.num_tokens() == 0 {
        return Err(EngineError::InvalidArgument("truncate_prompt_tokens is 0: leave one token at least".into()));
    }
    match kept {
        KeptPrompt::First(num_tokens) => prompt.truncate(num_tokens),
        KeptPrompt::Last(num_tokens) => drop(prompt.drain(..prompt.len().saturating_sub(num_tokens))),
    }
    Ok(())
}

/// What `only` names, or all, but for these tokens.
fn all_but(shared: &Shared, only: Option<Arc<TokenSet>>, forbidden: &[u32]) -> Result<Option<Arc<TokenSet>>, EngineError> {
    if forbidden.is_empty() {
        return Ok(only);
    }
    let may_come = |token: &u32| only.as_ref().is_none_or(|only| only.mask().allows(*token)) && !forbidden.contains(token);
    let rest = TokenSet::new((0..shared.vocab_size as u32).filter(may_come), shared.vocab_size);
    if !rest.mask().allows_any() {
        return Err(EngineError::InvalidArgument(
            "allowed_token_ids has nothing but what begins a call, and tool_choice is \"none\": allow others".into(),
        ));
    }
    Ok(Some(Arc::new(rest)))
}

/// How long the answer's reasoning may be, and the tokens that then end it.
fn thinking_budget(shared: &Shared, prompt: &Prompt, reading: Option<&Reading>) -> Result<Option<ThinkingBudget>, EngineError> {
    let (Prompt::Chat { options, .. }, Some(reading)) = (prompt, reading) else { return Ok(None) };
    let (Some(limit), Some(end)) = (options.thinking_budget, reading.thinking_end()) else { return Ok(None) };
    let tokens = shared.tokenizer.encode(end, false)?;
    let close = tokens.into_iter().map(|token| TokenSet::new([token], shared.vocab_size)).collect();
    Ok(Some(ThinkingBudget { limit, close }))
}

/// Which tokens may come, of those that `only` names, when none that ends the text may before `min_tokens`.
fn allowed_tokens(
    shared: &Shared,
    only: Option<Arc<TokenSet>>,
    min_tokens: usize,
    stop_token_ids: &[u32],
    thinking: Option<ThinkingBudget>,
) -> Result<AllowedTokens, EngineError> {
    if min_tokens == 0 || stop_token_ids.is_empty() {
        return Ok(AllowedTokens { only, min_tokens, before_min: None, thinking });
    }
    let may_come = |token: &u32| only.as_ref().is_none_or(|only| only.mask().allows(*token)) && !stop_token_ids.contains(token);
    let before_min = TokenSet::new((0..shared.vocab_size as u32).filter(may_come), shared.vocab_size);
    if !before_min.mask().allows_any() {
        return Err(EngineError::InvalidArgument(format!(
            "min_tokens is {min_tokens}, and all tokens that may come end the text: allow others, or leave min_tokens out"
        )));
    }
    Ok(AllowedTokens { only, min_tokens, before_min: Some(before_min), thinking })
}

/// A model is loaded for text or for embeddings.
fn check_kind(shared: &Shared, output: OutputKind) -> Result<(), EngineError> {
    match (&shared.embedding, output) {
        (None, OutputKind::Embedding) => Err(super::makes_text()),
        (Some(EmbeddingConfig { score: Some(_), .. }), OutputKind::Tokens | OutputKind::Vector) => {
            Err(EngineError::InvalidArgument(
                "this model scores pairs of texts, and makes no text: send a RerankRequest, or POST /v1/rerank".into(),
            ))
        }
        (Some(_), OutputKind::Tokens | OutputKind::Vector) => Err(EngineError::InvalidArgument(
            "this model was loaded to make embeddings, and no text: send an EmbeddingRequest, or POST /v1/embeddings".into(),
        )),
        _ => Ok(()),
    }
}

/// Whether an input fits; how many tokens may be generated, as the scheduler counts.
fn check_embedding_len(shared: &Shared, num_tokens: usize) -> Result<usize, EngineError> {
    let longest = shared.max_model_len.min(shared.servable_tokens);
    if num_tokens <= longest {
        return Ok(1);
    }
    let message = format!("the input has {num_tokens} tokens, and this model takes {longest} at most");
    Err(EngineError::PromptTooLong { prompt_tokens: num_tokens, max_tokens: longest, message })
}

/// What is about tokens alone is refused for a vector.
fn check_output(request: &GenerationRequest) -> Result<(), EngineError> {
    if request.output == OutputKind::Tokens {
        return Ok(());
    }
    let SamplingParams { logprobs, max_tokens, min_tokens, bad_words, stop, grammar, .. } = &request.sampling;
    let given = [
        ("n_choices", request.n_choices != 1),
        ("best_of", request.best_of.is_some()),
        ("logprobs", logprobs.is_some()),
        ("max_tokens", max_tokens.is_some()),
        ("min_tokens", *min_tokens > 0),
        ("bad_words", !bad_words.is_empty()),
        ("stop", !stop.is_empty()),
        ("grammar", grammar.is_some()),
        ("echo_prompt", request.echo_prompt),
        ("prompt_logprobs", request.prompt_logprobs.is_some()),
        ("suffix", request.suffix.is_some()),
        ("keep", request.service.keep),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((name, _)) => {
            Err(EngineError::InvalidArgument(format!("{name} is about tokens, and a vector is asked for: leave it out")))
        }
    }
}

/// How many choices run, those that are not returned included.
fn check_choices(request: &GenerationRequest) -> Result<usize, EngineError> {
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
    Ok(num_run)
}

/// The prompt in its own terms, and the sequence that it goes on from.
fn go_on_from(shared: &Shared, prompt: Prompt, service: &ServiceParams) -> Result<(Prompt, Option<Sequence>), EngineError> {
    let Prompt::Sequence { sequence, then } = prompt else { return Ok((prompt, None)) };
    if service.cache_salt.is_some() {
        return Err(EngineError::InvalidArgument("a sequence has the cache_salt it began with: leave it out".into()));
    }
    Ok((sequence.prompt(then, &shared.tokenizer)?, Some(sequence)))
}

/// What the request is to run with.
fn find_adapter(shared: &Shared, request: &GenerationRequest) -> Result<Option<Arc<Generation>>, EngineError> {
    let Some(choice) = &request.adapter else {
        return Ok(shared.adapters.as_deref().and_then(Registry::active));
    };
    if matches!(request.prompt, Prompt::Sequence { .. }) {
        return Err(EngineError::InvalidArgument("a sequence has the adapter it began with: leave it out".into()));
    }
    if *choice == AdapterChoice::Base { Ok(None) } else { shared.adapters()?.find(choice).map(Some) }
}

/// The same, or of a model with adapters of its own the one for images, else for sounds, that a prompt holds.
fn own_adapter(
    shared: &Shared,
    (asked, found): (Option<&AdapterChoice>, Option<Arc<Generation>>),
    media: &[Vec<Arc<PromptItem>>],
    source: Option<&Sequence>,
) -> Result<Option<Arc<Generation>>, EngineError> {
    let own = shared.own_adapters.read().unwrap_or_else(PoisonError::into_inner);
    let Some(own) = &*own else { return Ok(found) };
    if asked.is_some() {
        let text = "this model has adapters of its own, which go by the images and sounds of a request: leave out adapter";
        return Err(EngineError::InvalidArgument(text.into()));
    }
    let holds = |kind| media.iter().flatten().any(|item| item.kind == kind);
    let chosen = MediaKind::ALL.into_iter().find(|kind| holds(*kind)).and_then(|kind| own.get(kind).cloned());
    let Some(source) = source else { return Ok(chosen) };
    let before = source.origin.adapter.clone();
    if !media.is_empty() && before.as_ref().map(|before| &before.id) != chosen.as_ref().map(|chosen| &chosen.id) {
        let text = "a sequence keeps the adapter that it began with, and what comes behind it asks for another of the model's own: send \
                    the whole conversation instead";
        return Err(EngineError::InvalidArgument(text.into()));
    }
    Ok(before)
}

/// How a request is served, in the scheduler's terms.
fn check_service(params: &ServiceParams, submitted_at: Instant) -> Result<Service, EngineError> {
    if params.cache_salt.as_ref().is_some_and(String::is_empty) {
        return Err(EngineError::InvalidArgument(
            "cache_salt is empty: give some text, or leave it out to share with all".into(),
        ));
    }
    if params.public_prefix > 0 && params.cache_salt.is_none() {
        return Err(EngineError::InvalidArgument(
            "public_messages (of a chat; else public_prefix_len) are what others share in spite of a cache_salt: give one, or leave \
             them out"
                .into(),
        ));
    }
    if let Some(after) = params.deadline.filter(Duration::is_zero) {
        return Err(EngineError::InvalidArgument(format!("deadline is {after:?}: give seconds above 0, or leave it out")));
    }
    Ok(Service {
        priority: params.priority,
        // One that no clock will show is none.
        deadline: params.deadline.and_then(|after| submitted_at.checked_add(after)),
        tenant: Tenant {
            id: params.tenant.as_ref().map_or(0, tenant_number),
            weight: params.tenant_weight.unwrap_or(NonZeroU32::MIN),
        },
    })
}

/// Tenants are told apart by number; should two ever share one, they share a turn.
fn tenant_number(tenant: &String) -> u64 {
    let mut hasher = DefaultHasher::new();
    tenant.hash(&mut hasher);
    hasher.finish()
}

/// Checks the prompt's length, or cuts its start; returns how many tokens may be generated.
fn fit(shared: &Shared, max_tokens: Option<usize>, truncate: bool, prompt: &mut Vec<u32>) -> Result<usize, EngineError> {
    let max_len = shared.max_model_len;
    if max_tokens == Some(0) {
        return Err(EngineError::InvalidArgument("max_tokens must be at least 1.".into()));
    }
    if truncate {
        let reserve = max_tokens.unwrap_or(1);
        // The last token that is generated needs no slot of the pool.
        let keep = max_len.min(shared.servable_tokens.saturating_add(1)).saturating_sub(reserve).max(1);
        if prompt.len() > keep {
            prompt.drain(..prompt.len() - keep);
        }
    }
    if prompt.len() >= max_len {
        let message = format!(
            "Prompt sequence length is greater than {}, perhaps consider using truncate_sequence? The prompt has {} tokens, the \
             model's context {max_len}, and at least one token is generated.",
            max_len - 1,
            prompt.len()
        );
        return Err(EngineError::PromptTooLong { prompt_tokens: prompt.len(), max_tokens: max_len, message });
    }
    if prompt.len() > shared.servable_tokens {
        let message = format!(
            "the prompt has {} tokens, but the whole KV cache of {} blocks serves sequences of at most {}: shorten the prompt, or give \
             the cache more memory",
            prompt.len(),
            shared.num_blocks,
            shared.servable_tokens
        );
        let max_tokens = shared.servable_tokens;
        return Err(EngineError::PromptTooLong { prompt_tokens: prompt.len(), max_tokens, message });
    }
    let room = max_len - prompt.len();
    Ok(max_tokens.map_or(room, |m| m.min(room)))
}
