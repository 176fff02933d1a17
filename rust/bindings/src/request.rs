//! Requests: Python arguments become one [`engine::GenerationRequest`].

use std::collections::BTreeMap;

use engine::{GenerationRequest, MAX_CHOICES, Prompt, RenderOptions, ToolOptions};
use openai::chat::thinking;
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyString, PyTuple},
};

use crate::{
    adapters,
    arguments::{Integer, Real, Text, at_least, at_least_if_given, named, named_text, refuse, text, token_ids, within},
    enums::ToolChoice,
    exceptions::{invalid, not_yet},
    fields::{Fields, getters, given, reduced, shown_dict},
    images, messages,
    sampling::{DryFields, SamplingFields},
    service::{ServiceFields, check_priority},
    which::OneOrMany,
};

/// A chat completion: messages, and how to continue them.
///
/// `messages` is a list of dicts with `role` and `content`, or a str that is one user turn. `model` is a label; a `Runner` has
/// one model. Fields left `None` follow the model's `generation_config.json`; without one the temperature is 1.0 and the others
/// are off.
///
/// - `temperature`: 0 or more; 0 is greedy. `top_k`: 0 or more of the likeliest tokens; 1 is greedy, 0 is off. `top_p`: above 0
///   and at most 1. `min_p`: 0 to 1.
/// - `presence_penalty`, `frequency_penalty`: -2 to 2, subtracted from logits; 0 is off. `repetition_penalty`: above 0, divides
///   them; 1 is off.
/// - `dry_multiplier`: 0 or more, turns the DRY penalty on; 0 is off. `dry_base`: 1 or more (1.75 unless given).
///   `dry_allowed_length`: tokens, 0 to 2^27 (2 unless given). `dry_sequence_breakers`: texts of a character or more (newline,
///   colon, quote, star unless given).
/// - `logit_bias`: a dict of token ids, each with what is added to its logit, -100 to 100. `logprobs`: whether the answer has the
///   log probability of each token; `top_logprobs`: and of how many of the likeliest, 0 or more.
/// - `max_tokens`: generated tokens at most, 1 or more, over which `finish_reason` is "length"; left out, up to the model's
///   length.
/// - `stop_seqs`: a text or a list of texts, which end the answer and are not part of it. `ignore_eos`: go on past
///   end-of-sequence tokens.
/// - `grammar`: what the answer must be, of the kind that `grammar_type` says: "regex", a regular expression for the whole
///   answer; "json_schema", a JSON Schema as a dict or its text; "choice", a list of texts; "lark" or "llguidance", a grammar as
///   llguidance reads it; "structural_tag", free text with parts of a given form, a dict or its text. Not with `ignore_eos`. What
///   ends with "length" is incomplete.
/// - `n_choices`: independent continuations, 1 to 1024. `seed`: 0 to 2^64 - 1, makes the request's random numbers its own: the
///   same text whatever runs beside it.
/// - `stream`: the answer comes in parts, as an iterator.
/// - `truncate_sequence`: drop the start of a prompt that is too long instead of raising.
/// - `enable_thinking`: True or False for the chat template. `reasoning_effort`: "low", "medium", "high", "xhigh" or "max" for
///   it; "off" or "none" turns thinking off. `thinking_budget`: tokens of reasoning at most, 0 or more, behind which the answer
///   begins.
/// - `priority`: -2^31 to 2^31 - 1; lower goes first. `deadline`: seconds from submission, above 0, after which the request ends
///   with the text it has and the `finish_reason` "timeout". `tenant`: whom the request belongs to; with the runner's
///   `fairness="drr"` tenants take turns.
/// - `cache_salt`: cached blocks are shared only with requests of the same salt, so that nobody else can tell what was asked from
///   how fast an answer comes. `public_messages`: so many leading messages, 0 or more, such as the system prompt, are shared in
///   spite of it.
/// - `keep`: each choice ends with a `Sequence` that can be gone on from.
/// - `adapter`: the adapter that it runs with, by alias or as a `LoraAdapterGeneration`; `adapters`: the same as a list of one,
///   the older form, or an empty one for the model as it is.
/// - `tool_schemas`: functions that the model may call, each a dict or its text in OpenAI's form, with `name`, `description` and
///   `parameters`, a JSON Schema. `tool_choice`: `ToolChoice.Auto` (unless given), `ToolChoice.NoTools`, "required", or
///   `{"type": "function", "function": {"name": ...}}`. `parallel_tool_calls`: an answer may have several. Calls are enforced by
///   a grammar: they name a function that is there, with arguments of its schema.
/// - Images, for a model of `Which.MultimodalPlain` that sees: `content` is a list of parts, `{"type": "text", "text": ...}` and
///   `{"type": "image", "image": ...}` with all that an `RgbImage` is made of, or `{"type": "image_url", "image_url": {"url":
///   ...}}`. They are read here; `messages` has them as `RgbImage`.
/// - Sounds, for one that hears: `{"type": "audio", "audio": ...}` with all that a `Sound` is made of, beside an array its
///   `rate`; `{"type": "audio_url", "audio_url": {"url": ...}}`; or `{"type": "input_audio", "input_audio": {"data": base64,
///   "format": "wav"}}`. `messages` has them as `Sound`.
/// - Videos, for one that takes them: `{"type": "video", "video": ...}` with all that a `Video` is made of, or `{"type":
///   "video_url", "video_url": {"url": ...}}`, beside either an `fps`. `messages` has them as `Video`.
/// - `allowed_media_domains`: hosts that http and https URLs may name; none unless given.
///
/// A request gives back its fields, is equal to one of equal fields, and can be copied and pickled. A value out of range raises
/// `ValueError`, here or when the request is sent; a field that is not supported yet, which are those not named here, raises
/// `NotImplementedError`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct ChatCompletionRequest {
    pub request: GenerationRequest,
    #[pyo3(get)]
    model: String,
    #[pyo3(get)]
    pub stream: bool,
    fields: Fields,
}

