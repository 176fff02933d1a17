"""Answers as instances of classes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from conftest import runner_of

from mistral_paged import IncompleteAnswerError, InvalidArgumentError, Runner, answer_as
from mistral_paged.typed import _made, schema_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: int = 0


@dataclass
class Shape:
    colour: Colour
    kind: Literal["round", "square"]
    points: tuple[Point, Point]
    weight: float | None = None
    tags: list[bool] = field(default_factory=list)


@dataclass
class Tree:
    leaf: bool
    left: Tree | None = None


@pytest.fixture
def llama() -> Runner:
    return runner_of("text", "llama")


def test_an_answer_is_an_instance(llama: Runner) -> None:
    num_complete = 0
    for seed in range(12):
        try:
            shape = answer_as(llama, Shape, "Hello", max_tokens=400, temperature=1.0, seed=seed)
        except IncompleteAnswerError as error:
            assert error.response.choices[0].finish_reason == "length"
            continue
        num_complete += 1
        assert isinstance(shape, Shape)
        assert isinstance(shape.colour, Colour)
        assert shape.kind in ("round", "square")
        assert len(shape.points) == 2
        assert all(isinstance(point, Point) and isinstance(point.x, float) and isinstance(point.y, int) for point in shape.points)
        assert shape.weight is None or isinstance(shape.weight, float)
        assert all(isinstance(tag, bool) for tag in shape.tags)
    assert num_complete > 3


def test_a_class_may_have_itself_within(llama: Runner) -> None:
    tree = answer_as(llama, Tree, "Hello", max_tokens=300, temperature=0)
    assert isinstance(tree, Tree)
    assert isinstance(tree.leaf, bool)
    made = _made(Tree, {"leaf": True, "left": {"leaf": False, "left": None}})
    assert made == Tree(True, Tree(False))


def test_a_union_is_told_apart_by_what_came() -> None:
    assert _made(Point | Tree, {"x": 1}) == Point(1.0)
    assert _made(Tree | Point, {"x": 1, "y": 2}) == Point(1.0, 2)
    assert _made(int | str | None, "a") == "a"
    assert _made(dict[str, Point], {"a": {"x": 2}}) == {"a": Point(2.0)}
    assert _made(tuple[int, ...], [1, 2.0]) == (1, 2)


class Pydantic:
    """What a model of pydantic has, as far as it is used."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {
            "title": "It",
            "type": "object",
            "properties": {"a": {"type": "boolean", "title": "A"}},
            "required": ["a"],
            "additionalProperties": False,
        }

    @classmethod
    def model_validate_json(cls, text: str) -> Pydantic:
        return cls(text)


def test_a_model_of_pydantic_reads_its_answer(llama: Runner) -> None:
    answer = answer_as(llama, Pydantic, "Hello", max_tokens=200, temperature=0)
    assert "".join(answer.text.split()) in ('{"a":true}', '{"a":false}')


def test_what_is_no_class_of_json_is_named(llama: Runner) -> None:
    @dataclass
    class Odd:
        when: complex

    with pytest.raises(InvalidArgumentError, match="complex"):
        schema_of(Odd)
    with pytest.raises(InvalidArgumentError, match="must be a dataclass"):
        answer_as(llama, int, "Hello")
    with pytest.raises(InvalidArgumentError, match="`n_choices`"):
        answer_as(llama, Tree, "Hello", n_choices=2)
