"""An agent that asks as the task says, with the standard library only."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

task = json.load(sys.stdin)


def ask(messages, **fields):
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        return {"refused": json.load(error)["error"]["message"]}


kind = task["kind"]
messages = [{"role": "user", "content": f"begin {task['seed']}"}]
print("what an agent prints", flush=True)
if kind == "silent":
    sys.exit()
if kind == "fails":
    sys.exit("ImportError: no module named tools")
if kind == "parallel":
    count = task.get("calls", 3)
    with ThreadPoolExecutor(count) as threads:
        choices = list(threads.map(lambda index: ask([{"role": "user", "content": str(index)}]), range(count)))
    print(json.dumps({"reward": 1, "parts": {", ".join(choice["message"]["content"] for choice in choices): 1}}))
    sys.exit()
if kind == "result of a tool":
    messages += [ask(messages)["message"]]
    refused = ask([*messages, {"role": "tool", "content": "3"}])["refused"]
    ask([*messages, {"role": "user", "content": refused}])
    print("true")
    sys.exit()
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
choice = ask(messages, tools=tools, max_tokens=7)
if kind == "leaves":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if kind == "hangs":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
messages += [choice["message"], {"role": "tool", "content": "3"}]
if kind == "branches":
    edited = ask([messages[0] | {"content": "another"}, *messages[1:]], tools=tools)
    choices = [edited, ask(messages, tools=tools), ask(messages, tools=tools)]
    print(json.dumps({"reward": 0.5, "parts": {"".join(choice["message"]["content"] for choice in choices): 1}}))
else:
    choice = ask(messages, tools=tools)
    print(json.dumps({"reward": 0.25, "correct": True, "parts": {choice["message"]["content"]: 1}}))
