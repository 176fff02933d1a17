//! The handle of a running model.

use std::{sync::Arc, time::Duration};

use engine::{CpuOptions, Engine, EngineConfig, Message, RenderOptions};
use pyo3::{
    prelude::*,
    types::{PyDict, PyString, PyTuple},
};

use crate::{
    arguments::{Integer, Real, at_least, at_least_if_given, check_seed, named_text, refuse, text, token_ids, within},
    completing::{complete, embed, rerank},
    detach::{enter, enter_long},
    doctor,
    embedding::EmbeddingRequest,
    enums::PagedCacheType,
    exceptions::{ModelNotFoundError, invalid},
    messages,
    model::Model,
    options::{self, MemoryArguments},
    process::OwnProcess,
    request::{ChatCompletionRequest, CompletionRequest},
    rerank::RerankRequest,
    response::{self, CompletionResponse, Envelope},
    streaming::ChatCompletionStreamer,
    which::{Selection, Which},
};

/// A running model, over a paged KV cache. Any number of threads may use it at once; requests that run together share each step.
///
/// - `which`: the model. `chat_template` and `jinja_explicit` are paths of a .jinja file or of a .json file with a
///   `chat_template`; the second goes before the first, and both before the model's own.
/// - `max_seqs`: requests that run together at most, 1 to 2^20 (32 unless given). `max_num_batched_tokens` (older spelling:
///   `prompt_batchsize`): tokens a step at most, 1 or more (4096 unless given); longer prompts are computed in chunks.
///   `max_step_latency`: about how many seconds, above 0 (0.25 unless given), a step may take; chunks of prompts are made small
///   enough. Beside answers they may make a step up to twice as long as answers alone take, even beyond this. `None` leaves them
///   as they are.
/// - The size of the KV pool, at most one of: `pa_gpu_mem`, in MB (2^20 bytes), 1 or more; `pa_gpu_mem_usage`, a fraction in
///   (0, 1] of the memory; `pa_ctxt_len`, tokens, 1 or more; `memory_goal`, which is "auto", a fraction, "4GiB" or "65536tokens".
///   On a CPU this is host memory: address space is reserved and committed as blocks are first used. With none of them the pool
///   serves `max_seqs` requests of the model's length, or takes half of the free memory when that is less; the size is logged.
/// - `guaranteed=True`: `max_seqs` requests of `pa_ctxt_len` tokens each, or of the model's length, are served at once without
///   waiting for memory, and none may be longer; where memory for that is not free, the error says what would fit.
///   `Runner.memory_plan` tells before loading.
/// - `pa_blk_size`: tokens a block, 8, 16 or 32 (32 unless given).
/// - `pa_cache_type`: type of the cached keys and values; `PagedCacheType.Int8` and `F8E4M3` take about half the memory of 16-bit
///   floats.
/// - `prefix_cache_n`: 0 turns the prefix cache off, any other number turns it on (16 unless given).
/// - `state_snapshot_mb`: of models with recurrent layers, MB (2^20 bytes) of snapshots of their states, where prefix hits end;
///   0 turns the prefix cache of such a model off. Unless given 256 MB, or eight snapshots where these take more.
/// - `no_kv_cache` drops a request's blocks after each step and computes everything again (slow, exact).
/// - `admission`: when a waiting request may run beside others. "watermark" (unless given): its prompt fits and a hundredth of
///   the pool stays free; "reserved": its prompt and `max_tokens` fit, so that nobody is ever preempted; "optimistic": its first
///   chunk fits.
/// - `victim`: who loses its blocks to a request ahead of it that finds none. "least_cost" (unless given): who has least to
///   compute again; "newest": who came last.
/// - `fairness`: who goes first. "priority" (unless given): the lowest `priority`, then the earliest `deadline`, then who came
///   first; "fcfs": who came first; "drr": as "priority", with tenants taking turns by deficit round-robin.
/// - `paged_attn=True` says what is so anyway. `no_paged_attn` gives each request its whole context up front from the same pool,
///   the baseline that paging is compared with. A pool of less than the model's context shortens it (`max_sequence_length()`); a
///   `pa_ctxt_len` that would be cut is refused.
/// - `token_source`: where the hub token comes from: `cache`, `none`, `literal:VALUE`, `env:NAME` or `path:FILE`.
/// - `deterministic` makes a request's logits the same bits cold or warm, alone or in a batch, in chunks of any size, preempted
///   or not, and on any number of threads (for one device, `cpu_tier`, dtype and `pa_cache_type`).
/// - `seed`, 0 to 2^64 - 1, seeds requests that have no seed of their own: each differently, or with `deterministic` all alike
///   (by 0 unless given).
/// - `device` is "cpu", a GPU such as "cuda:0", or "auto": the first GPU that this build's kernels run on, else the CPU.
///   `cpu_tier` forces an instruction set, such as "scalar" or "avx2", for tests and bug reports, and the CPU; `num_threads`,
///   1 or more, is the number of worker threads, on a GPU of those that sample.
/// - `cuda_graphs`: on a GPU, whether steps in which every request has 8 rows at most (those that decode, with or without
///   drafts) are recorded once for their padded size, as a CUDA graph, and launched as one; on unless given.
///   `attention_backend`: "auto", "split" (the keys of a request that decodes are read by several multiprocessors at once) or
///   "plain" (by one). `MISTRALRS_CUDA_GRAPHS=0` and `MISTRALRS_FLASHINFER_DECODE=0` in the environment turn off what is not
///   given.
/// - `kv_tier`: a folder for blocks that the pool drops, and for the next process: with the same model, type and prompt it
///   fetches them instead of computing the prompt. `kv_tier_size` is its size in MB (2^20 bytes), 1 or more (4096 unless given);
///   the least recently used go. The files hold prompts and answers, readable by their owner alone; damaged and foreign ones are
///   skipped with a warning.
/// - `kv_events`: tells routers over ZeroMQ which blocks the prefix cache holds, at "tcp://HOST:PORT", in the form of vLLM's KV
///   events; `kv_events_replay` is where they ask for what they missed, and `kv_events_topic` the topic ("" unless given). What
///   is told has the tokens of every prompt and answer, to whoever connects. An address that cannot be listened on raises
///   `AddressError`. See docs/fleet.md.
/// - `in_situ_quant` quantizes float weights as they are loaded: "2", "3", "4", "5", "6" or "8" bits, or "Q4_0", "Q4_1", "Q5_0",
///   "Q5_1", "Q8_0", "Q2K" to "Q6K", "MXFP4". Of matrices whose columns are no multiple of 256, K types give way to the next one
///   of 32; the token embedding and the matrix of logits become Q6K, or Q8_0 from five bits on. see docs/quantization.md.
/// - `speculative`: whether later tokens are guessed and checked in one step (speculative decoding), which changes the speed of
///   an answer and not its tokens. "auto": what followed when the last tokens were said before, where that pays; "prompt_lookup":
///   the same always; "off" unless given. `speculative_gamma`, 1 or more, is how many tokens a request guesses in a step at most;
///   unless given, "prompt_lookup" and a draft model guess 8, and "auto" without one as many as pay.
/// - `which_draft`: a smaller model of the same vocabulary that guesses instead, a `Which.Plain`, `Which.GGUF` or `Which.GGML`;
///   `speculative` is then "auto", where that pays, unless given, or "draft_model", always. See docs/speculation.md.
/// - `mtp_n_predict`, 1 or more: a head of the model itself, which predicts further tokens (multi-token prediction, MTP), guesses
///   so many at most. `mtp_model` is the folder, GGUF file or hub id that has the head, unless that is the model; it guesses 2
///   unless `mtp_n_predict` is given. `speculative` is then "auto", where that pays, unless given, or "mtp", always. Of
///   deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_next and qwen3_5. See docs/speculation.md.
/// - `load_progress` is called with the bytes of weights done and in all while the model loads.
/// - `lazy`: the model is loaded by the first request, or `reload_model()`, and not now; its files must be there all the same.
///
/// `with Runner(...) as runner:` gives its memory back at the end, as `close()` does.
///
/// A runner belongs to the process that made it: in a forked child its methods raise `InternalError`.
///
/// Raises `ValueError` (a `MistralPagedError`) for a value that cannot be honoured or a model that cannot be loaded, `TypeError`
/// for an unknown keyword, `NotImplementedError` for an argument that is not supported yet: those not named here.
#[pyclass(frozen, module = "mistral_paged")]
pub struct Runner {
    model: OwnProcess<Arc<Model>>,
    model_id: String,
}