/// A completion of a text as it is, without chat template.
///
/// - `prompt`: a str, tokenized with special tokens added, or token ids: a list, a tuple or an array of integers.
/// - `echo_prompt`: put the prompt's text before each continuation. `logprobs`: 0 or more; the answer has the log probability of
///   each of its tokens, with `echo_prompt` of the prompt's as well (the first is None), and of so many of the likeliest at each
///   position.
/// - `best_of`: of so many continuations, at most 1024 (left out, as many as are returned), the `n_choices` likeliest are
///   returned. `suffix`: a text that goes after each continuation. With `fill_in_middle` the model writes what goes between
///   `prompt` and `suffix`, which is not appended; its vocabulary must have tokens for that, as those of models for code have.
/// - `public_prefix_len`: leading tokens, 0 or more, that are shared in spite of a `cache_salt`.
///
/// The other fields are those of `ChatCompletionRequest`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct CompletionRequest {
    pub request: GenerationRequest,
    #[pyo3(get)]
    model: String,
    fields: Fields,
}

fn check_choices(n_choices: &Bound<'_, PyAny>) -> PyResult<usize> {
    let count: Integer = n_choices.extract()?;
    // The engine refuses 0 in the mirrored interface's words.
    if count == Integer::Near(0) { Ok(0) } else { within("n_choices", &count, 1, MAX_CHOICES) }
}

fn check_public_messages(count: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least("public_messages", &count.extract()?, 0)
}

fn check_public_prefix_len(count: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least("public_prefix_len", &count.extract()?, 0)
}

/// Tools without a chat are nothing that a text could be told of.
fn refuse_tools(tool_choice: Option<ToolChoice>, rest: &[(&str, bool)]) -> PyResult<()> {
    if tool_choice == Some(ToolChoice::Auto) {
        return Err(not_yet("`tool_choice=ToolChoice.Auto`", "send a chat, whose template tells the model of the tools"));
    }
    refuse(rest)
}

