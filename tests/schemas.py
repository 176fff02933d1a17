"""JSON Schemas of every kind that is enforced, made at random: nested, recursive, unions, formats, bounds."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration")
PATTERNS = ("^[a-z]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(on|off)$", "^x+y?$")


class Maker:
    """Makes schemas; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def integer(self) -> dict[str, Any]:
        low = self.random.randint(-200, 200)
        bounds: dict[str, Any] = {}
        if self.random.random() < 0.6:
            bounds["minimum"] = low
        if self.random.random() < 0.6:
            bounds["maximum"] = low + self.random.randint(0, 300)
        if self.random.random() < 0.2:
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + self.random.randint(2, 50)}
        return {"type": "integer", **bounds}

    def number(self) -> dict[str, Any]:
        low = self.random.randint(-20, 20) / 4
        return {"type": "number", "minimum": low, "maximum": low + self.random.randint(0, 40) / 8}

    def string(self) -> dict[str, Any]:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "format": self.random.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        shortest = self.random.randint(0, 3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + self.random.randint(0, 5)}

    def choice(self) -> dict[str, Any]:
        values: list[Any] = self.random.sample(["red", "green", "a b", "\u00e9", 1, 2.5, True, None, [], {"k": 1}], 3)
        return {"enum": values} if self.random.random() < 0.7 else {"const": values[0]}

    def simple(self) -> dict[str, Any]:
        kinds = (self.integer, self.number, self.string, self.choice, lambda: {"type": "boolean"}, lambda: {"type": "null"})
        return self.random.choice(kinds)()

    def array(self, depth: int) -> dict[str, Any]:
        least = self.random.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": self.schema(depth - 1), "maxItems": least + self.random.randint(0, 2)}
        if least:
            schema["minItems"] = least
        if self.random.random() < 0.2:
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(2)]
            schema["maxItems"] = 3
        return schema

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(["id", "name", "a b", "tags", "x-1", "\u00fc", "next"], self.random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        schema["required"] = [name for name in names if self.random.random() < 0.7]
        schema["additionalProperties"] = False
        if self.random.random() < 0.15:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        return schema

    def schema(self, depth: int) -> dict[str, Any]:
        if depth <= 0 or self.random.random() < 0.3:
            return self.simple()
        kind = self.random.randrange(5)
        if kind == 0:
            return self.array(depth)
        if kind == 1:
            return {"anyOf": [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}
        if kind == 2:
            return {"oneOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 3}]}
        return self.object(depth)

    def recursive(self) -> dict[str, Any]:
        node = {
            "type": "object",
            "properties": {
                "value": self.simple(),
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    def all_of(self) -> dict[str, Any]:
        first = {"type": "object", "properties": {"a": self.simple()}, "required": ["a"]}
        second = {"properties": {"b": self.simple()}, "required": ["b"]}
        return {"allOf": [first, second], "properties": {"a": {}, "b": {}}, "additionalProperties": False}


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many schemas."""
    made = []
    for number in range(count):
        maker = Maker(seed * 1_000_003 + number)
        kind = number % 8
        made.append(maker.recursive() if kind == 0 else maker.all_of() if kind == 1 else maker.object(3) if kind < 6 else maker.schema(3))
    return made
