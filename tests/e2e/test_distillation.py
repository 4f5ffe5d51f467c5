"""Distillation from four teachers, one of another size and padding, one a snapshot of the policy, one that reads the answer: every layout makes the steps that one process makes, across a
resume as well, and no group of a teacher's prompts is filtered."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_runs import STEADY, lines_of, train, trained_responses

from megatron_dapo.proof.oracle import with_random_weights
from megatron_dapo.telemetry.batch_dump import load_batch
from tools.prove_resume import write_recipe

COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "distillation/teacher/wide/divergence",
    "distillation/teacher/self/divergence",
    "distillation/teacher/snapshot/divergence",
    "distillation/teacher/told/divergence",
    "distillation/source/books/divergence",
)


TOLD = "{prompt} It is {answer}."  # prompt of a teacher that knows the answer


def write_teacher(directory: Path, student: Path, vocab_size: int = 600) -> Path:
    """Write a random model of another shape, whose vocabulary is padded with words that the tokenizer does not have."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    model = with_random_weights(transformers.Qwen2ForCausalLM(config), 3)
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(student / file, directory)
    return directory


def settings(directory: Path, divergence: str = "js") -> tuple[str, ...]:
    """Overrides of two sources and their teachers."""
    rows = (directory / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("books", rows[::2]), ("games", rows[1::2])):
        (directory / f"{name}.jsonl").write_text("".join(part))
    teachers = (
        f'{{name = "wide", path = "{directory / "wide"}", sources = ["books"], weight = 0.5}}',
        '{name = "self", sources = ["games"], rl = true}',
        '{name = "snapshot", sources = ["games"], refresh_steps = 2, weight = 0.2}',
        f'{{name = "told", sources = ["games"], prompt = "{TOLD}", weight = 0.3}}',
    )
    sources = (f'{{path = "{directory / name}.jsonl", name = "{name}"}}' for name in ("books", "games"))
    return (
        "data.train_paths=[]",
        f"data.sources=[{', '.join(sources)}]",
        f"distillation.teachers=[{', '.join(teachers)}]",
        f"distillation.divergence={divergence}",
        "distillation.offload=all",
        *STEADY,
    )


def run(recipe: Path, directory: Path, layout: str, num_steps: int) -> list[dict[str, Any]]:
    """Metrics of a run, continued if it has begun."""
    outcome = train(recipe, directory, layout, *settings(recipe.parent), f"run.total_steps={num_steps}")
    assert outcome.code == 0, outcome.text
    return lines_of(directory / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe, and four uninterrupted steps of one process."""
    directory = tmp_path_factory.mktemp("alone")
    recipe = write_recipe(directory)
    write_teacher(directory / "wide", Path(__file__).parents[2] / "examples" / "quickstart" / "base_model")
    steps = run(recipe, directory / "run", "tp1", 4)
    assert len(steps) == 4
    assert all(step["distillation/teacher/wide/divergence"] > 0.05 for step in steps)
    assert all(step["rollout/source/books/groups_filtered_share"] == 0 for step in steps), "a teacher needs no contrast"
    # The policy starts as its own teacher: at first it has nothing to learn from it.
    assert steps[0]["distillation/teacher/self/divergence"] < 1e-3 < steps[0]["distillation/teacher/wide/divergence"]
    by_self, by_snapshot = ([step[f"distillation/teacher/{name}/divergence"] for step in steps] for name in ("self", "snapshot"))
    # Until the third step the snapshot is the policy as it started, then the policy as that step begins.
    assert by_snapshot[:2] == by_self[:2] and by_snapshot[2] < 0.5 * by_self[2] and by_snapshot[3] < by_self[3]
    return recipe, directory / "run"


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", pytest.param("dp2", marks=pytest.mark.long)])
@pytest.mark.long
def test_three_steps_and_a_resume_are_those_of_one_process(alone: tuple[Path, Path], tmp_path: Path, layout: str) -> None:
    recipe, expected = alone
    assert len(run(recipe, tmp_path / "run", layout, 3)) == 3
    steps = run(recipe, tmp_path / "run", layout, 4)  # The snapshot is the second step's.
    assert trained_responses(tmp_path / "run") == trained_responses(expected)
    for step, right in zip(steps, lines_of(expected / "metrics.jsonl"), strict=True):
        for name in COMPARED:
            # Adam divides by the size of gradients that are rounding alone, so weights drift a little.
            tolerance = 1e-5 if step["train_step"] == 1 else 1e-3
            assert step[name] == pytest.approx(right[name], rel=tolerance, abs=1e-5), (step["train_step"], name)


def told_prompts(recipe: Path, model: Path) -> dict[tuple[int, ...], list[int]]:
    """What the policy reads -> what the teacher reads, in token ids, by the tokenizer alone."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = {}
    for row in map(json.loads, (recipe.parent / "train.jsonl").read_text().splitlines()):
        [turn] = row["prompt"]
        answer = row["reward_model"]["ground_truth"]
        texts = turn["content"], f"{turn['content']} It is {answer}."
        ids = [
            tokenizer(tokenizer.apply_chat_template([{**turn, "content": text}], tokenize=False, add_generation_prompt=True))["input_ids"]
            for text in texts
        ]
        found[tuple(ids[0])] = ids[1]
    return found


def response_log_softmax(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of all words at each token of a response, [R, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1], -1)


def test_a_teacher_reads_more_than_the_policy(tmp_path: Path) -> None:
    """Context-parallel ranks cut both sequences in different places."""
    import transformers

    recipe, student = write_recipe(tmp_path), Path(__file__).parents[2] / "examples" / "quickstart" / "base_model"
    overrides = (
        f'distillation.teachers=[{{name = "told", prompt = "{TOLD}"}}]',
        "training.mini_batch_prompts=6",  # one optimizer step: the policy is as it started
        "run.total_steps=1",
        "telemetry.dump_batches=1",
        *STEADY,
    )
    outcome = train(recipe, tmp_path / "run", "cp2", *overrides)
    assert outcome.code == 0, outcome.text
    model, prompts = transformers.AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64), told_prompts(recipe, student)
    total, tokens = 0.0, 0
    for sample in load_batch(tmp_path / "run" / "batches" / "step_000001").samples:
        ids = sample.tokens.tolist()
        own, response = ids[: sample.prompt_length], ids[sample.prompt_length :]
        log_s = response_log_softmax(model, own, response)
        log_p = response_log_softmax(model, prompts[tuple(own)], response)
        total, tokens = total + float((log_s.exp() * (log_s - log_p)).sum()), tokens + len(response)
    [step] = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert total / tokens > 1e-3 and step["actor/grad_norm"] > 1e-3
    assert step["distillation/teacher/told/divergence"] == pytest.approx(total / tokens, rel=1e-5)