fn tool_options(tools: Option<&Bound<'_, PyAny>>, choice: Option<&Bound<'_, PyAny>>, parallel: bool) -> PyResult<ToolOptions> {
    let tools = tools.map(messages::tools).transpose()?;
    let choice = choice.map(messages::tool_choice).transpose()?;
    openai::tools::options(openai::tools::Form::Chat, tools.as_deref(), choice.as_ref(), Some(parallel))
        .map_err(|error| invalid(error.message.replace("`tools", "`tool_schemas")))
}

#[pymethods]
impl ChatCompletionRequest {
    #[new]
    #[pyo3(signature = (
        messages, model, logprobs=false, n_choices=1, logit_bias=None, top_logprobs=None, max_tokens=None, presence_penalty=None,
        frequency_penalty=None, repetition_penalty=None, stop_seqs=None, temperature=None, top_p=None, top_k=None, stream=false,
        grammar=None, grammar_type=None, min_p=None, tool_schemas=None, tool_choice=None, dry_multiplier=None, dry_base=None,
        dry_allowed_length=None, dry_sequence_breakers=None, web_search_options=None, enable_thinking=None, truncate_sequence=false,
        reasoning_effort=None, max_tool_rounds=None, tool_dispatch_url=None, enable_code_execution=false, enable_shell=false,
        shell_skills=None, agent_permission=None, agent_approval_callback=None, code_execution_permission=None, session_id=None,
        files=None, input_files=None, ignore_eos=false, *, adapter=None, adapters=None, seed=None,
        priority=0, deadline=None, tenant=None, cache_salt=None, public_messages=0, keep=false, parallel_tool_calls=true,
        thinking_budget=None, allowed_media_domains=None
    ))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "mirrors a documented signature")]
    #[allow(clippy::too_many_lines, clippy::needless_pass_by_value, reason = "one line an argument")]
    fn new(
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text::model)] model: Text,
        logprobs: bool,
        #[pyo3(from_py_with = check_choices)] n_choices: usize,
        logit_bias: Option<BTreeMap<Integer, Real>>,
        top_logprobs: Option<Integer>,
        max_tokens: Option<Integer>,
        presence_penalty: Option<Real>,
        frequency_penalty: Option<Real>,
        repetition_penalty: Option<Real>,
        #[pyo3(from_py_with = text::stop_seqs)] stop_seqs: Option<OneOrMany>,
        temperature: Option<Real>,
        top_p: Option<Real>,
        top_k: Option<Integer>,
        stream: bool,
        grammar: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = text::grammar_type)] grammar_type: Option<String>,
        min_p: Option<Real>,
        tool_schemas: Option<Bound<'_, PyAny>>,
        tool_choice: Option<Bound<'_, PyAny>>,
        dry_multiplier: Option<Real>,
        dry_base: Option<Real>,
        dry_allowed_length: Option<Integer>,
        #[pyo3(from_py_with = text::dry_sequence_breakers)] dry_sequence_breakers: Option<Vec<Text>>,
        web_search_options: Option<Bound<'_, PyAny>>,
        enable_thinking: Option<bool>,
        truncate_sequence: bool,
        #[pyo3(from_py_with = text::reasoning_effort)] reasoning_effort: Option<String>,
        max_tool_rounds: Option<Bound<'_, PyAny>>,
        tool_dispatch_url: Option<Bound<'_, PyAny>>,
        enable_code_execution: bool,
        enable_shell: bool,
        shell_skills: Option<Bound<'_, PyAny>>,
        agent_permission: Option<Bound<'_, PyAny>>,
        agent_approval_callback: Option<Bound<'_, PyAny>>,
        code_execution_permission: Option<Bound<'_, PyAny>>,
        session_id: Option<Bound<'_, PyAny>>,
        files: Option<Bound<'_, PyAny>>,
        input_files: Option<Bound<'_, PyAny>>,
        ignore_eos: bool,
        adapter: Option<Bound<'_, PyAny>>,
        adapters: Option<Bound<'_, PyAny>>,
        seed: Option<Integer>,
        #[pyo3(from_py_with = check_priority)] priority: i32,
        deadline: Option<Real>,
        tenant: Option<Bound<'_, PyString>>,
        cache_salt: Option<Bound<'_, PyString>>,
        #[pyo3(from_py_with = check_public_messages)] public_messages: usize,
        keep: bool,
        parallel_tool_calls: bool,
        thinking_budget: Option<Integer>,
        #[pyo3(from_py_with = text::allowed_media_domains)] allowed_media_domains: Option<Vec<Text>>,
    ) -> PyResult<Self> {
        refuse(&[
            ("web_search_options", web_search_options.is_some()),
            ("max_tool_rounds", max_tool_rounds.is_some()),
            ("tool_dispatch_url", tool_dispatch_url.is_some()),
            ("enable_code_execution", enable_code_execution),
            ("enable_shell", enable_shell),
            ("shell_skills", shell_skills.is_some()),
            ("agent_permission", agent_permission.is_some()),
            ("agent_approval_callback", agent_approval_callback.is_some()),
            ("code_execution_permission", code_execution_permission.is_some()),
            ("session_id", session_id.is_some()),
            ("files", files.is_some()),
            ("input_files", input_files.is_some()),
        ])?;
        let fields = given!(
            py,
            n_choices,
            logit_bias,
            top_logprobs,
            max_tokens,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            stop_seqs,
            temperature,
            top_p,
            top_k,
            stream,
            grammar,
            grammar_type,
            min_p,
            tool_schemas,
            tool_choice,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_sequence_breakers,
            enable_thinking,
            truncate_sequence,
            reasoning_effort,
            ignore_eos,
            adapter,
            adapters,
            seed,
            priority,
            deadline,
            tenant,
            cache_salt,
            public_messages,
            keep,
            thinking_budget,
            allowed_media_domains
        );
        fields.set_item("parallel_tool_calls", (!parallel_tool_calls).then_some(false))?;
        fields.set_item("logprobs", logprobs.then_some(true))?;
        let top_logprobs = at_least_if_given("top_logprobs", top_logprobs.as_ref(), 0)?;
        if !logprobs && top_logprobs.is_some() {
            return Err(invalid("`top_logprobs` needs `logprobs=True`"));
        }
        let sampling = SamplingFields {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            dry: DryFields {
                multiplier: dry_multiplier,
                base: dry_base,
                allowed_length: dry_allowed_length,
                sequence_breakers: dry_sequence_breakers,
            },
            logit_bias,
            logprobs: logprobs.then(|| top_logprobs.unwrap_or(0)),
            stop_seqs,
            max_tokens,
            grammar: grammar.as_ref().map(messages::to_json_named).transpose()?,
            grammar_type,
            ignore_eos,
            seed,
        };
        let prompt = Prompt::Chat {
            messages: messages::parse_with(messages, &images::media(allowed_media_domains.as_deref())?)?,
            options: RenderOptions {
                enable_thinking: thinking(enable_thinking, reasoning_effort.as_deref())
                    .map_err(|error| invalid(error.message))?,
                reasoning_effort,
                thinking_budget: at_least_if_given("thinking_budget", thinking_budget.as_ref(), 0)?,
                tools: tool_options(tool_schemas.as_ref(), tool_choice.as_ref(), parallel_tool_calls)?,
                ..RenderOptions::default()
            },
        };
        let request = GenerationRequest {
            service: ServiceFields { priority, deadline, tenant, cache_salt, public_prefix: public_messages, keep }.check()?,
            n_choices,
            truncate_sequence,
            stream,
            adapter: adapters::choice(adapter.as_ref(), adapters.as_ref())?,
            ..GenerationRequest::new(prompt, sampling.check()?)
        };
        Ok(Self { request, model: model.0, stream, fields: Fields::of(&fields)? })
    }

    #[getter]
    fn parallel_tool_calls(&self) -> bool {
        let Prompt::Chat { options, .. } = &self.request.prompt else { return true };
        options.tools.parallel
    }

    #[getter]
    fn logprobs(&self) -> bool {
        self.request.sampling.logprobs.is_some()
    }

    /// The messages as a list of dicts.
    #[getter]
    fn messages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Prompt::Chat { messages, .. } = &self.request.prompt else { return Ok(py.None().into_bound(py)) };
        messages::to_python(py, messages)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        shown_dict("ChatCompletionRequest", &self.all(py)?)
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<Self>() {
            Ok(other) => self.all(py)?.eq(other.get().all(py)?)?.into_py_any(py),
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        reduced(&slf.get_type(), &slf.get().all(slf.py())?)
    }
}

