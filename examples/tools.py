"""The default model calls a function for the weather, gets its result, and answers: every call is valid, by grammar."""

import json

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model


def weather(city: str, unit: str) -> dict[str, object]:
    """What a weather service would say."""
    degrees = {"Paris": 18, "Oslo": 7, "Cairo": 31}[city]
    return {"city": city, "temperature": degrees if unit == "celsius" else degrees * 9 / 5 + 32, "unit": unit}


TOOLS = [
    {
        "name": "weather",
        "description": "The temperature in a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo", "Cairo"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
]

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=256)
messages: list[dict[str, object]] = [{"role": "user", "content": "What is the temperature in Oslo, in celsius?"}]

request = ChatCompletionRequest(
    messages, "default", tool_schemas=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=128, temperature=0.0
)
choice = runner.send_chat_completion_request(request).choices[0]
assert choice.message.tool_calls is not None
calls = choice.message.tool_calls
written = [
    {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}} for c in calls
]
messages.append({"role": "assistant", "content": None, "tool_calls": written})
for call in calls:
    result = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) gives {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

request = ChatCompletionRequest(messages, "default", tool_schemas=TOOLS, tool_choice="none", max_tokens=128, temperature=0.0)
answer = runner.send_chat_completion_request(request)
print(answer.choices[0].message.content)
