"""Supervised fine-tuning trains transformers' own loss: value and gradients, in every layout, whole path of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_checks import Reference, build_actor, gradient_error, largest_over_ranks, reference_model
from launcher import run_distributed, target_in
from safetensors.torch import load_file, save_file

from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.config import Config, config_from_dict
from megatron_dapo.data.examples import Example
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.run.derive import sft_config
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.offload import DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.sft import ExampleBatches, ExampleStream, SftLearner
from megatron_dapo.types import Prompt

MODELS = ("qwen2", "llama3")
# Prompt and response tokens: a response of only its stop token, one longer than all others together.
LENGTHS = ((5, 12), (1, 1), (17, 3), (2, 60), (9, 9), (30, 2), (3, 25), (4, 1), (8, 14), (6, 7), (11, 33))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2},
)


def examples() -> list[Example]:
    generator = np.random.default_rng(5)
    made = []
    for index, (prompt, response) in enumerate(LENGTHS):
        tokens = generator.integers(0, 300, prompt + response)
        made.append(Example(Prompt(f"p{index}", (), tuple(tokens[:prompt].tolist()), ""), tokens[prompt:]))
    return made


def config_of(directory: str, aggregation: str) -> Config:
    recipe = {
        "model": {"path": "."},
        "data": {"train_paths": [f"{directory}/rows.jsonl"], "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 64},
        "training": {"micro_batch_tokens": 128},
        "sft": {"batch_size": len(LENGTHS), "epochs": 1, "aggregation": aggregation},
    }
    return sft_config(config_from_dict(recipe))


def write_references(directory: Path) -> None:
    """Loss and gradients by transformers' `labels`, one sequence at a time, for both aggregations."""
    (directory / "rows.jsonl").write_text("{}\n" * len(LENGTHS))
    num_tokens = sum(response for _, response in LENGTHS)
    for name in MODELS:
        for aggregation in ("token_mean", "sample_mean"):
            model = reference_model(name)
            total = torch.zeros((), dtype=torch.float64)
            for example in examples():
                tokens = torch.tensor([*example.prompt.token_ids, *example.token_ids.tolist()])
                labels = tokens.clone()
                labels[: len(example.prompt.token_ids)] = -100
                share = len(example.token_ids) / num_tokens if aggregation == "token_mean" else 1 / len(LENGTHS)
                total = total + share * model(tokens[None], labels=labels[None]).loss
            total.backward()
            weights = stored_tensors(dict(model.named_parameters()))
            gradients = stored_tensors({key: value.grad for key, value in model.named_parameters()})
            tensors = {f"weight/{key}": value.detach().contiguous() for key, value in weights.items()}
            tensors |= {f"gradient/{key}": value.contiguous() for key, value in gradients.items()}
            save_file({**tensors, "loss": total.detach()}, directory / f"{name}_{aggregation}.safetensors")
            (directory / f"{name}.json").write_text(model.config.to_json_string(use_diff=False))


def read(directory: str, name: str, aggregation: str) -> Reference:
    tensors = load_file(f"{directory}/{name}_{aggregation}.safetensors")
    parts = [
        {key.removeprefix(kind): value for key, value in tensors.items() if key.startswith(kind)}
        for kind in ("weight/", "gradient/")
    ]
    architecture = parse_architecture(json.loads(Path(directory, f"{name}.json").read_text()))
    return Reference(architecture, parts[0], float(tensors["loss"]), parts[1], ())


def step(want: Reference, config: Config, layout: ParallelLayout) -> dict[str, float]:
    """Errors of the loss and the gradients of one train step on all examples, from the stream of examples to the optimizer."""
    actor = build_actor(want, layout, ActorSettings())
    errors: dict[str, float] = {}
    made = {example.prompt.prompt_id: example for example in examples()}
    stream = ExampleStream(made, PromptStream(tuple(made), seed=1)) if dist.get_rank() == 0 else None
    samples = ExampleBatches(stream, coordinate(range(dist.get_world_size()), 60.0)).next(len(made))
    phases = Phases()
    models = DeviceModels({}, phases)
    policy = PolicyLearner(actor, None, PolicyObjective(config.algorithm), config, phases, models)
    learner = SftLearner(policy, phases, models)
    train_step = actor.train_step

    def observed(micro_batches: Any, loss_fn: Any, **options: Any) -> Any:
        actor.accumulate_gradients(micro_batches, loss_fn, options["temperature"])
        errors["gradient"] = gradient_error(actor, want.gradients)
        return train_step(micro_batches, loss_fn, **options)

    actor.train_step = observed  # type: ignore[method-assign]
    _, result = learner.learn(samples, 0, config.mismatch_gate)
    errors["loss"] = abs(result.metrics["actor/loss"] - want.loss) / want.loss
    errors["tokens"] = abs(result.metrics["actor/trained_tokens"] - sum(response for _, response in LENGTHS))
    errors["steps"] = abs(result.num_optimizer_steps - 1)
    return largest_over_ranks(errors)


def steps(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: `step` of each case (model, aggregation, layout)."""
    directory, found = arguments["directory"], []
    for name, aggregation, layout in arguments["cases"]:
        want = read(directory, name, aggregation)
        found.append(step(want, config_of(directory, aggregation), ParallelLayout(dist.get_world_size(), **layout)))
    return found


ALL = [("qwen2", "sample_mean", layout) for layout in LAYOUTS[:2]]
ALL += [(name, "token_mean", layout) for name in MODELS for layout in LAYOUTS]
QUICK = [ALL[1], *ALL[-3:]]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.long)], ids=["quick", "all"])
def test_a_step_has_the_loss_and_gradients_of_transformers(cases: list[tuple[str, str, Any]], tmp_path: Path) -> None:
    write_references(tmp_path)
    arguments = {"directory": str(tmp_path), "cases": cases}
    results = run_distributed(target_in(__file__, "steps"), 4, arguments)
    for case, errors in zip(cases, results, strict=True):
        assert errors["loss"] < 1e-6 and errors["gradient"] < 1e-5, (case, errors)
        assert errors["tokens"] == errors["steps"] == 0, (case, errors)