impl ChatCompletionRequest {
    /// The keywords that make an equal one.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.fields.behind(py, [("messages", self.messages(py)?), ("model", self.model.as_str().into_bound_py_any(py)?)])
    }
}

getters! {
    ChatCompletionRequest: n_choices, logit_bias, top_logprobs, max_tokens, presence_penalty, frequency_penalty, repetition_penalty, stop_seqs, temperature, top_p, top_k, grammar, grammar_type, min_p, tool_schemas, tool_choice, dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers, enable_thinking, truncate_sequence, reasoning_effort, ignore_eos, adapter, adapters, seed, priority, deadline, tenant, cache_salt, public_messages, keep, thinking_budget, allowed_media_domains
}

#[pymethods]
impl CompletionRequest {
    #[new]
    #[pyo3(signature = (
        prompt, model, best_of=None, echo_prompt=false, presence_penalty=None, frequency_penalty=None, repetition_penalty=None,
        logit_bias=None, max_tokens=None, n_choices=1, stop_seqs=None, temperature=None, top_p=None, suffix=None, top_k=None,
        grammar=None, grammar_type=None, min_p=None, tool_schemas=None, tool_choice=None, dry_multiplier=None, dry_base=None,
        dry_allowed_length=None, dry_sequence_breakers=None, truncate_sequence=false, ignore_eos=false, *, adapter=None,
        adapters=None, logprobs=None, seed=None, priority=0, deadline=None, tenant=None, cache_salt=None, public_prefix_len=0,
        keep=false, fill_in_middle=false
    ))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "mirrors a documented signature")]
    #[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
    fn new(
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text::model)] model: Text,
        best_of: Option<Integer>,
        echo_prompt: bool,
        presence_penalty: Option<Real>,
        frequency_penalty: Option<Real>,
        repetition_penalty: Option<Real>,
        logit_bias: Option<BTreeMap<Integer, Real>>,
        max_tokens: Option<Integer>,
        #[pyo3(from_py_with = check_choices)] n_choices: usize,
        #[pyo3(from_py_with = text::stop_seqs)] stop_seqs: Option<OneOrMany>,
        temperature: Option<Real>,
        top_p: Option<Real>,
        suffix: Option<Bound<'_, PyString>>,
        top_k: Option<Integer>,
        grammar: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = text::grammar_type)] grammar_type: Option<String>,
        min_p: Option<Real>,
        tool_schemas: Option<Bound<'_, PyAny>>,
        tool_choice: Option<ToolChoice>,
        dry_multiplier: Option<Real>,
        dry_base: Option<Real>,
        dry_allowed_length: Option<Integer>,
        #[pyo3(from_py_with = text::dry_sequence_breakers)] dry_sequence_breakers: Option<Vec<Text>>,
        truncate_sequence: bool,
        ignore_eos: bool,
        adapter: Option<Bound<'_, PyAny>>,
        adapters: Option<Bound<'_, PyAny>>,
        logprobs: Option<Integer>,
        seed: Option<Integer>,
        #[pyo3(from_py_with = check_priority)] priority: i32,
        deadline: Option<Real>,
        tenant: Option<Bound<'_, PyString>>,
        cache_salt: Option<Bound<'_, PyString>>,
        #[pyo3(from_py_with = check_public_prefix_len)] public_prefix_len: usize,
        keep: bool,
        fill_in_middle: bool,
    ) -> PyResult<Self> {
        refuse_tools(tool_choice, &[("tool_schemas", tool_schemas.is_some())])?;
        let fields = given!(
            py,
            best_of,
            echo_prompt,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias,
            max_tokens,
            n_choices,
            stop_seqs,
            temperature,
            top_p,
            suffix,
            top_k,
            grammar,
            grammar_type,
            min_p,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_sequence_breakers,
            truncate_sequence,
            ignore_eos,
            adapter,
            adapters,
            logprobs,
            seed,
            priority,
            deadline,
            tenant,
            cache_salt,
            public_prefix_len,
            keep,
            fill_in_middle
        );
        fields.set_item("tool_choice", tool_choice)?;
        let suffix = suffix.map(|suffix| named_text("suffix", &suffix)).transpose()?;
        let (prompt, suffix) = placed(parse_prompt(prompt)?, suffix, fill_in_middle)?;
        let sampling = SamplingFields {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            dry: DryFields {
                multiplier: dry_multiplier,
                base: dry_base,
                allowed_length: dry_allowed_length,
                sequence_breakers: dry_sequence_breakers,
            },
            logit_bias,
            logprobs: at_least_if_given("logprobs", logprobs.as_ref(), 0)?,
            stop_seqs,
            max_tokens,
            grammar: grammar.as_ref().map(messages::to_json_named).transpose()?,
            grammar_type,
            ignore_eos,
            seed,
        };
        let request = GenerationRequest {
            service: ServiceFields { priority, deadline, tenant, cache_salt, public_prefix: public_prefix_len, keep }.check()?,
            n_choices,
            best_of: best_of.map(|best_of| within("best_of", &best_of, 0, MAX_CHOICES)).transpose()?,
            truncate_sequence,
            echo_prompt,
            suffix,
            stream: false,
            adapter: adapters::choice(adapter.as_ref(), adapters.as_ref())?,
            ..GenerationRequest::new(prompt, sampling.check()?)
        };
        Ok(Self { request, model: model.0, fields: Fields::of(&fields)? })
    }

    /// The text, or a list of token ids.
    #[getter]
    fn prompt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.request.prompt {
            Prompt::Text(text) | Prompt::Gap { before: text, .. } => text.into_bound_py_any(py),
            Prompt::TokenIds(ids) => ids.into_bound_py_any(py),
            Prompt::Chat { .. } | Prompt::Sequence { .. } | Prompt::TokenPair { .. } => Ok(py.None().into_bound(py)),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        shown_dict("CompletionRequest", &self.all(py)?)
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<Self>() {
            Ok(other) => self.all(py)?.eq(other.get().all(py)?)?.into_py_any(py),
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        reduced(&slf.get_type(), &slf.get().all(slf.py())?)
    }
}

