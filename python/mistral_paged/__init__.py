"""LLM inference over a paged KV cache: continuous batching, prefix caching, and an API that mirrors mistral.rs.

>>> from mistral_paged import ChatCompletionRequest, Runner, Which
>>> from mistral_paged.default_model import default_model
>>> runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=512)
>>> request = ChatCompletionRequest("What is the capital of France?", "default", max_tokens=16, temperature=0)
>>> print(runner.send_chat_completion_request(request).choices[0].message.content)
The capital of France is Paris.

`Which.Plain` takes a folder or a hub id instead, `Which.GGUF` any GGUF file.
"""

from mistral_paged._core import (
    Architecture,
    CalledFunction,
    ChatCompletionChunkResponse,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamer,
    Choice,
    ChunkChoice,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Delta,
    DiffusionArchitecture,
    EmbeddingArchitecture,
    IsqOrganization,
    Logprobs,
    LoraAdapter,
    LoraAdapterGeneration,
    LoraAdapterInfo,
    LoraRuntimeStatus,
    MemoryPlan,
    ModelDType,
    MultimodalArchitecture,
    PagedCacheType,
    PromptTokensDetails,
    ResponseLogprob,
    ResponseMessage,
    Runner,
    Sequence,
    SpeechLoaderType,
    ToolCallResponse,
    ToolChoice,
    TopLogprob,
    Usage,
    Which,
    __version__,
    quantize,
)
from mistral_paged.exceptions import (
    ArchitectureError,
    ChatTemplateError,
    DeviceError,
    DrainingError,
    IncompleteAnswerError,
    InternalError,
    InvalidArgumentError,
    LoraAdapterError,
    MistralPagedError,
    ModelLoadError,
    ModelNotFoundError,
)
from mistral_paged.simulator import simulate
from mistral_paged.typed import answer_as

VisionArchitecture = MultimodalArchitecture
"""The older spelling."""

__all__ = [
    "Architecture",
    "ArchitectureError",
    "CalledFunction",
    "ChatCompletionChunkResponse",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionStreamer",
    "ChatTemplateError",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "Delta",
    "DeviceError",
    "DiffusionArchitecture",
    "DrainingError",
    "EmbeddingArchitecture",
    "IncompleteAnswerError",
    "InternalError",
    "InvalidArgumentError",
    "IsqOrganization",
    "Logprobs",
    "LoraAdapter",
    "LoraAdapterError",
    "LoraAdapterGeneration",
    "LoraAdapterInfo",
    "LoraRuntimeStatus",
    "MemoryPlan",
    "MistralPagedError",
    "ModelDType",
    "ModelLoadError",
    "ModelNotFoundError",
    "MultimodalArchitecture",
    "PagedCacheType",
    "PromptTokensDetails",
    "ResponseLogprob",
    "ResponseMessage",
    "Runner",
    "Sequence",
    "SpeechLoaderType",
    "ToolCallResponse",
    "ToolChoice",
    "TopLogprob",
    "Usage",
    "VisionArchitecture",
    "Which",
    "__version__",
    "answer_as",
    "quantize",
    "simulate",
]
