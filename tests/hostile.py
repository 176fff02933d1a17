"""Grammars that mean harm: what each is, its form in a request, and the code of its 400; None where it is answered."""

from __future__ import annotations

import json
from typing import Any

SYNTAX, SCHEMA, COMPLEX = "invalid_grammar", "invalid_schema", "grammar_too_complex"


def doubling(depth: int, keyword: str) -> dict[str, Any]:
    """Each of the definitions refers to the next three times."""
    definitions: dict[str, Any] = {}
    for i in range(depth):
        further = {"$ref": f"#/$defs/d{i + 1}"}
        if keyword == "properties":
            definitions[f"d{i}"] = {"type": "object", "properties": {"a": further, "b": further}, "required": ["a", "b"]}
        elif keyword == "items":
            definitions[f"d{i}"] = {"type": "array", "prefixItems": [further, further, further]}
        else:
            definitions[f"d{i}"] = {keyword: [further, further, further]}
    definitions[f"d{depth}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(depth: int, make: Any) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(depth):
        inner = make(inner)
    return inner


def tags(count: int) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    every = [{"type": "tag", "begin": f"<f={i}>", "content": content, "end": "</f>"} for i in range(count)]
    return {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": every}}


def hostile(salt: int = 0) -> list[tuple[str, dict[str, Any], str | None]]:
    """Those of one round: with another salt they are others, so that none is found compiled."""
    s = str(salt)
    pattern = [{"type": "string", "pattern": f"(.*[a-z]){{1,20}}.*x{s}{i}"} for i in range(40)]
    overlapping = [{"type": "object", "properties": {f"{s}{i}": {"type": "string"}}} for i in range(60)]
    numbers = [{"type": "integer", "multipleOf": 10**9 + 7 + 2 * i + salt} for i in range(4)]
    links = {f"d{i}": {**pattern[i], "$ref": f"#/$defs/d{i + 1}"} for i in range(39)}
    chain = {"$defs": {**links, "d39": pattern[39]}, "$ref": "#/$defs/d0"}
    names = {f"^(a|b|.*{s}{i}.*)*$": {"type": "integer"} for i in range(8)}
    return [
        ("regex: catastrophic backtracking", {"guided_regex": f"(a+)+(a+)+(b|a+)+{s}"}, None),
        ("regex: alternatives of one text", {"guided_regex": f"((a|aa|aaa)*(a|aa)*)*b{s}"}, None),
        ("regex: a repetition of repetitions", {"guided_regex": f"((a{{1,500}}){{1,500}}){{1,500}}{s}"}, None),
        ("regex: four of them", {"guided_regex": f"(((a{{1,1000}}){{1,1000}}){{1,1000}}){{1,1000}}{s}"}, None),
        ("regex: an exponential automaton", {"guided_regex": f"(.*a.{{60}}){{5}}[^x]{{300}}{s}"}, None),
        ("regex: classes of all letters", {"guided_regex": r"(\w|\p{L}|[^\W\d])" * 200 + s}, None),
        ("regex: many alternatives", {"guided_regex": "|".join(f"(x{i}+x+)+y{s}" for i in range(3000))}, None),
        ("regex: deep brackets", {"guided_regex": "(" * 20000}, COMPLEX),
        ("regex: too long", {"guided_regex": "a" * 100000}, COMPLEX),
        ("regex: look-around", {"guided_regex": f"(?=a)(?!b)a{s}"}, SYNTAX),
        ("choice: 20,000 texts", {"guided_choice": [f"{s}{i}" for i in range(20000)]}, COMPLEX),
        ("choice: 4,000 texts", {"guided_choice": [f"{s} {i * 7919 % 4001}" for i in range(4000)]}, None),
        ("enum: 9,000 texts", {"guided_json": {"enum": [f"value {s} {i}" for i in range(9000)]}}, COMPLEX),
        ("enum: 4,000 texts", {"guided_json": {"enum": [f"{s} {i}" for i in range(4000)]}}, None),
        (
            "enum: in each of 80 properties",
            {"guided_json": {"properties": {f"p{i}": {"enum": [f"{i}{s}{k}" for k in range(40)]} for i in range(80)}}},
            None,
        ),
        ("const: deep", {"guided_json": {"const": nested(60, lambda inner: [inner])}}, None),
        ("depth: 60 lists", {"guided_json": nested(60, lambda inner: {"type": "array", "items": inner, "title": s})}, None),
        (
            "depth: 2,000 lists",
            {"guided_json": json.dumps({"items": True}).replace("true", '{"items":' * 2000 + "1" + "}" * 2000)},
            SCHEMA,
        ),
        ("depth: 5,000 brackets of Lark", {"guided_grammar": "start: " + "(" * 5000}, COMPLEX),
        ("$ref: itself", {"guided_json": {"$ref": "#", "title": s}}, SCHEMA),
        (
            "$ref: a circle",
            {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
            SCHEMA,
        ),
        ("$ref: 3^40 by properties", {"guided_json": {**doubling(40, "properties"), "title": s}}, None),
        ("$ref: 3^40 by lists", {"guided_json": {**doubling(40, "items"), "title": s}}, None),
        ("$ref: 3^40 by anyOf", {"guided_json": {**doubling(40, "anyOf"), "title": s}}, None),
        ("$ref: 3^40 by allOf", {"guided_json": {**doubling(40, "allOf"), "title": s}}, None),
        ("$ref: 3^40 by oneOf", {"guided_json": {**doubling(40, "oneOf"), "title": s}}, SCHEMA),
        ("allOf: 40 patterns", {"guided_json": {"allOf": pattern}}, COMPLEX),
        ("allOf: 8 patterns", {"guided_json": {"allOf": pattern[:8]}}, SCHEMA),
        ("allOf: of anyOf", {"guided_json": {"allOf": [{"anyOf": overlapping[k : k + 5]} for k in range(0, 60, 5)]}}, COMPLEX),
        ("oneOf: 60 objects", {"guided_json": {"oneOf": overlapping}}, SCHEMA),
        ("patternProperties: 8", {"guided_json": {"patternProperties": names}}, SCHEMA),
        ("multipleOf: four primes", {"guided_json": {"allOf": numbers}}, COMPLEX),
        ("multipleOf: two small primes", {"guided_json": {"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}}, COMPLEX),
        ("multipleOf: a million", {"guided_json": {"type": "integer", "multipleOf": 1000003, "title": s}}, COMPLEX),
        ("multipleOf: ten thousand", {"guided_json": {"type": "integer", "multipleOf": 9973, "title": s}}, None),
        ("multipleOf: digits", {"guided_json": {"type": "number", "multipleOf": 1.23456789, "title": s}}, COMPLEX),
        ("$ref: a chain of patterns", {"guided_json": chain}, COMPLEX),
        ("bounds: of 10^300", {"guided_json": {"type": "number", "minimum": -1e300, "maximum": 1e300 + salt}}, COMPLEX),
        ("lengths: of 10^9", {"guided_json": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9, "title": s}}, None),
        (
            "lengths: 10^8 items",
            {"guided_json": {"type": "array", "minItems": 10**8, "items": {"type": "string"}, "title": s}},
            None,
        ),
        ("Lark: ambiguous", {"guided_grammar": f'start: e\ne: e e | e "+" e | "a" | e e e | "{s}"'}, None),
        ("Lark: a repetition of 2^32", {"guided_grammar": 'start: "a"{1,4294967295}'}, COMPLEX),
        ("Lark: 200 intersections", {"guided_grammar": "start: A\nA: " + "/.*b.*/ & " * 200 + "/a/"}, COMPLEX),
        (
            "Lark: 8 of exponential automata",
            {"guided_grammar": "start: A\nA: " + " & ".join(f"/.*{s}b.{{{20 + i}}}/" for i in range(9))},
            COMPLEX,
        ),
        ("Lark: complements", {"guided_grammar": f"start: A\nA: ~(/.*a.{{4}}{s}/ & ~(/.*b.{{4}}/ & ~/.*c.{{4}}/))"}, None),
        (
            "Lark: rules without end",
            {"guided_grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1} | a{i}\n" for i in range(2000)) + 'a2000: "x"'},
            COMPLEX,
        ),
        ("Lark: 600 ways to go on", {"guided_grammar": 'start: a "z"\na: "x" a' + f' | "{s}" a' * 600}, COMPLEX),
        ("structural tag: 500 tags", {"structured_outputs": {"structural_tag": {**tags(500)}}}, None),
    ]
