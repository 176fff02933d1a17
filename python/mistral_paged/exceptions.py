"""What can go wrong. Every message names the value that cannot be honoured and says what would work."""

from __future__ import annotations


class MistralPagedError(ValueError):
    """Base of all errors of this package; a ValueError, as in the mirrored interface."""


class InvalidArgumentError(MistralPagedError):
    """An argument of a runner or of a request cannot be honoured."""


class AddressError(MistralPagedError):
    """An address cannot be listened on."""


class ModelLoadError(MistralPagedError):
    """A model's file is missing, unreadable or malformed."""


class ArchitectureError(MistralPagedError):
    """The architecture is not implemented, or contradicts the model's config.json."""


class ModelNotFoundError(MistralPagedError):
    """No such model on the hub, in a folder, or in a runner."""


class ChatTemplateError(MistralPagedError):
    """The chat template is missing or rejected the messages."""


class DeviceError(MistralPagedError):
    """The device refused something: too little memory, an unknown instruction set, an unsupported weight type."""


class DrainingError(MistralPagedError):
    """The runner was drained and takes no requests until it is resumed."""


class InternalError(MistralPagedError, RuntimeError):
    """A step failed or the engine stopped: a defect, or a model whose weights are damaged; no wrong argument.

    `response` is what the request had come to, with the text so far and the `finish_reason` "error" of the choices that failed;
    None of a stream, whose chunks have told, and where there is no such answer.
    """

    response: object = None


class LoraAdapterError(MistralPagedError):
    """An adapter cannot be loaded, or is not there; `code` says why: "lora_adapter_not_found", "lora_rank_limit_exceeded", ..."""

    def __init__(self, message: str, code: str = "invalid_lora_adapter") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[LoraAdapterError], tuple[str, str]]:
        return type(self), (str(self), self.code)


class IncompleteAnswerError(MistralPagedError):
    """An answer that was to be an instance of a class ended before it was complete; `response` is the answer."""

    def __init__(self, message: str, response: object = None) -> None:
        super().__init__(message)
        self.response = response