impl CompletionRequest {
    /// The keywords that make an equal one.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.fields.behind(py, [("prompt", self.prompt(py)?), ("model", self.model.as_str().into_bound_py_any(py)?)])
    }
}

getters! {
    CompletionRequest: best_of, echo_prompt, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, max_tokens, n_choices, stop_seqs, temperature, top_p, suffix, top_k, grammar, grammar_type, min_p, tool_choice, dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers, truncate_sequence, ignore_eos, adapter, adapters, logprobs, seed, priority, deadline, tenant, cache_salt, public_prefix_len, keep, fill_in_middle
}

/// A prompt and what goes behind each of its continuations: that is appended, or the continuation is what goes between both.
fn placed(prompt: Prompt, suffix: Option<String>, fill_in_middle: bool) -> PyResult<(Prompt, Option<String>)> {
    if !fill_in_middle {
        return Ok((prompt, suffix));
    }
    match (prompt, suffix) {
        (Prompt::Text(before), Some(after)) => Ok((Prompt::Gap { before, after }, None)),
        _ => Err(invalid("`fill_in_middle` needs a `prompt` that is a str, and a `suffix`")),
    }
}

fn parse_prompt(prompt: &Bound<'_, PyAny>) -> PyResult<Prompt> {
    if prompt.is_instance_of::<PyString>() {
        return named("prompt", prompt).map(|Text(text)| Prompt::Text(text));
    }
    let ids = token_ids("prompt", prompt).map_err(|error| {
        if error.is_instance_of::<PyTypeError>(prompt.py()) {
            PyTypeError::new_err("`prompt` must be a str or token ids (integers) in order")
        } else {
            error
        }
    })?;
    Ok(Prompt::TokenIds(ids))
}
