"""A run whose mini-batches train while the rest of the batch is generated, by a server on the trainer's GPU.

    python benchmarks/gpu/streamed.py --engine-python PATH [--json] [--save] [--only streamed]

Each case is a run of `megatron-dapo train` of the smoke recipe's model, of random weights, in bf16, with a server that this program
starts next to it and that gets each version from a directory. One GPU works for both sides, so `vs_alternating` says what overlap
gives beyond the device's own time-slicing.

    alternating   a batch is generated, then trained
    streamed      `training.stream = "mini_batches"` with max_staleness 1, in order of start
    guarded       the same with rollout.order = "guarded"

`step`, `wait` (of the trainer for responses) and `sync` are means of seconds over the steps after the first two; `mismatch` is the mean
|log-prob difference| of server and trainer, `stale` the most versions that a trained token was behind.

How it runs and what a result holds: `program.py`. `--tiny` checks the program on any machine; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import program
from program import Benchmark, Missing, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT))
from overlap import GUARDED, OVERLAP, REWARD, STREAM, rows_of

from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import EngineStartError, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from tools import make_smoke_model

PACKAGES = ("torch", "sglang", "megatron-core", "transformer_engine")
AHEAD = (*OVERLAP, "rollout.max_staleness=1", "rollout.oversample=2.0")
CASES: Mapping[str, tuple[str, ...]] = {
    "alternating": (),
    "streamed": (*AHEAD, *STREAM),
    "guarded": (*AHEAD, *STREAM, *GUARDED),
}
WARM = 2  # first steps that are not counted
START_MARGIN_S = 60.0
SMALL = {"steps": 12, "prompts": 32, "group": 8, "tokens": 512, "micro": 16384}
TINY = {"steps": 4, "prompts": 4, "group": 2, "tokens": 48, "micro": 2048}


def settings_of(size: Mapping[str, int], model: Path, reward: Path, server: SglangServer, key: Path, case: str) -> list[str]:
    """Return the settings of a run, as arguments of --set."""
    return [
        f'model.path="{model}"',
        'precision.recipe=""',
        "precision.num_layers_at_end_in_bf16=0",
        f'reward.verifier="{reward}:reward"',
        "reward.overlong_punishment.enabled=false",
        "data.eval_paths=[]",
        "evaluation.interval=0",
        "evaluation.at_end=false",
        "checkpoint.interval=0",
        "checkpoint.export_huggingface=false",
        f"run.total_steps={size['steps']}",
        f"sglang.urls=['{server.url}']",
        f'sglang.api_key_file="{key}"',
        'sglang.placement="disaggregated"',
        'sglang.weight_sync_transport="disk"',
        "sglang.enable_deterministic_inference=false",
        f"sglang.max_running_requests={size['prompts'] * size['group']}",
        f"rollout.prompts_per_step={size['prompts']}",
        f"rollout.group_size={size['group']}",
        f"rollout.max_response_tokens={size['tokens']}",
        f"training.mini_batch_prompts={size['prompts'] // 4}",
        f"training.micro_batch_tokens={size['micro']}",
        "training.shuffle=false",
        "optimizer.learning_rate=1e-7",
        'algorithm.off_policy.correction="none"',
        "telemetry.progress=false",
        *CASES[case],
    ]


def train(case: str, size: Mapping[str, int], model: Path, server: SglangServer, key: Path, directory: Path) -> Row:
    """Train a run and return the means of its counted steps."""
    reward = directory / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    settings = settings_of(size, model, reward, server, key, case)
    recipe = ROOT / "examples" / "gpu" / "smoke.toml"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(recipe)]
    command += ["--output-dir", str(directory / case), *(part for one in settings for part in ("--set", one))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = rows_of(directory / case)
    if done.returncode or len(rows) < size["steps"]:
        raise RuntimeError(f"the run ended with code {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    counted = rows[WARM:]
    mean = lambda name: fmean(row[name] for row in counted)  # noqa: E731
    return {
        "step": mean("time/step"),
        "wait": mean("time/generate"),
        "sync": mean("time/weight_sync"),
        "tokens": mean("throughput/generated_tokens"),
        "mismatch": max(row["mismatch/abs_logprob_diff_mean"] for row in rows),
        "stale": max(row["rollout/token_staleness_max"] for row in rows),
        "trainer_idle": mean("async/trainer_idle"),
        "engine_idle": mean("async/engine_idle"),
    }


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    if arguments.engine_python is None:
        raise Missing("--engine-python names no interpreter with SGLang")
    size = TINY if arguments.tiny else SMALL
    with tempfile.TemporaryDirectory(prefix="gpu-streamed-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        model = directory / "model"
        make_smoke_model.write(model, "tiny" if arguments.tiny else "small")
        key = create_key(directory)
        settings = ServerSettings(
            python=arguments.engine_python,
            model_path=model,
            key_file=key,
            log_dir=directory,
            device="cuda" if program.HAS_GPU else "cpu",
            dtype="bfloat16",
            attention_backend=arguments.attention,
            sampling_backend=arguments.sampling,
            prefill_cuda_graph=False,
            max_running_requests=2 * size["prompts"] * size["group"],
            memory_fraction=0.25 if program.HAS_GPU else None,
            start_timeout_s=max(60.0, arguments.case_s - START_MARGIN_S),
        )
        server = SglangServer.start(settings)
        stack.callback(server.stop)
        try:
            server.wait_until_healthy()
        except EngineStartError as error:
            raise Missing(f"the SGLang server did not start: {error}") from None
        found: dict[str, Row] = {}

        def measure_case(case: str) -> Row:
            found[case] = train(case, size, model, server, key, directory)
            if "alternating" in found:
                found[case]["vs_alternating"] = found[case]["step"] / found["alternating"]["step"]
            return found[case]

        yield measure_case


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=300.0)
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.add_argument("--attention", default="triton", help="the server's attention_backend")
    parser.add_argument("--sampling", default="pytorch", help="the server's sampling_backend")
    return parser.parse_args(arguments)


STREAMED = Benchmark("gpu_streamed", __file__, PACKAGES, lambda arguments: list(CASES), measuring)

if __name__ == "__main__":
    program.run(STREAMED, parse())
