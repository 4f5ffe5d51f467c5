"""The program of `episodes.py` for the chat endpoint: asks for turns and says how long they took. Standard library only.

With `begins` in its task each turn is a separate conversation that begins with one of these texts and has a limit of tokens; with
`starts` it waits until that directory has the file "go".
"""

import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit

task = json.load(sys.stdin)
place = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(place.hostname, place.port)
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
messages, seconds = [{"role": "user", "content": "Begin."}], []
if "starts" in task:
    open(os.path.join(task["starts"], task["name"]), "x").close()
    while not os.path.exists(os.path.join(task["starts"], "go")):
        time.sleep(0.05)
for number in range(task["turns"]):
    limit = {}
    if "begins" in task:
        text, limit["max_tokens"] = task["begins"][number]
        messages = [{"role": "user", "content": text}]
    started = time.perf_counter()
    body = json.dumps({"model": "policy", "messages": messages, **limit})
    connection.request("POST", f"{place.path}/chat/completions", body, headers)
    answer = json.load(connection.getresponse())["choices"][0]["message"]
    seconds.append(time.perf_counter() - started)
    messages += [answer, {"role": "user", "content": "Go on."}]
seconds.sort()
parts = {"total": sum(seconds), "p50": seconds[len(seconds) // 2], "p99": seconds[len(seconds) * 99 // 100]}
print(json.dumps({"reward": 0.0, "parts": parts}))