/// More than this is taken for a typing error.
const MAX_SEQS: usize = 1 << 20;

#[pymethods]
impl Runner {
    #[new]
    #[pyo3(signature = (
        which, max_seqs=32, no_kv_cache=false, prefix_cache_n=16, token_source="cache", chat_template=None, jinja_explicit=None,
        pa_gpu_mem=None, pa_gpu_mem_usage=None, pa_ctxt_len=None, pa_blk_size=None, pa_cache_type=None, no_paged_attn=false,
        paged_attn=false, memory_goal=None, seed=None, max_num_batched_tokens=None, device="auto", *, max_step_latency=0.25, deterministic=false, kv_tier=None,
        kv_tier_size=None, kv_events=None, kv_events_replay=None, kv_events_topic=None, cpu_tier=None, num_threads=None, load_progress=None, admission=None, victim=None, fairness=None,
        prompt_batchsize=None, guaranteed=false, cuda_graphs=None, attention_backend="auto", num_device_layers=None, in_situ_quant=None, anymoe_config=None, which_draft=None,
        speculative=None, speculative_gamma=None, mtp_model=None, mtp_n_predict=None, enable_search=false, search_embedding_model=None,
        search_callback=None, tool_callbacks=None, mcp_client_config=None, code_execution_config=None, shell_config=None, state_snapshot_mb=None, lazy=false
    ))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "mirrors a documented signature")]
    #[allow(clippy::needless_pass_by_value, reason = "one line an argument")]
    fn new(
        py: Python<'_>,
        which: &Bound<'_, Which>,
        #[pyo3(from_py_with = check_max_seqs)] max_seqs: usize,
        no_kv_cache: bool,
        #[pyo3(from_py_with = check_prefix_cache_n)] prefix_cache_n: usize,
        #[pyo3(from_py_with = text::token_source)] token_source: &str,
        #[pyo3(from_py_with = text::chat_template)] chat_template: Option<&str>,
        #[pyo3(from_py_with = text::jinja_explicit)] jinja_explicit: Option<&str>,
        pa_gpu_mem: Option<Integer>,
        pa_gpu_mem_usage: Option<Real>,
        pa_ctxt_len: Option<Integer>,
        pa_blk_size: Option<Integer>,
        pa_cache_type: Option<PagedCacheType>,
        no_paged_attn: bool,
        paged_attn: bool,
        memory_goal: Option<Bound<'_, PyAny>>,
        seed: Option<Integer>,
        max_num_batched_tokens: Option<Integer>,
        #[pyo3(from_py_with = text::device)] device: &str,
        #[pyo3(from_py_with = options::max_step_latency)] max_step_latency: f64,
        deterministic: bool,
        kv_tier: Option<Bound<'_, PyAny>>,
        kv_tier_size: Option<Integer>,
        kv_events: Option<&Bound<'_, PyString>>,
        kv_events_replay: Option<&Bound<'_, PyString>>,
        kv_events_topic: Option<&Bound<'_, PyString>>,
        #[pyo3(from_py_with = text::cpu_tier)] cpu_tier: Option<&str>,
        num_threads: Option<Integer>,
        load_progress: Option<Bound<'_, PyAny>>,
        admission: Option<&Bound<'_, PyString>>,
        victim: Option<&Bound<'_, PyString>>,
        fairness: Option<&Bound<'_, PyString>>,
        prompt_batchsize: Option<Integer>,
        guaranteed: bool,
        cuda_graphs: Option<bool>,
        #[pyo3(from_py_with = text::attention_backend)] attention_backend: &str,
        num_device_layers: Option<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = text::in_situ_quant)] in_situ_quant: Option<&str>,
        anymoe_config: Option<Bound<'_, PyAny>>,
        which_draft: Option<Bound<'_, PyAny>>,
        speculative: Option<&Bound<'_, PyString>>,
        speculative_gamma: Option<Integer>,
        mtp_model: Option<&Bound<'_, PyString>>,
        mtp_n_predict: Option<Integer>,
        enable_search: bool,
        search_embedding_model: Option<Bound<'_, PyAny>>,
        search_callback: Option<Bound<'_, PyAny>>,
        tool_callbacks: Option<Bound<'_, PyAny>>,
        mcp_client_config: Option<Bound<'_, PyAny>>,
        code_execution_config: Option<Bound<'_, PyAny>>,
        shell_config: Option<Bound<'_, PyAny>>,
        state_snapshot_mb: Option<Integer>,
        lazy: bool,
    ) -> PyResult<Self> {
        refuse(&[
            ("num_device_layers", num_device_layers.is_some()),
            ("anymoe_config", anymoe_config.is_some()),
            ("enable_search", enable_search),
            ("search_embedding_model", search_embedding_model.is_some()),
            ("search_callback", search_callback.is_some()),
            ("tool_callbacks", tool_callbacks.is_some()),
            ("mcp_client_config", mcp_client_config.is_some()),
            ("code_execution_config", code_execution_config.is_some()),
            ("shell_config", shell_config.is_some()),
        ])?;
        if paged_attn && no_paged_attn {
            return Err(invalid("paged_attn and no_paged_attn are mutually exclusive"));
        }
        let selection = Selection::of(which)?;
        let (cuda, only_for_gpus) = options::cuda(py, cuda_graphs, attention_backend)?;
        if deterministic && attention_backend == "split" {
            return Err(invalid(
                "deterministic=True reads the keys of a request in one order, and attention_backend=\"split\" cuts them: leave one out",
            ));
        }
        let memory = MemoryArguments { pa_gpu_mem, pa_gpu_mem_usage, pa_ctxt_len, memory_goal: memory_goal.as_ref() };
        let mtp = options::mtp(py, mtp_model, mtp_n_predict.as_ref(), token_source)?;
        let speculation = options::speculation(speculative, speculative_gamma.as_ref(), mtp.as_ref(), which_draft.is_some())?;
        let config = EngineConfig {
            max_num_seqs: max_seqs,
            max_num_batched_tokens: batched_tokens(max_num_batched_tokens.as_ref(), prompt_batchsize.as_ref())?,
            max_step_latency: Duration::try_from_secs_f64(max_step_latency).ok(),
            no_kv_cache,
            prefix_caching: prefix_cache_n > 0,
            state_snapshot_bytes: options::state_snapshot_bytes(state_snapshot_mb.as_ref())?,
            no_paged_attn,
            policies: options::policies(admission, victim, fairness)?,
            paged_attention: memory.paged_attention(pa_blk_size.as_ref(), pa_cache_type, guaranteed)?,
            dtype: selection.dtype.into(),
            architecture: selection.architecture.map(str::to_owned),
            seed: check_seed(seed.as_ref())?,
            deterministic,
            in_situ_quant: options::in_situ_quant(in_situ_quant)?,
            imatrix: options::imatrix(py, &selection)?,
            calibration_file: options::calibration_file(py, &selection)?,
            adapters: options::resolve_adapters(py, &selection, token_source)?,
            embedding: selection.embedding,
            media: options::media(py, &selection, token_source)?,
            chat_template: options::chat_template(py, chat_template, jinja_explicit)?,
            device: options::device(device)?,
            kv_tier: options::kv_tier(py, kv_tier.as_ref(), kv_tier_size.as_ref())?,
            kv_events: options::kv_events(kv_events, kv_events_replay, kv_events_topic)?,
            cpu: CpuOptions {
                isa: cpu_tier.map(str::to_owned),
                num_threads: at_least_if_given("num_threads", num_threads.as_ref(), 1)?,
            },
            cuda_libraries: doctor::library_paths(py)?,
            cuda,
            speculation,
            mtp: mtp.map(|(head, _)| head),
            draft: options::draft(py, which_draft.as_ref(), selection.dtype, token_source)?,
            forced_drafts: true,
            only_for_gpus,
        };
        let source = options::resolve(py, &selection, token_source)?;
        let model_id = selection.model_id;
        let model = Model::new(model_id.clone(), source, config);
        if !lazy {
            model.load(py, load_progress.as_ref())?;
        }
        Ok(Self { model: OwnProcess::new(Arc::new(model)), model_id })
    }

    /// Answers a chat: a `ChatCompletionResponse`, or an iterator of chunks when the request has `stream=True`. Waits without
    /// holding the interpreter; Ctrl-C cancels.
    #[pyo3(signature = (request, model_id=None))]
    fn send_chat_completion_request<'py>(
        &self,
        py: Python<'py>,
        request: &ChatCompletionRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.check_model(model_id)?;
        let envelope = self.envelope();
        let engine = self.model.get()?.engine_or_reload(py)?;
        if !request.stream {
            let completion = complete(py, &engine, request.request.clone())?;
            return Ok(response::chat(py, envelope, completion, &engine)?.into_bound(py).into_any());
        }
        let n_choices = request.request.n_choices;
        let wants_logprobs = request.request.sampling.logprobs.is_some();
        let (request, submitter) = (request.request.clone(), engine.clone());
        let stream = enter_long(py, request.prompt.text_bytes(), move || submitter.submit(request))?;
        let streamer = ChatCompletionStreamer::new(stream, n_choices, wants_logprobs, envelope, engine);
        Ok(Bound::new(py, streamer)?.into_any())
    }

    /// `send_chat_completion_request` to a model by its id.
    fn send_chat_completion_request_to_model<'py>(
        &self,
        py: Python<'py>,
        request: &ChatCompletionRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.send_chat_completion_request(py, request, Some(model_id))
    }

    /// Continues a text. Waits without holding the interpreter; Ctrl-C cancels.
    #[pyo3(signature = (request, model_id=None))]
    fn send_completion_request(
        &self,
        py: Python<'_>,
        request: &CompletionRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Py<CompletionResponse>> {
        self.check_model(model_id)?;
        let envelope = self.envelope();
        let engine = self.model.get()?.engine_or_reload(py)?;
        let completion = complete(py, &engine, request.request.clone())?;
        response::completion(py, envelope, completion, &engine)
    }

    /// `send_completion_request` to a model by its id.
    fn send_completion_request_to_model(
        &self,
        py: Python<'_>,
        request: &CompletionRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: &str,
    ) -> PyResult<Py<CompletionResponse>> {
        self.send_completion_request(py, request, Some(model_id))
    }

    /// Makes embeddings: of each input of the request a list of floats, of length 1, in their order. The model is one of
    /// `Which.Embedding`; else a `ValueError` says so. Waits without holding the interpreter; Ctrl-C cancels.
    #[pyo3(signature = (request, model_id=None))]
    fn send_embedding_request(
        &self,
        py: Python<'_>,
        request: &EmbeddingRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Vec<Vec<f32>>> {
        self.check_model(model_id)?;
        embed(py, &self.model.get()?.engine_or_reload(py)?, request.request.clone())
    }

    /// Scores the documents of the request against its query: a list of floats in the order of the documents, higher is nearer.
    /// The model is one of `Which.Embedding` whose files are a cross-encoder's; else a `ValueError` says so. Waits without
    /// holding the interpreter; Ctrl-C cancels.
    #[pyo3(signature = (request, model_id=None))]
    fn send_rerank_request(
        &self,
        py: Python<'_>,
        request: &RerankRequest,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Vec<f32>> {
        self.check_model(model_id)?;
        rerank(py, &self.model.get()?.engine_or_reload(py)?, request.request.clone())
    }

    /// `send_rerank_request` for asyncio: `await` it for the scores. Otherwise as `achat`.
    #[pyo3(signature = (request, model_id=None))]
    fn arerank<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, RerankRequest>,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("mistral_paged.aio")?.call_method1("rerank", (slf, request, model_id))
    }

    /// `send_embedding_request` for asyncio: `await` it for the vectors. Otherwise as `achat`.
    #[pyo3(signature = (request, model_id=None))]
    fn aembed<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, EmbeddingRequest>,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("mistral_paged.aio")?.call_method1("embed", (slf, request, model_id))
    }

    /// `send_chat_completion_request` for asyncio: `await` it for the `ChatCompletionResponse`, or with `stream=True` for an
    /// `AsyncChatCompletionStreamer`, whose chunks `async for` gives. What is wrong with the request is raised by the `await`.
    ///
    /// No thread waits: any number of requests from any number of event loops cost each loop one wake-up a step. Cancelling the
    /// task cancels the request and frees its blocks. The prompt is rendered and tokenized on the loop's thread; images become
    /// tiles, and a model that is unloaded is loaded, on another. Needs a loop that watches file descriptors (`add_reader`), as
    /// asyncio's do on Linux, and uvloop.
    #[pyo3(signature = (request, model_id=None))]
    fn achat<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, ChatCompletionRequest>,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("mistral_paged.aio")?.call_method1("chat", (slf, request, model_id))
    }

    /// `send_completion_request` for asyncio: `await` it for the `CompletionResponse`. Otherwise as `achat`.
    #[pyo3(signature = (request, model_id=None))]
    fn acomplete<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, CompletionRequest>,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("mistral_paged.aio")?.call_method1("complete", (slf, request, model_id))
    }

    /// Token ids of a text, with special tokens such as BOS added unless `add_special_tokens=False`; or of messages, rendered by
    /// the chat template, which writes the special tokens itself. `enable_thinking` is handed to the template and concerns
    /// messages only.
    #[pyo3(signature = (text, add_special_tokens=None, enable_thinking=None, model_id=None))]
    fn tokenize_text(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        add_special_tokens: Option<bool>,
        enable_thinking: Option<bool>,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<Vec<u32>> {
        self.check_model(model_id)?;
        if let Ok(text) = text.cast::<PyString>() {
            let text = named_text("text", text)?;
            if enable_thinking.is_some() {
                return Err(invalid("`enable_thinking` concerns messages, and `text` is a str; leave it out"));
            }
            let engine = self.engine()?;
            return enter_long(py, text.len(), move || engine.tokenize_text(&text, add_special_tokens.unwrap_or(true)));
        }
        if add_special_tokens.is_some() {
            return Err(invalid(
                "`add_special_tokens` concerns a str, and `text` is messages, whose template adds them; leave it out",
            ));
        }
        let messages = messages::parse(text)?;
        let engine = self.engine()?;
        let num_bytes = messages.iter().map(Message::text_bytes).sum();
        let options = RenderOptions { enable_thinking, ..RenderOptions::default() };
        enter_long(py, num_bytes, move || engine.tokenize_chat(&messages, &options))
    }

    /// Text of token ids, which may be a list, a tuple or an array of integers.
    #[pyo3(signature = (tokens, skip_special_tokens=false, model_id=None))]
    fn detokenize_text(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
        #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>,
    ) -> PyResult<String> {
        self.check_model(model_id)?;
        let ids = token_ids("tokens", tokens)?;
        let engine = self.engine()?;
        enter(py, || engine.detokenize_text(&ids, skip_special_tokens))
    }

    /// What the model's `generation_config.json` says of sampling: `temperature`, `top_k`, `top_p`, `min_p` and
    /// `repetition_penalty`, which requests follow in the fields that they leave out; `None` where it says nothing.
    fn generation_config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine()?;
        let config = engine.generation_config();
        let dict = PyDict::new(py);
        dict.set_item("temperature", config.temperature.map(shortest))?;
        dict.set_item("top_k", config.top_k)?;
        dict.set_item("top_p", config.top_p.map(shortest))?;
        dict.set_item("min_p", config.min_p.map(shortest))?;
        dict.set_item("repetition_penalty", config.repetition_penalty.map(shortest))?;
        Ok(dict)
    }

    /// Tokens of a request at most, prompt and answer together: `context_length()`, or what the KV cache holds where that is
    /// less.
    #[pyo3(signature = (model_id=None))]
    fn max_sequence_length(&self, #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>) -> PyResult<usize> {
        self.check_model(model_id)?;
        Ok(self.engine()?.max_sequence_length())
    }

    /// Tokens of the model's context, whatever the KV cache holds. With `no_paged_attn`: what is reserved for a request.
    #[pyo3(signature = (model_id=None))]
    fn context_length(&self, #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>) -> PyResult<usize> {
        self.check_model(model_id)?;
        Ok(self.engine()?.context_length())
    }

    /// Ids of the models: the one of this runner.
    fn list_models(&self) -> Vec<String> {
        vec![self.model_id.clone()]
    }

    /// Id of the model that a request without `model_id` goes to.
    fn get_default_model_id(&self) -> &str {
        &self.model_id
    }

    /// Makes a model the default one; there is one, so only its own id is known.
    fn set_default_model_id(&self, #[pyo3(from_py_with = text::model_id)] model_id: &str) -> PyResult<()> {
        self.check_model(Some(model_id))
    }

    /// Whether a model is loaded; False once it was unloaded.
    fn is_model_loaded(&self, #[pyo3(from_py_with = text::model_id)] model_id: &str) -> PyResult<bool> {
        self.check_model(Some(model_id))?;
        Ok(self.model.get()?.is_loaded())
    }

    /// Gives back the memory of the weights and of the KV pool, and returns when that is done; the runner keeps how it was
    /// loaded. Requests in flight end with the text that they have and the reason "canceled". The next request loads the model
    /// again, as `reload_model` does; other methods raise until then, and sequences that were kept cannot be gone on from any
    /// more.
    ///
    /// `model_id`: the runner's own unless given. A `ValueError` if the model is unloaded already.
    #[pyo3(signature = (model_id=None))]
    fn unload_model(&self, py: Python<'_>, #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>) -> PyResult<()> {
        self.check_model(model_id)?;
        self.model.get()?.unload(py)
    }

    /// Loads the model again, as the runner was made, after `unload_model`; nothing happens if it is loaded. Waits without
    /// holding the interpreter.
    #[pyo3(signature = (model_id=None))]
    fn reload_model(&self, py: Python<'_>, #[pyo3(from_py_with = text::model_id)] model_id: Option<&str>) -> PyResult<()> {
        self.check_model(model_id)?;
        self.model.get()?.engine_or_reload(py).map(|_| ())
    }

    /// Ends the runner: requests in flight end with the text that they have and the reason "canceled", the memory of weights and
    /// pool is given back, and every later request raises `ValueError`. Returns when that is done; a second time does nothing.
    /// The end of a `with` block does the same.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.model.get()?.close(py)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    /// Ids of the models with their status: "loaded", "unloaded", "reloading" or "closed".
    fn list_models_with_status(&self) -> PyResult<Vec<(String, &'static str)>> {
        Ok(vec![(self.model_id.clone(), self.model.get()?.status())])
    }

    /// Ids of models that were unloaded.
    fn list_unloaded_models(&self) -> PyResult<Vec<String>> {
        Ok(if self.model.get()?.is_loaded() { Vec::new() } else { vec![self.model_id.clone()] })
    }

    /// Status of a model: "loaded", "unloaded", "reloading" or "closed".
    fn get_model_status(&self, #[pyo3(from_py_with = text::model_id)] model_id: &str) -> PyResult<&'static str> {
        self.check_model(Some(model_id))?;
        Ok(self.model.get()?.status())
    }

    fn __repr__(&self) -> String {
        match self.model.get().ok().and_then(|model| model.architecture()) {
            Some(architecture) => format!("Runner(model_id={:?}, architecture={architecture:?})", self.model_id),
            None => format!("Runner(model_id={:?})", self.model_id),
        }
    }
}

