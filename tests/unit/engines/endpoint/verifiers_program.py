"""An environment of Prime Intellect's verifiers as an agent, and its own evaluation with scripted completions.

    python verifiers_program.py PACKAGES                the task on standard input, see engines.endpoint.agents
    python verifiers_program.py PACKAGES --own          [[question, [message, ...]], ...] on standard input
"""

import asyncio
import json
import os
import sys

if __name__ == "__main__":
    sys.path[:0] = sys.argv[1].split(os.pathsep)
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    if not word:
        raise ValueError("there is no word")
    return f"{word} is a word"


def says_it(completion, answer) -> float:
    return float(answer in str(completion[-1].content))


def is_short(completion) -> float:
    return 1 / len(completion)


def evaluate(question: str, client) -> dict:
    import verifiers.legacy as vf
    from datasets import Dataset
    from verifiers.legacy.clients import OpenAIChatCompletionsClient

    environment = vf.ToolEnv(
        tools=[lookup],
        dataset=Dataset.from_list([{"question": question, "answer": "a word"}]),
        rubric=vf.Rubric(funcs=[says_it, is_short], weights=[1.0, 0.25]),
        max_turns=4,
    )
    rollouts = environment.evaluate(
        client=OpenAIChatCompletionsClient(client), model="policy", num_examples=1, rollouts_per_example=1
    )
    (output,) = asyncio.run(rollouts)["outputs"]
    return {"reward": output["reward"], "parts": output["metrics"]}


def scripted(messages: list):
    """A client whose completions are those of a script, without an endpoint."""
    import httpx
    from openai import AsyncOpenAI

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)["messages"]
        message = messages[sum(one["role"] == "assistant" for one in asked)]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        body = {"id": "own", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return httpx.Response(200, json=body)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return AsyncOpenAI(api_key="none", base_url="http://none/v1", http_client=http)


if __name__ == "__main__":
    task = json.load(sys.stdin)
    if sys.argv[2:] == ["--own"]:
        print(json.dumps([evaluate(question, scripted(messages)) for question, messages in task]))
    else:
        from openai import AsyncOpenAI

        print(json.dumps(evaluate(task["question"], AsyncOpenAI())))
