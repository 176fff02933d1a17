"""LLM inference over a paged KV cache: continuous batching, prefix caching, and an API that mirrors mistral.rs.

>>> from mistral_paged import Architecture, ChatCompletionRequest, Runner, Which
>>> runner = Runner(which=Which.Plain(model_id="path/or/hub-id", arch=Architecture.Mistral), pa_gpu_mem=4096, pa_blk_size=32)
>>> request = ChatCompletionRequest(model="mistral", messages=[{"role": "user", "content": "Hello"}], max_tokens=64)
>>> runner.send_chat_completion_request(request).choices[0].message.content
"""

from mistral_paged._core import (
    Architecture,
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
    ToolChoice,
    TopLogprob,
    Usage,
    Which,
    __version__,
)
from mistral_paged.exceptions import (
    ArchitectureError,
    ChatTemplateError,
    DeviceError,
    DrainingError,
    InternalError,
    InvalidArgumentError,
    MistralPagedError,
    ModelLoadError,
    ModelNotFoundError,
)
from mistral_paged.simulator import simulate

VisionArchitecture = MultimodalArchitecture
"""The older spelling."""

__all__ = [
    "Architecture",
    "ArchitectureError",
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
    "InternalError",
    "InvalidArgumentError",
    "IsqOrganization",
    "Logprobs",
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
    "ToolChoice",
    "TopLogprob",
    "Usage",
    "VisionArchitecture",
    "Which",
    "__version__",
    "simulate",
]