impl Runner {
    /// The engine of the loaded model; an error that names `reload_model` when it is unloaded.
    pub fn engine(&self) -> PyResult<Engine> {
        self.model.get()?.engine()
    }

    /// The same of a model by its id.
    pub fn engine_of(&self, model_id: Option<&str>) -> PyResult<Engine> {
        self.check_model(model_id)?;
        self.engine()
    }

    /// What every answer says of itself.
    pub fn envelope(&self) -> Envelope {
        Envelope::new(&self.model_id)
    }

    /// The model, unless this is another process than loaded it.
    pub fn model(&self) -> PyResult<&Arc<Model>> {
        self.model.get()
    }

    pub fn check_model(&self, model_id: Option<&str>) -> PyResult<()> {
        match model_id {
            Some(model_id) if model_id != self.model_id => {
                Err(ModelNotFoundError::new_err(format!("model `{model_id}` was not found; this runner has `{}`", self.model_id)))
            }
            _ => Ok(()),
        }
    }
}

/// The number that a file most likely has: 0.6, where a single-precision number is 0.60000002384.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}

/// Requests that run together at most.
pub fn check_max_seqs(max_seqs: &Bound<'_, PyAny>) -> PyResult<usize> {
    within("max_seqs", &max_seqs.extract()?, 1, MAX_SEQS)
}

pub(crate) fn check_prefix_cache_n(prefix_cache_n: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least("prefix_cache_n", &prefix_cache_n.extract()?, 0)
}

/// Tokens a step; `prompt_batchsize` is the older spelling.
pub fn batched_tokens(tokens: Option<&Integer>, older: Option<&Integer>) -> PyResult<usize> {
    match (tokens, older) {
        (Some(_), Some(_)) => {
            Err(invalid("`prompt_batchsize` and `max_num_batched_tokens` are the same option; give one of them"))
        }
        (None, Some(older)) => at_least("prompt_batchsize", older, 1),
        (tokens, None) => Ok(at_least_if_given("max_num_batched_tokens", tokens, 1)?.unwrap_or(4096)),
    }
}
