"""Published clients as agents, unmodified: each asks with a tool until the policy answers without a call, or talks.

    python client_programs.py DIRECTORY_OF_PACKAGES     the task on standard input, see engines.endpoint.agents
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

TOOL = {
    "name": "lookup",
    "description": "Look a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def lookup(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


def chat(question: str, streams: bool, dies_at: int | None = None) -> str:
    from openai import APITimeoutError, OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": question}]
    while True:
        arguments = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        if len(messages) // 2 == dies_at:  # Its request is open, or it has not read the answer.
            with suppress(APITimeoutError):
                client.with_options(timeout=0.05, max_retries=0).chat.completions.create(**arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        if streams:
            with client.chat.completions.stream(**arguments) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**arguments).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            content = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def chat_async(question: str) -> str:
    from openai import AsyncOpenAI

    client, messages = AsyncOpenAI(), [{"role": "user", "content": question}]
    while True:
        tools = [{"type": "function", "function": TOOL}]
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def responses(question: str, streams: bool) -> str:
    from openai import OpenAI

    client, items = OpenAI(), [{"role": "user", "content": question}]
    while True:
        arguments = {"model": "policy", "input": items, "tools": [{"type": "function", "strict": True, **TOOL}]}
        if streams:
            with client.responses.stream(**arguments) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**arguments)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            output = lookup(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def responses_by_id(question: str) -> str:
    from openai import OpenAI

    client, new, previous = OpenAI(), [{"role": "user", "content": question}], None
    tools = [{"type": "function", "strict": True, **TOOL}]
    while True:
        response = client.responses.create(model="policy", input=new, tools=tools, previous_response_id=previous)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        outputs = [lookup(**json.loads(call.arguments)) for call in calls]
        new = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, outputs, strict=True)
        ]
        previous = response.id


def anthropic(question: str, streams: bool) -> str:
    from anthropic import Anthropic

    client, messages = Anthropic(), [{"role": "user", "content": question}]
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    while True:
        arguments = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 100}
        if streams:
            with client.messages.stream(**arguments) as stream:
                message = stream.get_final_message()
        else:
            counted = client.messages.count_tokens(model="policy", messages=messages, tools=tools).input_tokens
            message = client.messages.create(**arguments)
            assert counted == message.usage.input_tokens, f"{counted} tokens, not {message.usage.input_tokens}"
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in message.content)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": lookup(**use.input)} for use in uses]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def agents(question: str, api: str, by_id: bool = False) -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(name="reader", instructions="Look words up.", model="policy", tools=[function_tool(lookup)])
    return Runner.run_sync(agent, question, max_turns=9, auto_previous_response_id=by_id).final_output


def mini_swe_agent(question: str) -> str:
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = os.getcwd()
    os.environ["MSWEA_CONFIGURED"] = os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    from minisweagent.run.mini import app

    arguments = ["-m", "openai/policy", "-t", question, "-y", "--exit-immediately", "-o", "trajectory.json"]
    return app(arguments, standalone_mode=False).messages[-1]["content"]


def talk_openai(question: str) -> str:
    from openai import OpenAI

    client, messages = OpenAI(), []
    for text in (question, "and", "then"):
        messages.append({"role": "user", "content": text})
        messages.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message)
    return messages[-1].content


def talk_anthropic(question: str) -> str:
    from anthropic import Anthropic

    client, messages = Anthropic(), []
    for text in (question, "and", "then"):
        messages.append({"role": "user", "content": text})
        answer = client.messages.create(model="policy", messages=messages, max_tokens=100)
        messages.append({"role": "assistant", "content": answer.content})
    return answer.content[-1].text


TALKS = {"openai": talk_openai, "anthropic": talk_anthropic}
CLIENTS = {
    "openai": lambda question: chat(question, False),
    "openai-stream": lambda question: chat(question, True),
    "openai-async": lambda question: asyncio.run(chat_async(question)),
    "openai-responses": lambda question: responses(question, False),
    "openai-responses-stream": lambda question: responses(question, True),
    "openai-responses-by-id": responses_by_id,
    "anthropic": lambda question: anthropic(question, False),
    "anthropic-stream": lambda question: anthropic(question, True),
    "openai-agents": lambda question: agents(question, "chat_completions"),
    "openai-agents-responses": lambda question: agents(question, "responses"),
    "openai-agents-responses-by-id": lambda question: agents(question, "responses", by_id=True),
}

if __name__ == "__main__":
    task = json.load(sys.stdin)
    if task["client"] == "dies":
        is_first = not os.path.exists(task["died"])
        open(task["died"], "w").close()
        answer = chat(task["question"], False, task["turn"] if is_first else None)
    elif task["client"] == "mini-swe-agent":
        answer = mini_swe_agent(task["question"])
    else:
        answer = (TALKS if task.get("talks") else CLIENTS)[task["client"]](task["question"])
    print(json.dumps({"reward": 1, "parts": {answer or "nothing": 1}}))
