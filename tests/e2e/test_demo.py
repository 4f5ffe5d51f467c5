"""The demo's page in a headless Chromium: a problem is typed, both models answer, the verifier judges."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch
from browser import Browser, wait_for
from launcher import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.config import load_config
from megatron_dapo.config.loader import read_resolved, write_resolved
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.rewards.verifiers.dapo import score


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


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
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


def solved_problem(run: Path, repository: Path) -> tuple[str, str, str]:
    """Return the first held-out problem that the trained model solves, its answer and the response."""
    rows = (repository / "examples/quickstart/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    for row in map(json.loads, rows):
        prompt, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        response = expected_response(run, prompt)
        if score(response, answer).outcome == "correct":
            return prompt, answer, response
    raise AssertionError("the trained model solves none of 12 problems")


def test_the_page_s_models_answer_and_are_judged(
    run: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of the page but Gradio, whose module stays empty."""
    monkeypatch.setitem(sys.modules, "gradio", ModuleType("gradio"))
    from megatron_dapo.demo.app import ChatModel, judge, prompt_of

    prompt, answer, response = solved_problem(run, repository)
    config = read_resolved(run / "config.json").config
    sampling = {"temperature": 0.0, "max_new_tokens": config.evaluation_response_tokens}
    verdicts = []
    asked = prompt_of(prompt, answer, {"examples": [], "turns": []})
    with open_verifier_pool(config.reward) as pool:
        for model in (run / "huggingface", config.model.path):
            text, completion = ChatModel(str(model), "chat", "float32").answer(asked.messages, sampling, 0)
            verdicts.append(judge(pool, asked, text, completion))
            assert (text == response) == (model == run / "huggingface")
    assert verdicts[0].startswith(f"correct, read as '{answer}'") and not verdicts[1].startswith("correct")


@pytest.mark.long
def test_both_models_answer_and_are_judged(page: str, browser: Browser, run: Path, repository: Path) -> None:
    prompt, answer, response = solved_problem(run, repository)
    browser.open(page)
    wait_for(lambda: browser.run("return document.querySelector('#ask') !== null"), "the button")
    # The page begins with the first held-out problem.
    browser.run("document.querySelectorAll('#prompt textarea, #answer textarea').forEach((box) => { box.value = ''; box.dispatchEvent(new Event('input')); })")
    # A newline in a text box of several lines is one: no key is a command.
    browser.type("#prompt textarea", prompt)
    browser.type("#answer textarea", answer)
    browser.click("#ask")
    value = "return document.querySelector(arguments[0]).value"
    verdict = wait_for(lambda: browser.run(value, "#trained-verdict textarea"), "the verdict")
    assert browser.run(value, "#trained-response textarea").strip() == response.strip()
    assert verdict.startswith(f"correct, read as '{answer}'") and verdict.endswith("tokens")
    lost = browser.run(value, "#base-verdict textarea")
    assert lost and not lost.startswith("correct")
