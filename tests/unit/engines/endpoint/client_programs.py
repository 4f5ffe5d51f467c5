"""Published clients as agents, unmodified: each asks with a tool until the policy answers without a call, or talks.

    python client_programs.py DIRECTORY_OF_PACKAGES     the task on standard input, see engines.endpoint.agents
"""

import asyncio
import json
import sys

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


def chat(question: str, streams: bool) -> str:
    from openai import OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": question}]
    while True:
        arguments = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
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
            message = client.messages.create(**arguments)
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in message.content)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": lookup(**use.input)} for use in uses]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def agents(question: str, api: str) -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(name="reader", instructions="Look words up.", model="policy", tools=[function_tool(lookup)])
    return Runner.run_sync(agent, question, max_turns=9).final_output


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
    "anthropic": lambda question: anthropic(question, False),
    "anthropic-stream": lambda question: anthropic(question, True),
    "openai-agents": lambda question: agents(question, "chat_completions"),
    "openai-agents-responses": lambda question: agents(question, "responses"),
}

if __name__ == "__main__":
    task = json.load(sys.stdin)
    answer = (TALKS if task.get("talks") else CLIENTS)[task["client"]](task["question"])
    print(json.dumps({"reward": 1, "parts": {answer: 1}}))
