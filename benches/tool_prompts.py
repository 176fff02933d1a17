"""Which of ten prompts the default model answers with the right call, held to a grammar and free; prints a table.

python benches/tool_prompts.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_server import serving  # type: ignore[import-not-found]

from mistral_paged.default_model import default_model


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string", "maxLength": 40}
WEATHER = tool("weather", "The weather in a city.", city=TEXT)
ADD = tool("add", "The sum of two numbers.", a={"type": "integer"}, b={"type": "integer"})
TIMER = tool("set_timer", "Rings after some minutes.", minutes={"type": "integer", "minimum": 1, "maximum": 600})
CONVERT = tool("convert", "Converts euros.", euros={"type": "number", "minimum": 0}, currency={"enum": ["USD", "GBP", "JPY"]})
LIGHT = tool("light", "Switches the light.", on={"type": "boolean"})
SEARCH = tool("search", "Searches the web.", query=TEXT)
ALL = [WEATHER, ADD, TIMER, CONVERT, LIGHT, SEARCH]
# A prompt, its tools, the right function and the arguments that must be so.
PROMPTS: list[tuple[str, list[dict[str, Any]], str, dict[str, Any]]] = [
    ("What is the weather in Oslo?", [WEATHER], "weather", {"city": "Oslo"}),
    ("Is it raining in Paris?", [WEATHER, ADD], "weather", {"city": "Paris"}),
    ("What is 17 plus 25?", [ADD], "add", {"a": 17, "b": 25}),
    ("Add 3 and 4.", [ADD, WEATHER], "add", {"a": 3, "b": 4}),
    ("Set a timer for 10 minutes.", [TIMER], "set_timer", {"minutes": 10}),
    ("Wake me in 45 minutes.", [TIMER, LIGHT], "set_timer", {"minutes": 45}),
    ("Convert 50 euros to USD.", [CONVERT], "convert", {"euros": 50, "currency": "USD"}),
    ("Turn the light on.", [LIGHT], "light", {"on": True}),
    ("Switch the light off, please.", [LIGHT, TIMER], "light", {"on": False}),
    ("What is the weather in Rome?", ALL, "weather", {"city": "Rome"}),
]


def is_right(name: Any, arguments: Any, expected: tuple[str, dict[str, Any]]) -> bool:
    return name == expected[0] and isinstance(arguments, dict) and all(arguments.get(k) == v for k, v in expected[1].items())


def main() -> None:
    print("| prompt | tools | held to the grammar | free |\n| --- | --- | --- | --- |")
    right = [0, 0]
    with serving(model=str(default_model()), memory="64") as server:
        for prompt, tools, name, expected in PROMPTS:
            body = {"messages": [{"role": "user", "content": prompt}], "tools": tools}
            held = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "temperature": 0}
            message = server.post("/v1/chat/completions", {**body, **held}).json["choices"][0]["message"]
            call = message["tool_calls"][0]["function"]
            try:
                arguments = json.loads(call["arguments"])
            except json.JSONDecodeError:
                arguments = None
            first = is_right(call["name"], arguments, (name, expected))
            text = server.post("/apply-template", body).json["prompt"]
            free = server.complete(prompt=text, max_tokens=100).json["choices"][0]["text"]
            found = re.search(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", free, re.DOTALL)
            try:
                written = json.loads(found[1]) if found else {}
            except json.JSONDecodeError:
                written = {}
            second = is_right(written.get("name"), written.get("arguments"), (name, expected))
            right = [right[0] + first, right[1] + second]
            said = f"`{call['name']}({json.dumps(arguments)[:60]})`"
            print(f"| {prompt} | {len(tools)} | {'yes' if first else 'no: ' + said} | {'yes' if second else 'no'} |", flush=True)
    print(f"| right | | {right[0]} of 10 | {right[1]} of 10 |")


if __name__ == "__main__":
    main()
