"""A small script in place of the engine's interpreter: it serves, hangs, exits, lies, or will not die, as it is told."""

from __future__ import annotations

import psutil

ENGINE = """#!{python}
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[1:], sys.argv[2:]))
behavior = json.loads({behavior!r})
calls = sys.argv[0] + ".calls"
key = open(options["--api-key-file"]).read()
print("engine starts", flush=True)

if behavior.get("hang"):
    time.sleep(600)
if behavior.get("fail"):
    print("Traceback (most recent call last):\\n  File x\\nValueError: the first error\\n"
          "Traceback (most recent call last):\\n  File y\\nRuntimeError: what follows", flush=True)
    sys.exit(3)
if behavior.get("children"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stubborn])
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)

server = {{"version": "0.5.17", "dtype": "float32", "tp_size": 1, "max_total_num_tokens": 64,
          "enable_deterministic_inference": False, "custom_weight_loader": [options["--custom-weight-loader"]]}}
model = {{"model_path": options["--model-path"], "architectures": ["Qwen2ForCausalLM"],
         "weight_version": "3"}}
server.update(behavior.get("server", {{}}))
model.update(behavior.get("model", {{}}))

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            return self.answer(behavior.get("health", 200), {{}})
        if self.headers["Authorization"] != "Bearer " + behavior.get("key", key):
            return self.answer(401, {{}})
        document = {{"/server_info": server, "/model_info": model}}.get(self.path)
        self.answer(404 if document is None else 200, document)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/generate":
            with open(calls, "a") as stream:
                stream.write(self.path + " " + body.decode() + "\\n")
            return self.answer(200, {{}})
        self.answer(400, {{"error": "valid range is [0, %d)" % behavior.get("vocab_size", 300)}})

ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


def running(pids: list[int]) -> list[int]:
    """Return the processes that have not ended; an ended orphan may still wait for init to reap it."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