class Scorer(ThreadingHTTPServer):
    """What a stock SGLang server says about given tokens, by transformers."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Answers)

    @torch.no_grad()
    def answer(self, ids: list[int]) -> dict[str, Any]:
        with self.lock:
            log_p = torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)
        values = [None, *log_p[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]
        texts = [self.tokenizer.decode([token]) for token in ids]
        return {"meta_info": {"input_token_logprobs": [list(entry) for entry in zip(values, ids, texts, strict=True)]}}


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Scorer) and self.path == "/generate"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(self.server.answer(body["input_ids"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_teaches_by_token(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    student = Path(__file__).parents[2] / "examples" / "quickstart" / "base_model"
    write_teacher(tmp_path / "wide", student)
    with Scorer(student) as own, Scorer(tmp_path / "wide") as wide:
        for server in (own, wide):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        teachers = ", ".join(
            f'{{name = "{name}", url = "http://127.0.0.1:{server.server_port}", prompt = "{prompt}"}}'
            for name, server, prompt in (("own", own, ""), ("wide", wide, TOLD))
        )
        overrides = (f"distillation.teachers=[{teachers}]", "run.total_steps=1", "telemetry.dump_batches=1", *STEADY)
        outcome = train(recipe, tmp_path / "run", "tp1", *overrides)
        own.shutdown()
        wide.shutdown()
    assert outcome.code == 0, outcome.text
    [first] = lines_of(tmp_path / "run" / "metrics.jsonl")
    # At first the policy is the teacher `own`, and its samples are far from what `wide` would say.
    assert abs(first["distillation/teacher/own/divergence"]) < 1e-5 < first["distillation/teacher/wide/divergence"]
    assert first["actor/grad_norm"] > 1e-3 and first["rollout/groups_filtered_share"] == 0
    prompts = told_prompts(recipe, student)
    for sample in load_batch(tmp_path / "run" / "batches" / "step_000001").samples:
        ids = sample.tokens.tolist()
        read, response = prompts[tuple(ids[: sample.prompt_length])], ids[sample.prompt_length :]
        log_p = response_log_softmax(wide.model, read, response)
        right = log_p.gather(1, sample.tokens[sample.prompt_length :, None].long())[:, 0] - sample.rollout_logprobs
        torch.testing.assert_close(sample.teacher_gains, right, atol=1e-4, rtol=1e-4)
