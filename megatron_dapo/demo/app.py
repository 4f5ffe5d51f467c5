"""The page, a separate program: `megatron-dapo demo` starts it, and a Hugging Face Space runs it unchanged.

Next to it: demo.json (models, sampling, verifier, examples) and the package modules that it imports. Nothing else of
the package imports Gradio, which has a separate environment (requirements/demo-cpu-py311.txt).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.data.template import PromptTemplate, resolve_stop_token_ids
from megatron_dapo.rewards.verifiers.verifier import Verifier, load_verifier


class ChatModel:
    """A model with its tokenizer, prompt template and stop tokens."""

    def __init__(self, path: str, template: str, dtype: str) -> None:
        """`path`: a directory or a repository of the Hub."""
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self._model = model.to(device).eval()
        self._tokenizer, self._template = tokenizer, PromptTemplate(tokenizer, template)
        generation = getattr(self._model.generation_config, "eos_token_id", None)
        stops = resolve_stop_token_ids(self._model.config.eos_token_id, generation, tokenizer.eos_token_id)
        self._stop_token_ids = list(stops.token_ids)

    def answer(self, prompt: str, sampling: Mapping[str, Any], seed: int) -> tuple[str, int, bool]:
        """Return the response to a user's turn, its tokens, and whether it was cut at the length limit."""
        prompt_ids = torch.tensor([self._template.render([{"role": "user", "content": prompt}])])
        prompt_ids = prompt_ids.to(self._model.device)
        torch.manual_seed(seed)
        options: dict[str, Any] = {"do_sample": False}
        if sampling["temperature"] > 0:
            options = {"do_sample": True, **{name: sampling[name] for name in ("temperature", "top_p", "top_k")}}
        with torch.inference_mode():
            whole = self._model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=sampling["max_new_tokens"],
                eos_token_id=self._stop_token_ids,
                pad_token_id=self._stop_token_ids[0],
                **options,
            )
        response = whole[0, prompt_ids.shape[1] :].tolist()
        is_cut = response[-1] not in self._stop_token_ids
        return self._tokenizer.decode(response, skip_special_tokens=True), len(response), is_cut


def verdict(verifier: Verifier, response: str, answer: str, num_tokens: int, is_cut: bool) -> str:
    """Return the verifier's verdict on a response, as in the run's reward: a truncated response is never correct."""
    tokens = f"{num_tokens} tokens"
    if not answer.strip():
        return f"{tokens}; no answer given to compare with"
    problem = verifier.gold_problem(answer)
    if problem:
        return f"{tokens}; the verifier cannot use this answer: {problem}"
    result = verifier.score(response, answer)
    outcome = "truncated" if is_cut and result.outcome == "correct" else result.outcome
    extracted = f", read as {result.extracted!r}" if result.extracted is not None else ""
    return f"{outcome}{extracted}; {tokens}"


def build_page(settings: Mapping[str, Any]) -> gradio.Blocks:
    """Return the page of these settings (demo.json)."""
    models = [ChatModel(settings[name], settings["template"], settings["dtype"]) for name in ("base", "trained")]
    verifier = load_verifier(settings["verifier"])
    one_at_a_time = threading.Lock()  # serializes visitors, as the random state is per process

    def ask(prompt: str, answer: str, temperature: float, seed: float) -> list[str]:
        if not prompt.strip():
            return ["", "type a problem first", "", "type a problem first"]
        sampling = {**settings["sampling"], "temperature": temperature}
        shown = []
        for model in models:
            with one_at_a_time:
                response, num_tokens, is_cut = model.answer(prompt, sampling, int(seed))
            shown += [response, verdict(verifier, response, answer, num_tokens, is_cut)]
        return shown

    with gradio.Blocks(title=settings["title"]) as page:
        gradio.Markdown(f"# {settings['title']}\n\n{settings['text']}")
        prompt = gradio.Textbox(label="Problem", lines=6, elem_id="prompt")
        with gradio.Row():
            answer = gradio.Textbox(label="Right answer", elem_id="answer")
            temperature = gradio.Slider(0.0, 1.5, settings["sampling"]["temperature"], label="Temperature")
            seed = gradio.Number(0, label="Seed", precision=0)
        button = gradio.Button("Ask both", variant="primary", elem_id="ask")
        shown = []
        with gradio.Row():
            for name in ("base", "trained"):
                with gradio.Column():
                    shown.append(
                        gradio.Textbox(label=f"{name.capitalize()} model", lines=12, elem_id=f"{name}-response")
                    )
                    shown.append(gradio.Textbox(label="Verifier", elem_id=f"{name}-verdict"))
        button.click(ask, [prompt, answer, temperature, seed], shown, api_name="ask")
        if settings["examples"]:
            gradio.Examples(settings["examples"], [prompt, answer], label="Held-out problems")
    return page


if __name__ == "__main__":
    document = json.loads((Path(__file__).resolve().parent / "demo.json").read_text(encoding="utf-8"))
    build_page(document).launch()
