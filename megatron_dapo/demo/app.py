"""The page, a separate program: `megatron-dapo demo` starts it, and a Hugging Face Space runs it unchanged.

Next to it: demo.json (models, sampling, reward, examples) and the package modules that it imports. Nothing else of
the package imports Gradio, which has a separate environment (requirements/demo-cpu-py311.txt).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.data.template import PromptTemplate, resolve_stop_token_ids
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.rewards.pool.pool import score_request
from megatron_dapo.types import Completion, Prompt, Score

Messages = Sequence[Mapping[str, str]]


class ChatModel:
    """A model with its tokenizer, prompt template and stop tokens."""

    def __init__(self, path: str, template: str, dtype: str, options: Mapping[str, Any] | None = None) -> None:
        """`path`: a directory or a repository of the Hub. `options`: of the chat template."""
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self._model = model.to(device).eval()
        self._tokenizer, self._template = tokenizer, PromptTemplate(tokenizer, template, options)
        generation = getattr(self._model.generation_config, "eos_token_id", None)
        stops = resolve_stop_token_ids(self._model.config.eos_token_id, generation, tokenizer.eos_token_id)
        self._stop_token_ids = list(stops.token_ids)

    def answer(self, messages: Messages, sampling: Mapping[str, Any], seed: int) -> tuple[str, Completion]:
        """Return the response's text and tokens; its log-probs are 0."""
        prompt_ids = torch.tensor([self._template.render(messages)]).to(self._model.device)
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
        reason: Any = "stop" if response[-1] in self._stop_token_ids else "length"
        completion = Completion("demo/0", np.array(response), np.zeros(len(response)), reason, ())
        return self._tokenizer.decode(response, skip_special_tokens=True), completion


def judge(pool: Any, prompt: Prompt, text: str, completion: Completion) -> str:
    """Return a verdict on a response by the run's reward, computed in its verifier processes."""
    tokens = f"{completion.num_tokens} tokens"
    if problem := pool.validate_answers([prompt.answer]).get(prompt.answer):
        return f"no reward without a right answer; {tokens}" if not prompt.answer.strip() else f"{problem}; {tokens}"
    score = pool.score_many([score_request("demo/0", prompt, completion, text, pool)])["demo/0"]
    return f"{_outcome(score)}; reward {score.reward:.3g}{_parts(score)}; {tokens}"


def _outcome(score: Score) -> str:
    if score.failure:
        return f"{score.outcome}: {score.failure}"
    extracted = f", read as {score.extracted!r}" if score.extracted is not None else ""
    return f"{score.outcome}{extracted}"


def _parts(score: Score) -> str:
    parts = score.detail.get("parts", {})
    return f" ({', '.join(f'{name} {value:.3g}' for name, value in parts.items())})" if len(parts) > 1 else ""


def prompt_of(text: str, answer: str, settings: Mapping[str, Any]) -> Prompt:
    """Return a visitor's problem as a prompt of the run; one of the examples keeps the other columns of its row."""
    of_row = (row for row in settings["examples"] if (row["prompt"], row["answer"]) == (text, answer))
    example: Mapping[str, Any] = next(of_row, {})
    messages = (*example.get("turns", settings["turns"]), {"role": "user", "content": text})
    return Prompt("demo", messages, (), answer, example.get("data_source", ""), example.get("extra", {}))


def reward_of(settings: Mapping[str, Any]) -> RewardConfig:
    """Return the section [reward] of the run."""
    return RewardConfig.model_validate_json(json.dumps(settings["reward"]))


def build_page(settings: Mapping[str, Any], pool: Any) -> gradio.Blocks:
    """Return the page of these settings (demo.json). `pool` scores the responses."""
    models = [
        ChatModel(settings[name], settings["template"], settings["dtype"], settings["template_options"])
        for name in ("base", "trained")
    ]
    one_at_a_time = threading.Lock()  # serializes visitors, as the random state is per process

    def ask(text: str, answer: str, temperature: float, seed: float) -> list[str]:
        if not text.strip():
            return ["", "type a problem first", "", "type a problem first"]
        sampling = {**settings["sampling"], "temperature": temperature}
        prompt = prompt_of(text, answer, settings)
        shown = []
        for model in models:
            with one_at_a_time:
                response, completion = model.answer(prompt.messages, sampling, int(seed))
            shown += [response, judge(pool, prompt, response, completion)]
        return shown

    examples = settings["examples"]
    first = examples[0] if examples else {"prompt": "", "answer": ""}
    with gradio.Blocks(title=settings["title"]) as page:
        gradio.Markdown(f"# {settings['title']}\n\n{settings['text']}")
        prompt = gradio.Textbox(first["prompt"], label="Problem", lines=6, elem_id="prompt")
        with gradio.Row():
            answer = gradio.Textbox(first["answer"], label="Right answer", elem_id="answer")
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
                    shown.append(gradio.Textbox(label="Reward", elem_id=f"{name}-verdict"))
        button.click(ask, [prompt, answer, temperature, seed], shown, api_name="ask")
        if examples:
            # The rows of a table would show the begin of each prompt, which is the same instruction in all.
            gradio.Examples(
                [[one["prompt"], one["answer"]] for one in examples],
                [prompt, answer],
                label="Held-out problems",
                example_labels=[one["label"] for one in examples],
            )
    return page


def main() -> None:
    """Serve the page until it is stopped."""
    disable_progress_bar()  # shown while weights are loaded
    directory = Path(__file__).resolve().parent
    settings = json.loads((directory / "demo.json").read_text(encoding="utf-8"))
    sys.path.append(str(directory / "rewards"))  # modules of the user's functions, for the verifier processes too
    try:
        pool = open_verifier_pool(reward_of(settings))
    except ValueError as error:
        sys.exit(f"error: the reward of this run cannot be loaded here: {error}")
    with pool:
        build_page(settings, pool).launch()


if __name__ == "__main__":
    main()
