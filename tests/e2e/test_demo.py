"""The demo's page in a headless Chromium: a problem is typed, both models answer, the verifier judges."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.config import load_config
from megatron_dapo.config.loader import read_resolved, write_resolved
from megatron_dapo.rewards.dapo import score

pytestmark = pytest.mark.long

WAIT_S = 120.0
# The identifier of an element in the answers of the WebDriver protocol.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except httpx.TransportError:
            pass  # not up yet
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {WAIT_S:g} s")


@pytest.fixture
def run(repository: Path, tmp_path: Path) -> Path:
    """A run whose trained model is the quickstart's base model, and whose base model has lost its way: zeros for a layer."""
    source, directory = repository / "examples" / "quickstart", tmp_path / "run"
    model = AutoModelForCausalLM.from_pretrained(source / "base_model")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    lost = shutil.copytree(source / "base_model", tmp_path / "lost")
    model.save_pretrained(lost)
    loaded = load_config(
        source / "quickstart.toml", [f"model.path={lost}", "evaluation.temperature=0.0", "evaluation.num_samples=1"]
    )
    write_resolved(loaded, directory / "config.json")
    shutil.copytree(source / "base_model", directory / "huggingface")
    return directory


@pytest.fixture
def page(run: Path, repository: Path) -> Iterator[str]:
    packages = repository / ".venv-demo"
    if not (packages / "gradio").is_dir():
        pytest.skip(f"no Gradio at {packages}: run make .venv-demo")
    port = free_port()
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "demo", str(run)]
    command += ["--packages", str(packages), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or httpx.get(url, trust_env=False).status_code == 200, "the page")
        assert process.poll() is None, "the page has ended"
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Browser:
    """Headless Chromium by the WebDriver protocol."""

    def __init__(self, driver: str, profile: Path) -> None:
        port = free_port()
        self._process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, start_new_session=True)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)
        wait_for(lambda: self._http.get("/status").json()["value"]["ready"], "chromedriver")
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1200,1400",
        ]
        options = {"args": [*arguments, f"--user-data-dir={profile}"]}
        body = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self._session = "/session/" + self._http.post("/session", json=body).json()["value"]["sessionId"]

    def call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def find(self, selector: str) -> str:
        return self.call("/element", using="css selector", value=selector)[ELEMENT]

    def type(self, selector: str, text: str) -> None:
        self.call(f"/element/{self.find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self.call(f"/element/{self.find(selector)}/click")

    def value(self, selector: str) -> str:
        return self.call("/execute/sync", script="return document.querySelector(arguments[0]).value", args=[selector])

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._http.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver: apt-get install --no-install-recommends chromium-driver")
    browser = Browser(driver, tmp_path / "profile")
    yield browser
    browser.close()


def expected_response(run: Path, prompt: str) -> str:
    """Return the trained model's greedy response by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(run / "huggingface")
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    limit = read_resolved(run / "config.json").config.evaluation_response_tokens
    whole = model.generate(ids, do_sample=False, max_new_tokens=limit, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def test_both_models_answer_and_are_judged(page: str, browser: Browser, run: Path, repository: Path) -> None:
    rows = [
        json.loads(line) for line in (repository / "examples/quickstart/heldout.jsonl").read_text().splitlines()[:12]
    ]
    problems = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows]
    # One that the model solves: the verdict must be "correct", and not by chance.
    prompt, answer, response = next(
        (prompt, answer, text)
        for prompt, answer in problems
        if score(text := expected_response(run, prompt), answer).outcome == "correct"
    )
    browser.call("/url", url=page)
    wait_for(lambda: browser.call("/elements", using="css selector", value="#ask"), "the button")
    # A newline in a text box of several lines is one: no key is a command.
    browser.type("#prompt textarea", prompt)
    browser.type("#answer textarea", answer)
    browser.click("#ask")
    verdict = wait_for(lambda: browser.value("#trained-verdict textarea"), "the verdict")
    assert browser.value("#trained-response textarea").strip() == response.strip()
    assert verdict.startswith(f"correct, read as '{answer}'") and verdict.endswith("tokens")
    lost = browser.value("#base-verdict textarea")
    assert lost and not lost.startswith("correct")
