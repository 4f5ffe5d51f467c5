"""What a weight sync costs the responses under way: abort, retract and in_place, on an SGLang server on a CPU.

    python benchmarks/update_pause.py --engine-python .venv-sglang-0.5.23/bin/python [--json] [--tiny] [--model DIRECTORY]
        [--rounds 1] [--prompts 4] [--prompt-tokens 192] [--response-tokens 48]

One server. Each round submits the same prompts, two responses each of a fixed length, and brings the same weights as two
new versions through the weight sync of a run when a third and two thirds of the seconds of an undisturbed round have
passed. With abort the driver does what a run's collector does: unfinished responses come back and are sent again. The
modes take turns, after a round that does not count and one without a weight sync.

    again_tokens   tokens that the server read in prefill beyond those of the undisturbed round, a weight sync
    lost_seconds   seconds of the round beyond the undisturbed one, a weight sync; sync_seconds of them are the sync itself

The counts come from the server's log. Other programs on the machine change the seconds, not the tokens.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import options
from safetensors.torch import load_file

from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.types import GenerationRequest, SamplingParams
from tools.version_proof.one_trainer import OneTrainer
from tools.version_proof.telling_model import write_model

GROUP_SIZE = 2
_PREFILL = re.compile(r"#new-token: (\d+)")


@dataclass(frozen=True)
class Sizes:
    """Traffic of a round."""

    prompts: int
    prompt_tokens: int
    response_tokens: int
    syncs: int = 2


class Bench:
    """A server that has been given weights, and rounds of requests to it."""

    def __init__(self, trainer: OneTrainer, weights: dict[str, Any], sizes: Sizes) -> None:
        self._trainer, self._sizes = trainer, sizes
        self._version, self._round, self._num_read = 0, 0, 0
        trainer.hold(weights)
        trainer.engines.publish(0)

    def round(self, mode: UpdatePause, pace_s: float | None) -> dict[str, float]:
        """Play a round with a weight sync each `pace_s` seconds; None: without any."""
        self._trainer.set_update_pause(mode)
        engines, sizes = self._trainer.engines, self._sizes
        self._round += 1
        sampling = SamplingParams(max_new_tokens=sizes.response_tokens)
        waiting = {
            f"{self._round}/{prompt}/{index}": GenerationRequest(
                f"{self._round}/{prompt}/{index}", self._prompt(prompt), sampling, seed=index
            )
            for prompt in range(sizes.prompts)
            for index in range(GROUP_SIZE)
        }
        read_before = self._read_tokens()
        num_syncs, sync_s, start = 0, 0.0, time.perf_counter()
        engines.submit(list(waiting.values()))
        while waiting:
            for done in engines.poll():
                del waiting[done.request_id]
            is_due = pace_s is not None and time.perf_counter() - start > pace_s * (num_syncs + 1)
            if is_due and num_syncs < sizes.syncs and waiting:
                sync_s += self._sync(mode, waiting)
                num_syncs += 1
        return {
            "seconds": time.perf_counter() - start,
            "read": self._read_tokens() - read_before,
            "syncs": num_syncs,
            "sync": sync_s,
        }

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Return a prompt that no earlier round had, nor any other of this round."""
        return tuple((self._round * 31 + number * 7 + place * 3) % 90 + 5 for place in range(self._sizes.prompt_tokens))

    def _sync(self, mode: UpdatePause, waiting: dict[str, GenerationRequest]) -> float:
        engines, held = self._trainer.engines, []
        if mode == "abort":
            held = engines.abort()
        start = time.perf_counter()
        self._version += 1
        engines.publish(self._version)
        seconds = time.perf_counter() - start
        for done in held:
            if done.finish_reason == "abort":
                engines.submit([replace(waiting[done.request_id], prefix=done if done.num_tokens else None)])
            else:
                del waiting[done.request_id]
        return seconds

    def _read_tokens(self) -> int:
        """Return how many tokens the server has read in prefill, by its log."""
        server = self._trainer.server
        assert server is not None, "it was started"
        return sum(map(int, _PREFILL.findall(server.log.read_text(encoding="utf-8", errors="replace"))))


def measure(python: Path, model: Path, dtype: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Return the costs of each mode."""
    modes: tuple[UpdatePause, ...] = get_args(UpdatePause)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = ServerSettings(
            python=python,
            model_path=model,
            key_file=create_key(directory),
            log_dir=directory,
            dtype=dtype,
            max_running_requests=sizes.prompts * GROUP_SIZE,
            max_total_tokens=8 * sizes.prompts * GROUP_SIZE * (sizes.prompt_tokens + sizes.response_tokens),
            random_weights=True,
            update_pause="in_place",  # the server must bear every mode
            start_timeout_s=600.0,
        )
        bench = Bench(OneTrainer(settings, "abort", stack), load_file(model / "model.safetensors"), sizes)
        bench.round("abort", None)
        undisturbed_rows = [bench.round("abort", None)]
        pace = undisturbed_rows[0]["seconds"] / (sizes.syncs + 1)
        rows: dict[UpdatePause, list[dict[str, float]]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                rows[mode].append(bench.round(mode, pace))
            undisturbed_rows.append(bench.round("abort", None))
        undisturbed = {name: statistics.median(row[name] for row in undisturbed_rows) for name in ("seconds", "read")}
    return {
        "model": model.name,
        "responses": sizes.prompts * GROUP_SIZE,
        "prompt_tokens": sizes.prompt_tokens,
        "response_tokens": sizes.response_tokens,
        "undisturbed_seconds": undisturbed["seconds"],
        "modes": {mode: _costs(rows[mode], undisturbed) for mode in modes},
    }


def _costs(rows: list[dict[str, float]], undisturbed: dict[str, float]) -> dict[str, Any]:
    def a_sync(name: str, base: float) -> float:
        return statistics.median((row[name] - base) / max(1, row["syncs"]) for row in rows)

    return {
        "again_tokens": a_sync("read", undisturbed["read"]),
        "lost_seconds": a_sync("seconds", undisturbed["seconds"]),
        "sync_seconds": a_sync("sync", 0.0),
        "syncs": sum(row["syncs"] for row in rows),
    }


def main() -> None:
    parser = options.parser(__doc__, "the model of tools/prove_versions.py, 8 responses")
    parser.add_argument("--engine-python", type=Path, required=True, help="interpreter of SGLang's environment")
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2"), help="Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each mode")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a round, of two responses each")
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--response-tokens", type=int, default=48)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.tiny:
            model, dtype, sizes = write_model(Path(scratch, "telling")), "float32", Sizes(4, 24, 200)
        else:
            sizes = Sizes(arguments.prompts, arguments.prompt_tokens, arguments.response_tokens)
            model, dtype = arguments.model, "bfloat16"
        options.show(measure(arguments.engine_python.absolute(), model, dtype, sizes, arguments.rounds), arguments)


if __name__ == "__main__":
    main()
