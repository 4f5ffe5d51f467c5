"""Episodes with a tool on one SGLang server on a GPU, and weight updates in the middle.

    python benchmarks/gpu/agents.py --engine-python PATH [--json] [--save] [--attention fa3]

256 episodes of six turns; a tool takes 200 ms in the median. The model has random weights, and the quickstart's tokenizer. What is
measured: `engine_busy`, the share of the time with a turn that is ready in which the server's scheduler runs or waits for a core
(on a GPU it waits for the device that way); `cached_share` of the contexts from the second turn on; the same play with three
updates, which empty the cache and name the next version: `lost` episodes, and turns that were sampled by several versions;
`mismatch`, mean |log-prob difference| between the tokens as they were sampled after cached contexts and the whole streams read
again by the server, and `mismatch_single`, that of responses of one turn.

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import program
import step
from program import Benchmark, Missing, Row
from rollout import MEMORY_FRACTION
from sync import MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import served_episodes
from served_episodes import BEGIN, Served, ServedSize

from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

PACKAGES = ("torch", "sglang")
NUM_COMPARED = 32  # streams of each kind
SIZE = replace(
    served_episodes.FULL, episodes=256, turns=6, begin=8 * BEGIN, turn_tokens=128, context=2048, updates=3, in_flight=256
)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_model(directory: Path, config: dict[str, object]) -> Path:
    """Write a model without weights that has the quickstart's tokenizer."""
    directory.mkdir()
    tiny = json.loads((served_episodes.TINY.model / "config.json").read_text(encoding="utf-8"))
    full = {**step.QWEN, **config, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": tiny["eos_token_id"]}
    (directory / "config.json").write_text(json.dumps(full), encoding="utf-8")
    for name in _TOKENIZER:
        shutil.copy(served_episodes.TINY.model / name, directory)
    return directory


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    if arguments.engine_python is None:
        raise Missing("--engine-python names no interpreter with SGLang")
    with tempfile.TemporaryDirectory(prefix="gpu-agents-") as temporary:
        if arguments.tiny:
            size, fields = served_episodes.TINY, {}
        else:
            size = replace(SIZE, model=write_model(Path(temporary) / "model", dict(MODELS["1.5b"])))
            fields = {"random_weights": True, "prefill_cuda_graph": False, "attention_backend": arguments.attention}
            fields |= {"device": "cuda", "sampling_backend": "pytorch", "memory_fraction": MEMORY_FRACTION}
        with served_episodes.served(size, arguments.engine_python, **fields) as one:
            yield lambda _: figures(size, one)


def figures(size: ServedSize, one: Served) -> Row:
    """Play without and with updates, and compare log-probs."""
    played: list[Completion] = []
    row: Row = {**served_episodes.play_turns(size, one, kept=played)}
    row["cached_share"] = one.client.cached_share()
    row["mismatch"] = mismatch(one, played)
    single = sampled_once(size, one)
    row["mismatch_single"] = mismatch(one, single)
    updated: list[Completion] = []
    served_episodes.play_turns(size, one, size.updates, updated)
    row["cached_share_with_updates"] = one.client.cached_share()
    row["updates"] = one.engine.policy_version
    row["lost"] = size.episodes - sum(done.episode is not None and done.episode.end == "done" for done in updated)
    row["episodes_over_updates"] = sum(len({part.version for part in done.versions}) > 1 for done in updated)
    return row


def sampled_once(size: ServedSize, one: Served) -> list[Completion]:
    """Return responses of one turn that have as many tokens as an episode has."""
    prompt_ids = one.turns.begin([{"role": "user", "content": size.begin}])
    sampling = SamplingParams(max_new_tokens=size.turns * size.turn_tokens)
    one.engine.submit([GenerationRequest(f"single/{index}", prompt_ids, sampling, index) for index in range(NUM_COMPARED)])
    return [replace(done, prompt_ids=prompt_ids) for done in served_episodes.drain(one.engine)]


def mismatch(one: Served, completions: Sequence[Completion]) -> float:
    """Return the mean |log-prob difference| of sampled tokens between the completions and their streams, read again."""
    one.client.flush_cache()
    differences = []
    for done in completions[:NUM_COMPARED]:
        assert done.prompt_ids is not None, f"{done.request_id} has no prompt"
        read = np.array(one.client.prompt_logprobs([*done.prompt_ids, *done.token_ids.tolist()]))[len(done.prompt_ids) - 1 :]
        turns = done.episode.turns if done.episode is not None else ()
        places = [range(turn.start, turn.end) for turn in turns] or [range(done.num_tokens)]
        sampled = [place for turn in places for place in turn]
        differences.append(np.abs(read - done.logprobs)[sampled])
    return float(np.concatenate(differences).mean())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=300.0)
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.add_argument("--attention", default="fa3", help="the server's attention_backend")
    return parser.parse_args(arguments)


AGENTS = Benchmark("gpu_agents", __file__, PACKAGES, lambda arguments: ["episodes"], measuring)

if __name__ == "__main__":
    program.run(AGENTS, parse())
