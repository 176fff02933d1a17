"""Types of the native module; the classes are documented there."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AnySequence
from os import PathLike
from typing import Any, ClassVar, Generic, Literal, TypeAlias, final, overload

from typing_extensions import Self, TypeVar, disjoint_base

from mistral_paged.aio import AsyncChatCompletionStreamer

_object: TypeAlias = object
_Stream = TypeVar("_Stream", bound=bool, default=bool, covariant=True)

__all__ = [
    "Architecture",
    "CalledFunction",
    "ChatCompletionChunkResponse",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionStreamer",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "Delta",
    "DiffusionArchitecture",
    "EmbeddingArchitecture",
    "EmbeddingRequest",
    "EventSignal",
    "GpuTimer",
    "IsqOrganization",
    "Logprobs",
    "LoraAdapter",
    "LoraAdapterGeneration",
    "LoraAdapterInfo",
    "LoraRuntimeStatus",
    "MemoryPlan",
    "ModelDType",
    "MultimodalArchitecture",
    "PagedCacheType",
    "PendingRequest",
    "PromptTokensDetails",
    "RerankRequest",
    "ResponseLogprob",
    "ResponseMessage",
    "RgbImage",
    "Runner",
    "Sequence",
    "Sound",
    "SpeechLoaderType",
    "ToolCallResponse",
    "ToolChoice",
    "TopLogprob",
    "Usage",
    "Video",
    "Which",
    "__version__",
    "check_server",
    "quantize",
    "serve",
    "simulate",
    "simulator_devices",
    "submit",
    "submit_embeddings",
    "submit_scores",
    "survey",
    "takes_long",
]

__version__: str

def simulate(trace: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]: ...
def check_server(config: str) -> None: ...
def serve(runners: AnySequence[Runner], config: str, listening: Callable[[str], object]) -> str: ...
def quantize(
    which: Which,
    type: str,
    output: str | PathLike[str],
    *,
    force: bool = False,
    token_source: str = "cache",
    num_threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, int]: ...
def survey() -> dict[str, Any]: ...
def simulator_devices() -> list[tuple[str, tuple[float, float, float, float], str]]: ...

@final
class Architecture:
    Mistral: ClassVar[Architecture]
    Gemma: ClassVar[Architecture]
    Mixtral: ClassVar[Architecture]
    Llama: ClassVar[Architecture]
    Phi2: ClassVar[Architecture]
    Phi3: ClassVar[Architecture]
    Qwen2: ClassVar[Architecture]
    Gemma2: ClassVar[Architecture]
    Starcoder2: ClassVar[Architecture]
    Phi3_5MoE: ClassVar[Architecture]
    DeepseekV2: ClassVar[Architecture]
    DeepseekV3: ClassVar[Architecture]
    Qwen3: ClassVar[Architecture]
    GLM4: ClassVar[Architecture]
    GLM4Moe: ClassVar[Architecture]
    GLM4MoeLite: ClassVar[Architecture]
    Qwen3Moe: ClassVar[Architecture]
    SmolLm3: ClassVar[Architecture]
    GraniteMoeHybrid: ClassVar[Architecture]
    GptOss: ClassVar[Architecture]
    Qwen3Next: ClassVar[Architecture]
    Lfm2: ClassVar[Architecture]
    Lfm2Moe: ClassVar[Architecture]
    HunYuanDenseV1: ClassVar[Architecture]
    HunYuanMoEV1: ClassVar[Architecture]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class MultimodalArchitecture:
    Phi3V: ClassVar[MultimodalArchitecture]
    Idefics2: ClassVar[MultimodalArchitecture]
    LLaVANext: ClassVar[MultimodalArchitecture]
    LLaVA: ClassVar[MultimodalArchitecture]
    Lfm2Vl: ClassVar[MultimodalArchitecture]
    VLlama: ClassVar[MultimodalArchitecture]
    Qwen2VL: ClassVar[MultimodalArchitecture]
    Idefics3: ClassVar[MultimodalArchitecture]
    MiniCpmO: ClassVar[MultimodalArchitecture]
    Phi4MM: ClassVar[MultimodalArchitecture]
    Qwen2_5VL: ClassVar[MultimodalArchitecture]
    Gemma3: ClassVar[MultimodalArchitecture]
    Mistral3: ClassVar[MultimodalArchitecture]
    Llama4: ClassVar[MultimodalArchitecture]
    Gemma3n: ClassVar[MultimodalArchitecture]
    Qwen3VL: ClassVar[MultimodalArchitecture]
    Qwen3VLMoE: ClassVar[MultimodalArchitecture]
    Qwen3_5: ClassVar[MultimodalArchitecture]
    Qwen3_5Moe: ClassVar[MultimodalArchitecture]
    Qwen4Exp: ClassVar[MultimodalArchitecture]
    Voxtral: ClassVar[MultimodalArchitecture]
    Gemma4: ClassVar[MultimodalArchitecture]
    MuseGlimmer: ClassVar[MultimodalArchitecture]
    DiffusionGemma: ClassVar[MultimodalArchitecture]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class EmbeddingArchitecture:
    EmbeddingGemma: ClassVar[EmbeddingArchitecture]
    Qwen3Embedding: ClassVar[EmbeddingArchitecture]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class DiffusionArchitecture:
    Flux: ClassVar[DiffusionArchitecture]
    FluxOffloaded: ClassVar[DiffusionArchitecture]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class SpeechLoaderType:
    Dia: ClassVar[SpeechLoaderType]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class ModelDType:
    Auto: ClassVar[ModelDType]
    BF16: ClassVar[ModelDType]
    F16: ClassVar[ModelDType]
    F32: ClassVar[ModelDType]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class PagedCacheType:
    Auto: ClassVar[PagedCacheType]
    F8E4M3: ClassVar[PagedCacheType]
    F16: ClassVar[PagedCacheType]
    BF16: ClassVar[PagedCacheType]
    F32: ClassVar[PagedCacheType]
    Int8: ClassVar[PagedCacheType]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class GpuTimer:
    def __new__(cls, ordinal: int = 0) -> Self: ...
    def seconds(self, work: dict[str, Any], runs: int) -> list[float]: ...

@final
class IsqOrganization:
    Default: ClassVar[IsqOrganization]
    MoQE: ClassVar[IsqOrganization]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@final
class ToolChoice:
    NoTools: ClassVar[ToolChoice]
    Auto: ClassVar[ToolChoice]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...

@disjoint_base
class Which:
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    @final
    class Plain(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            model_id: str,
            arch: Architecture | None = None,
            tokenizer_json: str | None = None,
            topology: Any = None,
            organization: Any = None,
            write_uqff: Any = None,
            from_uqff: Any = None,
            dtype: ModelDType = ...,
            imatrix: str | None = None,
            calibration_file: str | None = None,
            hf_cache_path: str | None = None,
            matformer_config_path: Any = None,
            matformer_slice_name: Any = None,
            *,
            auto_map_params: Any = None,
        ) -> Self: ...
        @property
        def model_id(self) -> str: ...
        @property
        def arch(self) -> Architecture | None: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def topology(self) -> Any: ...
        @property
        def organization(self) -> Any: ...
        @property
        def write_uqff(self) -> Any: ...
        @property
        def from_uqff(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def imatrix(self) -> str | None: ...
        @property
        def calibration_file(self) -> str | None: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def matformer_config_path(self) -> Any: ...
        @property
        def matformer_slice_name(self) -> Any: ...
        @property
        def auto_map_params(self) -> Any: ...

    @final
    class Lora(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            model_id: str,
            adapters: AnySequence[LoraAdapter] | None = None,
            arch: Architecture | None = None,
            tokenizer_json: str | None = None,
            topology: Any = None,
            write_uqff: Any = None,
            from_uqff: Any = None,
            dtype: ModelDType = ...,
            hf_cache_path: str | None = None,
            max_adapters: int | None = None,
            max_rank: int | None = None,
            max_bytes: int | None = None,
            *,
            adapters_model_id: str | None = None,
            order: str | None = None,
            auto_map_params: Any = None,
        ) -> Self: ...
        @property
        def model_id(self) -> str: ...
        @property
        def adapters(self) -> AnySequence[LoraAdapter] | None: ...
        @property
        def arch(self) -> Architecture | None: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def topology(self) -> Any: ...
        @property
        def write_uqff(self) -> Any: ...
        @property
        def from_uqff(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def max_adapters(self) -> int | None: ...
        @property
        def max_rank(self) -> int | None: ...
        @property
        def max_bytes(self) -> int | None: ...
        @property
        def adapters_model_id(self) -> str | None: ...
        @property
        def order(self) -> str | None: ...
        @property
        def auto_map_params(self) -> Any: ...

    @final
    class MultimodalPlain(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            model_id: str,
            arch: MultimodalArchitecture | None = None,
            tokenizer_json: str | None = None,
            topology: Any = None,
            write_uqff: Any = None,
            from_uqff: Any = None,
            dtype: ModelDType = ...,
            max_edge: int | None = None,
            calibration_file: str | None = None,
            imatrix: str | None = None,
            hf_cache_path: str | None = None,
            matformer_config_path: Any = None,
            matformer_slice_name: Any = None,
            organization: Any = None,
            encoder_cache_memory_bytes: int | None = None,
            *,
            auto_map_params: Any = None,
        ) -> Self: ...
        @property
        def model_id(self) -> str: ...
        @property
        def arch(self) -> MultimodalArchitecture | None: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def topology(self) -> Any: ...
        @property
        def write_uqff(self) -> Any: ...
        @property
        def from_uqff(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def max_edge(self) -> int | None: ...
        @property
        def calibration_file(self) -> str | None: ...
        @property
        def imatrix(self) -> str | None: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def matformer_config_path(self) -> Any: ...
        @property
        def matformer_slice_name(self) -> Any: ...
        @property
        def organization(self) -> Any: ...
        @property
        def encoder_cache_memory_bytes(self) -> int | None: ...
        @property
        def auto_map_params(self) -> Any: ...

    VisionPlain: ClassVar[type[MultimodalPlain]]

    @final
    class Embedding(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            model_id: str,
            arch: EmbeddingArchitecture | None = None,
            tokenizer_json: str | None = None,
            topology: Any = None,
            write_uqff: Any = None,
            from_uqff: Any = None,
            dtype: ModelDType = ...,
            hf_cache_path: str | None = None,
            imatrix: Any = None,
            calibration_file: Any = None,
            *,
            pooling: str | None = None,
            quantized_filename: str | list[str] | None = None,
            tok_model_id: str | None = None,
        ) -> Self: ...
        @property
        def model_id(self) -> str: ...
        @property
        def arch(self) -> EmbeddingArchitecture | None: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def topology(self) -> Any: ...
        @property
        def write_uqff(self) -> Any: ...
        @property
        def from_uqff(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def imatrix(self) -> Any: ...
        @property
        def calibration_file(self) -> Any: ...
        @property
        def pooling(self) -> str | None: ...
        @property
        def quantized_filename(self) -> str | list[str] | None: ...
        @property
        def tok_model_id(self) -> str | None: ...

    @final
    class GGUF(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            quantized_model_id: str,
            quantized_filename: str | list[str] | None = None,
            tok_model_id: str | None = None,
            topology: Any = None,
            dtype: ModelDType = ...,
            *,
            tokenizer_json: str | None = None,
            mmproj_filename: str | None = None,
            organization: Any = None,
            write_uqff: Any = None,
            from_uqff: Any = None,
            imatrix: str | None = None,
            calibration_file: str | None = None,
            max_edge: int | None = None,
            adapters: AnySequence[LoraAdapter] | None = None,
            max_adapters: int | None = None,
            max_rank: int | None = None,
            max_bytes: int | None = None,
            hf_cache_path: str | None = None,
            matformer_config_path: Any = None,
            matformer_slice_name: Any = None,
            encoder_cache_memory_bytes: int | None = None,
            auto_map_params: Any = None,
            adapters_model_id: str | None = None,
            order: str | None = None,
        ) -> Self: ...
        @property
        def quantized_model_id(self) -> str: ...
        @property
        def quantized_filename(self) -> str | list[str] | None: ...
        @property
        def tok_model_id(self) -> str | None: ...
        @property
        def topology(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def mmproj_filename(self) -> str | None: ...
        @property
        def organization(self) -> Any: ...
        @property
        def write_uqff(self) -> Any: ...
        @property
        def from_uqff(self) -> Any: ...
        @property
        def imatrix(self) -> str | None: ...
        @property
        def calibration_file(self) -> str | None: ...
        @property
        def max_edge(self) -> int | None: ...
        @property
        def adapters(self) -> AnySequence[LoraAdapter] | None: ...
        @property
        def max_adapters(self) -> int | None: ...
        @property
        def max_rank(self) -> int | None: ...
        @property
        def max_bytes(self) -> int | None: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def matformer_config_path(self) -> Any: ...
        @property
        def matformer_slice_name(self) -> Any: ...
        @property
        def encoder_cache_memory_bytes(self) -> int | None: ...
        @property
        def auto_map_params(self) -> Any: ...
        @property
        def adapters_model_id(self) -> str | None: ...
        @property
        def order(self) -> str | None: ...

    @final
    class GGML(Which):
        __match_args__: ClassVar[tuple[str, ...]]
        def __new__(
            cls,
            quantized_model_id: str,
            quantized_filename: str | None = None,
            tok_model_id: str | None = None,
            tokenizer_json: str | None = None,
            gqa: int = ...,
            topology: Any = None,
            dtype: ModelDType = ...,
            *,
            hf_cache_path: str | None = None,
            adapters: AnySequence[LoraAdapter] | None = None,
            max_adapters: int | None = None,
            max_rank: int | None = None,
            max_bytes: int | None = None,
            adapters_model_id: str | None = None,
            order: str | None = None,
        ) -> Self: ...
        @property
        def quantized_model_id(self) -> str: ...
        @property
        def quantized_filename(self) -> str | None: ...
        @property
        def tok_model_id(self) -> str | None: ...
        @property
        def tokenizer_json(self) -> str | None: ...
        @property
        def gqa(self) -> int: ...
        @property
        def topology(self) -> Any: ...
        @property
        def dtype(self) -> ModelDType: ...
        @property
        def hf_cache_path(self) -> str | None: ...
        @property
        def adapters(self) -> AnySequence[LoraAdapter] | None: ...
        @property
        def max_adapters(self) -> int | None: ...
        @property
        def max_rank(self) -> int | None: ...
        @property
        def max_bytes(self) -> int | None: ...
        @property
        def adapters_model_id(self) -> str | None: ...
        @property
        def order(self) -> str | None: ...

    @staticmethod
    def LoraGGUF(
        quantized_model_id: str,
        quantized_filename: str | list[str] | None,
        adapters_model_id: str,
        order: str,
        tok_model_id: str | None = None,
        topology: Any = None,
        dtype: ModelDType = ...,
    ) -> Which.GGUF: ...
    @staticmethod
    def LoraGGML(
        quantized_model_id: str,
        quantized_filename: str | None,
        adapters_model_id: str,
        order: str,
        tok_model_id: str | None = None,
        tokenizer_json: str | None = None,
        gqa: int = ...,
        topology: Any = None,
        dtype: ModelDType = ...,
    ) -> Which.GGML: ...

    # Not supported yet: these raise NotImplementedError.
    @staticmethod
    def XLora(*args: Any, **kwargs: Any) -> Which: ...
    @staticmethod
    def XLoraGGUF(*args: Any, **kwargs: Any) -> Which: ...
    @staticmethod
    def XLoraGGML(*args: Any, **kwargs: Any) -> Which: ...
    @staticmethod
    def DiffusionPlain(*args: Any, **kwargs: Any) -> Which: ...
    @staticmethod
    def Speech(*args: Any, **kwargs: Any) -> Which: ...

@final
class LoraAdapter:
    def __new__(cls, alias: str, source: str, revision: str | None = None) -> Self: ...
    @property
    def alias(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class LoraAdapterGeneration:
    def __new__(cls, generation: str) -> Self: ...
    @property
    def generation(self) -> str: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class LoraAdapterInfo:
    def __new__(cls, alias: str, generation: str, source: str, rank: int, bytes: int) -> Self: ...
    @property
    def alias(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class LoraRuntimeStatus:
    def __new__(cls, num_adapters: int, max_adapters: int, max_rank: int, bytes: int, max_bytes: int) -> Self: ...
    @property
    def num_adapters(self) -> int: ...
    @property
    def max_adapters(self) -> int: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

# Generic for type checkers alone: whether it is streamed decides what comes back.
@final
class ChatCompletionRequest(Generic[_Stream]):
    @overload
    def __new__(
        cls,
        messages: str | AnySequence[Mapping[str, Any]],
        model: str,
        logprobs: bool = False,
        n_choices: int = 1,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int | None = None,
        max_tokens: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        stop_seqs: str | AnySequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stream: Literal[False] = False,
        grammar: str | Mapping[str, Any] | AnySequence[str] | None = None,
        grammar_type: str | None = None,
        min_p: float | None = None,
        tool_schemas: AnySequence[str | Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | str | Mapping[str, Any] | None = None,
        dry_multiplier: float | None = None,
        dry_base: float | None = None,
        dry_allowed_length: int | None = None,
        dry_sequence_breakers: AnySequence[str] | None = None,
        web_search_options: Any = None,
        enable_thinking: bool | None = None,
        truncate_sequence: bool = False,
        reasoning_effort: str | None = None,
        max_tool_rounds: Any = None,
        tool_dispatch_url: Any = None,
        enable_code_execution: bool = False,
        enable_shell: bool = False,
        shell_skills: Any = None,
        agent_permission: Any = None,
        agent_approval_callback: Any = None,
        code_execution_permission: Any = None,
        session_id: Any = None,
        files: Any = None,
        input_files: Any = None,
        ignore_eos: bool = False,
        *,
        adapter: str | LoraAdapterGeneration | None = None,
        adapters: list[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        public_messages: int = 0,
        keep: bool = False,
        parallel_tool_calls: bool = True,
        thinking_budget: int | None = None,
        allowed_media_domains: AnySequence[str] | None = None,
    ) -> ChatCompletionRequest[Literal[False]]: ...
    @overload
    def __new__(
        cls,
        messages: str | AnySequence[Mapping[str, Any]],
        model: str,
        logprobs: bool = False,
        n_choices: int = 1,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int | None = None,
        max_tokens: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        stop_seqs: str | AnySequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        *,
        stream: Literal[True],
        grammar: str | Mapping[str, Any] | AnySequence[str] | None = None,
        grammar_type: str | None = None,
        min_p: float | None = None,
        tool_schemas: AnySequence[str | Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | str | Mapping[str, Any] | None = None,
        dry_multiplier: float | None = None,
        dry_base: float | None = None,
        dry_allowed_length: int | None = None,
        dry_sequence_breakers: AnySequence[str] | None = None,
        web_search_options: Any = None,
        enable_thinking: bool | None = None,
        truncate_sequence: bool = False,
        reasoning_effort: str | None = None,
        max_tool_rounds: Any = None,
        tool_dispatch_url: Any = None,
        enable_code_execution: bool = False,
        enable_shell: bool = False,
        shell_skills: Any = None,
        agent_permission: Any = None,
        agent_approval_callback: Any = None,
        code_execution_permission: Any = None,
        session_id: Any = None,
        files: Any = None,
        input_files: Any = None,
        ignore_eos: bool = False,
        adapter: str | LoraAdapterGeneration | None = None,
        adapters: list[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        public_messages: int = 0,
        keep: bool = False,
        parallel_tool_calls: bool = True,
        thinking_budget: int | None = None,
        allowed_media_domains: AnySequence[str] | None = None,
    ) -> ChatCompletionRequest[Literal[True]]: ...
    @overload
    def __new__(
        cls,
        messages: str | AnySequence[Mapping[str, Any]],
        model: str,
        logprobs: bool = False,
        n_choices: int = 1,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int | None = None,
        max_tokens: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        stop_seqs: str | AnySequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stream: bool = False,
        grammar: str | Mapping[str, Any] | AnySequence[str] | None = None,
        grammar_type: str | None = None,
        min_p: float | None = None,
        tool_schemas: AnySequence[str | Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | str | Mapping[str, Any] | None = None,
        dry_multiplier: float | None = None,
        dry_base: float | None = None,
        dry_allowed_length: int | None = None,
        dry_sequence_breakers: AnySequence[str] | None = None,
        web_search_options: Any = None,
        enable_thinking: bool | None = None,
        truncate_sequence: bool = False,
        reasoning_effort: str | None = None,
        max_tool_rounds: Any = None,
        tool_dispatch_url: Any = None,
        enable_code_execution: bool = False,
        enable_shell: bool = False,
        shell_skills: Any = None,
        agent_permission: Any = None,
        agent_approval_callback: Any = None,
        code_execution_permission: Any = None,
        session_id: Any = None,
        files: Any = None,
        input_files: Any = None,
        ignore_eos: bool = False,
        *,
        adapter: str | LoraAdapterGeneration | None = None,
        adapters: list[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        public_messages: int = 0,
        keep: bool = False,
        parallel_tool_calls: bool = True,
        thinking_budget: int | None = None,
        allowed_media_domains: AnySequence[str] | None = None,
    ) -> ChatCompletionRequest[bool]: ...
    @property
    def messages(self) -> list[dict[str, Any]]: ...
    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> _Stream: ...
    @property
    def logprobs(self) -> bool: ...
    @property
    def n_choices(self) -> int: ...
    @property
    def logit_bias(self) -> dict[int, float] | None: ...
    @property
    def top_logprobs(self) -> int | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def presence_penalty(self) -> float | None: ...
    @property
    def frequency_penalty(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...
    @property
    def stop_seqs(self) -> str | list[str] | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def grammar(self) -> str | dict[str, Any] | list[str] | None: ...
    @property
    def grammar_type(self) -> str | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def tool_schemas(self) -> list[str | dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | str | dict[str, Any] | None: ...
    @property
    def parallel_tool_calls(self) -> bool: ...
    @property
    def thinking_budget(self) -> int | None: ...
    @property
    def allowed_media_domains(self) -> list[str] | None: ...
    @property
    def dry_multiplier(self) -> float | None: ...
    @property
    def dry_base(self) -> float | None: ...
    @property
    def dry_allowed_length(self) -> int | None: ...
    @property
    def dry_sequence_breakers(self) -> list[str] | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def truncate_sequence(self) -> bool: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def adapter(self) -> str | LoraAdapterGeneration | None: ...
    @property
    def adapters(self) -> list[str] | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def public_messages(self) -> int: ...
    @property
    def keep(self) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class EmbeddingRequest:
    def __new__(
        cls,
        input: str | Iterable[int] | Iterable[str] | Iterable[Iterable[int]],
        truncate_sequence: bool = False,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> Self: ...
    @property
    def input(self) -> str | list[int] | list[str] | list[list[int]]: ...
    @property
    def truncate_sequence(self) -> bool: ...
    @property
    def dimensions(self) -> int | None: ...
    @property
    def prompt_name(self) -> str | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class RerankRequest:
    def __new__(
        cls,
        query: str,
        documents: Iterable[str],
        truncate_sequence: bool = False,
        *,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> Self: ...
    @property
    def query(self) -> str: ...
    @property
    def documents(self) -> list[str]: ...
    @property
    def truncate_sequence(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def tenant(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class CompletionRequest:
    def __new__(
        cls,
        prompt: str | Iterable[int],
        model: str,
        best_of: int | None = None,
        echo_prompt: bool = False,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        max_tokens: int | None = None,
        n_choices: int = 1,
        stop_seqs: str | AnySequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        suffix: str | None = None,
        top_k: int | None = None,
        grammar: str | Mapping[str, Any] | AnySequence[str] | None = None,
        grammar_type: str | None = None,
        min_p: float | None = None,
        tool_schemas: Any = None,
        tool_choice: ToolChoice | None = None,
        dry_multiplier: float | None = None,
        dry_base: float | None = None,
        dry_allowed_length: int | None = None,
        dry_sequence_breakers: AnySequence[str] | None = None,
        truncate_sequence: bool = False,
        ignore_eos: bool = False,
        *,
        adapter: str | LoraAdapterGeneration | None = None,
        adapters: list[str] | None = None,
        logprobs: int | None = None,
        seed: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        public_prefix_len: int = 0,
        keep: bool = False,
        fill_in_middle: bool = False,
    ) -> Self: ...
    @property
    def prompt(self) -> str | list[int]: ...
    @property
    def model(self) -> str: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def echo_prompt(self) -> bool: ...
    @property
    def presence_penalty(self) -> float | None: ...
    @property
    def frequency_penalty(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...
    @property
    def logit_bias(self) -> dict[int, float] | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def n_choices(self) -> int: ...
    @property
    def stop_seqs(self) -> str | list[str] | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def suffix(self) -> str | None: ...
    @property
    def fill_in_middle(self) -> bool: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def grammar(self) -> str | dict[str, Any] | list[str] | None: ...
    @property
    def grammar_type(self) -> str | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...
    @property
    def dry_multiplier(self) -> float | None: ...
    @property
    def dry_base(self) -> float | None: ...
    @property
    def dry_allowed_length(self) -> int | None: ...
    @property
    def dry_sequence_breakers(self) -> list[str] | None: ...
    @property
    def truncate_sequence(self) -> bool: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def adapter(self) -> str | LoraAdapterGeneration | None: ...
    @property
    def adapters(self) -> list[str] | None: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def public_prefix_len(self) -> int: ...
    @property
    def keep(self) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class ChatCompletionResponse:
    def __new__(
        cls,
        id: str,
        choices: list[Choice],
        created: int,
        model: str,
        system_fingerprint: str,
        object: str,
        usage: Usage,
        adapter_generation: str | None = None,
    ) -> Self: ...
    @property
    def id(self) -> str: ...
    @property
    def choices(self) -> list[Choice]: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def system_fingerprint(self) -> str: ...
    @property
    def object(self) -> str: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def adapter_generation(self) -> str | None: ...
    def to_json(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: _object, /) -> bool: ...

@final
class Choice:
    def __new__(
        cls,
        finish_reason: str,
        index: int,
        message: ResponseMessage,
        logprobs: Logprobs | None,
        stop_sequence: str | None,
        sequence: Sequence | None,
    ) -> Self: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def message(self) -> ResponseMessage: ...
    @property
    def logprobs(self) -> Logprobs | None: ...
    @property
    def stop_sequence(self) -> str | None: ...
    @property
    def sequence(self) -> Sequence | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class CalledFunction:
    def __new__(cls, name: str | None, arguments: str) -> Self: ...
    @property
    def name(self) -> str | None: ...
    @property
    def arguments(self) -> str: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class ToolCallResponse:
    def __new__(cls, index: int, id: str | None, type: str, function: CalledFunction) -> Self: ...
    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str | None: ...
    @property
    def type(self) -> str: ...
    @property
    def function(self) -> CalledFunction: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class RgbImage:
    def __new__(cls, source: Any, *, allowed_media_domains: AnySequence[str] | None = None) -> Self: ...
    @staticmethod
    def frombytes(width: int, height: int, pixels: bytes) -> RgbImage: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    def tobytes(self) -> bytes: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: Any, /) -> Self: ...

@final
class Sound:
    def __new__(cls, source: Any, *, rate: int | None = None, allowed_media_domains: AnySequence[str] | None = None) -> Self: ...
    @staticmethod
    def frombytes(rate: int, samples: bytes) -> Sound: ...
    @property
    def rate(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def tobytes(self) -> bytes: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: Any, /) -> Self: ...

@final
class Video:
    def __new__(cls, source: Any, *, fps: float | None = None, allowed_media_domains: AnySequence[str] | None = None) -> Self: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def fps(self) -> float: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: Any, /) -> Self: ...

@final
class ResponseMessage:
    def __new__(
        cls, content: str | None, role: str, tool_calls: list[ToolCallResponse] | None, reasoning_content: str | None
    ) -> Self: ...
    @property
    def content(self) -> str | None: ...
    @property
    def role(self) -> str: ...
    @property
    def tool_calls(self) -> list[ToolCallResponse] | None: ...
    @property
    def reasoning_content(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class Usage:
    def __new__(
        cls,
        completion_tokens: int,
        prompt_tokens: int,
        total_tokens: int,
        avg_tok_per_sec: float,
        avg_prompt_tok_per_sec: float,
        avg_compl_tok_per_sec: float,
        total_time_sec: float,
        total_prompt_time_sec: float,
        total_completion_time_sec: float,
        prompt_tokens_details: PromptTokensDetails | None,
        preemptions: int,
        recomputed_tokens: int,
        draft_tokens: int,
        accepted_draft_tokens: int,
        encoded_images: int,
        encoded_sounds: int,
        encoded_videos: int,
    ) -> Self: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...
    @property
    def avg_tok_per_sec(self) -> float: ...
    @property
    def avg_prompt_tok_per_sec(self) -> float: ...
    @property
    def avg_compl_tok_per_sec(self) -> float: ...
    @property
    def total_time_sec(self) -> float: ...
    @property
    def total_prompt_time_sec(self) -> float: ...
    @property
    def total_completion_time_sec(self) -> float: ...
    @property
    def prompt_tokens_details(self) -> PromptTokensDetails | None: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted_draft_tokens(self) -> int: ...
    @property
    def encoded_images(self) -> int: ...
    @property
    def encoded_sounds(self) -> int: ...
    @property
    def encoded_videos(self) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class PromptTokensDetails:
    def __new__(cls, cached_tokens: int, miss_reason: str | None) -> Self: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def miss_reason(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class Logprobs:
    def __new__(cls, content: list[ResponseLogprob]) -> Self: ...
    @property
    def content(self) -> list[ResponseLogprob]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class ResponseLogprob:
    def __new__(cls, token: str, token_id: int, logprob: float | None, bytes: bytes, top_logprobs: list[TopLogprob]) -> Self: ...
    @property
    def token(self) -> str: ...
    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def bytes(self) -> bytes: ...
    @property
    def top_logprobs(self) -> list[TopLogprob]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class TopLogprob:
    def __new__(cls, token: str, token_id: int, logprob: float, bytes: bytes) -> Self: ...
    @property
    def token(self) -> str: ...
    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def bytes(self) -> bytes: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class CompletionResponse:
    def __new__(
        cls,
        id: str,
        choices: list[CompletionChoice],
        created: int,
        model: str,
        system_fingerprint: str,
        object: str,
        usage: Usage,
    ) -> Self: ...
    @property
    def id(self) -> str: ...
    @property
    def choices(self) -> list[CompletionChoice]: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def system_fingerprint(self) -> str: ...
    @property
    def object(self) -> str: ...
    @property
    def usage(self) -> Usage: ...
    def to_json(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: _object, /) -> bool: ...

@final
class CompletionChoice:
    def __new__(
        cls,
        finish_reason: str,
        index: int,
        text: str,
        logprobs: Logprobs | None,
        stop_sequence: str | None,
        sequence: Sequence | None,
    ) -> Self: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprobs(self) -> Logprobs | None: ...
    @property
    def stop_sequence(self) -> str | None: ...
    @property
    def sequence(self) -> Sequence | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class ChatCompletionChunkResponse:
    def __new__(
        cls,
        id: str,
        choices: list[ChunkChoice],
        created: int,
        model: str,
        system_fingerprint: str,
        object: str,
        usage: Usage | None,
    ) -> Self: ...
    @property
    def id(self) -> str: ...
    @property
    def choices(self) -> list[ChunkChoice]: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def system_fingerprint(self) -> str: ...
    @property
    def object(self) -> str: ...
    @property
    def usage(self) -> Usage | None: ...
    def to_json(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: _object, /) -> bool: ...

@final
class ChunkChoice:
    def __new__(
        cls,
        finish_reason: str | None,
        index: int,
        delta: Delta,
        logprobs: Logprobs | None,
        stop_sequence: str | None,
        sequence: Sequence | None,
    ) -> Self: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def index(self) -> int: ...
    @property
    def delta(self) -> Delta: ...
    @property
    def logprobs(self) -> Logprobs | None: ...
    @property
    def stop_sequence(self) -> str | None: ...
    @property
    def sequence(self) -> Sequence | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class Delta:
    def __new__(
        cls, content: str | None, role: str, tool_calls: list[ToolCallResponse] | None, reasoning_content: str | None
    ) -> Self: ...
    @property
    def content(self) -> str | None: ...
    @property
    def role(self) -> str: ...
    @property
    def tool_calls(self) -> list[ToolCallResponse] | None: ...
    @property
    def reasoning_content(self) -> str | None: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...

@final
class ChatCompletionStreamer:
    def __iter__(self) -> Self: ...
    def __next__(self) -> ChatCompletionChunkResponse: ...
    def close(self) -> None: ...
    def sequence(self, choice: int = 0) -> Sequence: ...

@final
class EventSignal:
    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...

@final
class PendingRequest:
    @property
    def key(self) -> int: ...
    def poll(self) -> ChatCompletionResponse | CompletionResponse | ChatCompletionChunkResponse | list[float] | None: ...
    def close(self) -> None: ...

def submit_embeddings(
    runner: Runner, request: EmbeddingRequest, signal: EventSignal, model_id: str | None = None
) -> list[PendingRequest]: ...
def submit_scores(
    runner: Runner, request: RerankRequest, signal: EventSignal, model_id: str | None = None
) -> list[PendingRequest]: ...
def takes_long(request: ChatCompletionRequest | CompletionRequest) -> bool: ...
def submit(
    runner: Runner, request: ChatCompletionRequest | CompletionRequest, signal: EventSignal, model_id: str | None = None
) -> PendingRequest: ...

@final
class Sequence:
    @property
    def tokens(self) -> list[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def text(self) -> str: ...
    def fork(self, n: int = 1) -> list[Sequence]: ...
    @overload
    def generate(
        self,
        then: str | Iterable[int] | AnySequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        stop_seqs: str | AnySequence[str] | None = None,
        ignore_eos: bool = False,
        seed: int | None = None,
        stream: Literal[False] = False,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> CompletionResponse: ...
    @overload
    def generate(
        self,
        then: str | Iterable[int] | AnySequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        stop_seqs: str | AnySequence[str] | None = None,
        ignore_eos: bool = False,
        seed: int | None = None,
        stream: Literal[True],
        priority: int = 0,
        deadline: float | None = None,
        tenant: str | None = None,
    ) -> ChatCompletionStreamer: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __len__(self) -> int: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: Any, /) -> Self: ...

@final
class MemoryPlan:
    @property
    def weights_bytes(self) -> int: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def states_bytes(self) -> int: ...
    @property
    def state_snapshots_bytes(self) -> int: ...
    @property
    def activations_bytes(self) -> int: ...
    @property
    def workspaces_bytes(self) -> int: ...
    @property
    def graphs_bytes(self) -> int: ...
    @property
    def tokenizer_bytes(self) -> int: ...
    @property
    def adapter_bytes(self) -> int: ...
    @property
    def encoder_cache_bytes(self) -> int: ...
    @property
    def margin_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def devices(self) -> list[dict[str, int]]: ...
    @property
    def groups(self) -> list[dict[str, int | None]]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def servable_tokens(self) -> int: ...
    @property
    def max_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def guaranteed(self) -> bool: ...
    def num_requests_that_fit(self, num_tokens: int) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: Any, /) -> Self: ...

@final
class Runner:
    def __new__(
        cls,
        which: Which,
        max_seqs: int = 32,
        no_kv_cache: bool = False,
        prefix_cache_n: int = 16,
        token_source: str = "cache",
        chat_template: str | None = None,
        jinja_explicit: str | None = None,
        pa_gpu_mem: int | None = None,
        pa_gpu_mem_usage: float | None = None,
        pa_ctxt_len: int | None = None,
        pa_blk_size: int | None = None,
        pa_cache_type: PagedCacheType | None = None,
        no_paged_attn: bool = False,
        paged_attn: bool = False,
        memory_goal: str | float | None = None,
        seed: int | None = None,
        max_num_batched_tokens: int | None = None,
        device: str = "auto",
        *,
        max_step_latency: float | None = 0.25,
        deterministic: bool = False,
        kv_tier: str | PathLike[str] | None = None,
        kv_tier_size: int | None = None,
        kv_events: str | None = None,
        kv_events_replay: str | None = None,
        kv_events_topic: str | None = None,
        cpu_tier: str | None = None,
        num_threads: int | None = None,
        load_progress: Callable[[int, int], object] | None = None,
        admission: str | None = None,
        victim: str | None = None,
        fairness: str | None = None,
        prompt_batchsize: int | None = None,
        guaranteed: bool = False,
        cuda_graphs: bool | None = None,
        attention_backend: str = "auto",
        num_device_layers: Any = None,
        in_situ_quant: str | None = None,
        anymoe_config: Any = None,
        which_draft: Which | None = None,
        speculative: str | None = None,
        speculative_gamma: int | None = None,
        mtp_model: str | None = None,
        mtp_n_predict: int | None = None,
        enable_search: bool = False,
        search_embedding_model: Any = None,
        search_callback: Any = None,
        tool_callbacks: Any = None,
        mcp_client_config: Any = None,
        code_execution_config: Any = None,
        shell_config: Any = None,
        state_snapshot_mb: int | None = None,
        lazy: bool = False,
    ) -> Self: ...
    @staticmethod
    def memory_plan(
        which: Which,
        max_seqs: int = 32,
        token_source: str = "cache",
        pa_gpu_mem: int | None = None,
        pa_gpu_mem_usage: float | None = None,
        pa_ctxt_len: int | None = None,
        pa_blk_size: int | None = None,
        pa_cache_type: PagedCacheType | None = None,
        no_paged_attn: bool = False,
        memory_goal: str | float | None = None,
        max_num_batched_tokens: int | None = None,
        device: str = "auto",
        *,
        deterministic: bool = False,
        guaranteed: bool = False,
        devices: AnySequence[int] | None = None,
        cpu_tier: str | None = None,
        num_threads: int | None = None,
        in_situ_quant: str | None = None,
        which_draft: Which | None = None,
        speculative: str | None = None,
        mtp_model: str | None = None,
        mtp_n_predict: int | None = None,
        state_snapshot_mb: int | None = None,
        prefix_cache_n: int = 16,
    ) -> MemoryPlan: ...
    def memory_ledger(self) -> MemoryPlan: ...
    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[Literal[False]], model_id: str | None = None
    ) -> ChatCompletionResponse: ...
    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[Literal[True]], model_id: str | None = None
    ) -> ChatCompletionStreamer: ...
    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[bool], model_id: str | None = None
    ) -> ChatCompletionResponse | ChatCompletionStreamer: ...
    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[Literal[False]], model_id: str
    ) -> ChatCompletionResponse: ...
    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[Literal[True]], model_id: str
    ) -> ChatCompletionStreamer: ...
    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[bool], model_id: str
    ) -> ChatCompletionResponse | ChatCompletionStreamer: ...
    def send_completion_request(self, request: CompletionRequest, model_id: str | None = None) -> CompletionResponse: ...
    def send_completion_request_to_model(self, request: CompletionRequest, model_id: str) -> CompletionResponse: ...
    def send_embedding_request(self, request: EmbeddingRequest, model_id: str | None = None) -> list[list[float]]: ...
    async def aembed(self, request: EmbeddingRequest, model_id: str | None = None) -> list[list[float]]: ...
    def send_rerank_request(self, request: RerankRequest, model_id: str | None = None) -> list[float]: ...
    async def arerank(self, request: RerankRequest, model_id: str | None = None) -> list[float]: ...
    @overload
    async def achat(
        self, request: ChatCompletionRequest[Literal[False]], model_id: str | None = None
    ) -> ChatCompletionResponse: ...
    @overload
    async def achat(
        self, request: ChatCompletionRequest[Literal[True]], model_id: str | None = None
    ) -> AsyncChatCompletionStreamer: ...
    @overload
    async def achat(
        self, request: ChatCompletionRequest[bool], model_id: str | None = None
    ) -> ChatCompletionResponse | AsyncChatCompletionStreamer: ...
    async def acomplete(self, request: CompletionRequest, model_id: str | None = None) -> CompletionResponse: ...
    def tokenize_text(
        self,
        text: str | AnySequence[Mapping[str, Any]],
        add_special_tokens: bool | None = None,
        enable_thinking: bool | None = None,
        model_id: str | None = None,
    ) -> list[int]: ...
    def detokenize_text(self, tokens: Iterable[int], skip_special_tokens: bool = False, model_id: str | None = None) -> str: ...
    def generation_config(self) -> dict[str, float | None]: ...
    def max_sequence_length(self, model_id: str | None = None) -> int: ...
    def context_length(self, model_id: str | None = None) -> int: ...
    def pause(self) -> None: ...
    def send_re_isq(
        self, dtype: str, model_id: str | None = None, *, load_progress: Callable[[int, int], object] | None = None
    ) -> None: ...
    def resume(self) -> None: ...
    def drain(self, timeout: float | None = None) -> bool: ...
    def kv_cache_stats(self) -> dict[str, Any]: ...
    def kv_events_stats(self) -> dict[str, Any] | None: ...
    def load_lora_adapter(
        self,
        alias: str,
        adapter_dir: str | PathLike[str],
        load_inplace: bool = False,
        expected_generation: str | None = None,
    ) -> LoraAdapterInfo: ...
    def unload_lora_adapter(self, alias: str, expected_generation: str | None = None) -> LoraAdapterInfo: ...
    def list_lora_adapters(self) -> list[LoraAdapterInfo]: ...
    def lora_adapter_status(self) -> LoraRuntimeStatus: ...
    def activate_adapters(self, adapter_names: list[str]) -> None: ...
    def list_models(self) -> list[str]: ...
    def get_default_model_id(self) -> str: ...
    def set_default_model_id(self, model_id: str) -> None: ...
    def is_model_loaded(self, model_id: str) -> bool: ...
    def unload_model(self, model_id: str | None = None) -> None: ...
    def reload_model(self, model_id: str | None = None) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def list_models_with_status(self) -> list[tuple[str, str]]: ...
    def list_unloaded_models(self) -> list[str]: ...
    def get_model_status(self, model_id: str) -> str: ...
