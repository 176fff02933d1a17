"""Answers as instances of a class: a dataclass, or a model of pydantic."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mistral_paged._core import ChatCompletionRequest
from mistral_paged.exceptions import IncompleteAnswerError, InvalidArgumentError

if TYPE_CHECKING:
    from mistral_paged._core import Runner

T = TypeVar("T")


def answer_as(
    runner: Runner, kind: type[T], messages: str | Sequence[Mapping[str, Any]], *, model: str = "default", **options: Any
) -> T:
    """The answer to a chat as an instance of `kind`.

    `kind` is a dataclass, whose fields are of the types that JSON has, of enums, literals, unions and further dataclasses, or a
    model of pydantic. Its JSON Schema is what the answer is held to, and the instance is made of the answer. `options` are those
    of a `ChatCompletionRequest`, but for `stream`, `n_choices`, `grammar` and `grammar_type`.

    Raises `IncompleteAnswerError` when the answer ended before it was complete, at `max_tokens` or a deadline, and
    `InvalidArgumentError` for a class that has no schema, or one that cannot be enforced.
    """
    for name in ("stream", "n_choices", "grammar", "grammar_type"):
        if name in options:
            raise InvalidArgumentError(f"`{name}` is decided by the class that is asked for: leave it out")
    request = ChatCompletionRequest(messages, model, grammar=schema_of(kind), grammar_type="json_schema", **options)
    response = runner.send_chat_completion_request(request)
    choice = response.choices[0]
    text = choice.message.content or ""
    if choice.finish_reason != "stop" or choice.stop_sequence is not None:
        raise IncompleteAnswerError(f"the answer ended with {choice.finish_reason!r} and is incomplete: {text[-80:]!r}", response)
    validate = getattr(kind, "model_validate_json", None)
    if validate is not None:
        return typing.cast("T", validate(text))
    return typing.cast(T, _made(kind, json.loads(text)))


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a dataclass, or of a model of pydantic."""
    if hasattr(kind, "model_json_schema"):
        return typing.cast("dict[str, Any]", kind.model_json_schema())
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InvalidArgumentError(f"{kind!r} must be a dataclass or a model of pydantic")
    definitions: dict[str, Any] = {}
    schema = _schema(kind, definitions)
    return {**schema, "$defs": definitions}


_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if kind is Any:
        return {}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _schema(arguments[0], definitions)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is list or kind is list:
        return {"type": "array", "items": _schema(arguments[0], definitions) if arguments else {}}
    if origin is tuple and arguments[1:] != (...,):
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = kind.__qualname__
        if name not in definitions:
            # A class may have itself within.
            definitions[name] = {}
            hints = typing.get_type_hints(kind, include_extras=True)
            fields = [field for field in dataclasses.fields(kind) if field.init]
            definitions[name] = {
                "type": "object",
                "properties": {field.name: _schema(hints[field.name], definitions) for field in fields},
                "required": [field.name for field in fields if _is_required(field)],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
    raise InvalidArgumentError(
        f"{kind!r} is no type of JSON: use str, int, float, bool, None, list, tuple, dict, enums or dataclasses"
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value of JSON is one of this type, as far as the branches of a union must be told apart."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _fits(arguments[0], value)
    if kind is Any:
        return True
    if origin is typing.Literal:
        return value in arguments
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    if kind in _SIMPLE:
        return isinstance(value, kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(argument, value) for argument in arguments)
    if origin in (list, tuple) or kind is list:
        return isinstance(value, list)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return value in [member.value for member in kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        names = {field.name: _is_required(field) for field in dataclasses.fields(kind) if field.init}
        hints = typing.get_type_hints(kind, include_extras=True)
        return (
            isinstance(value, dict)
            and value.keys() <= names.keys()
            and all(name in value for name, is_required in names.items() if is_required)
            and all(_fits(hints[name], part) for name, part in value.items())
        )
    return isinstance(value, dict)


def _made(kind: Any, value: Any) -> Any:
    """The instance that a value of JSON stands for."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _made(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return _made(next(argument for argument in arguments if _fits(argument, value)), value)
    if kind is int or kind is float:
        return kind(value)
    if origin is list:
        return [_made(arguments[0], part) for part in value]
    if origin is tuple:
        kinds = arguments if arguments[1:] != (...,) else [arguments[0]] * len(value)
        return tuple(_made(part_kind, part) for part_kind, part in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _made(arguments[1], part) for key, part in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: _made(hints[name], part) for name, part in value.items()})
    return value
