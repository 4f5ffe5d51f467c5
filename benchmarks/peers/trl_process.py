"""TRL as a peer: the specification of its program from one of our recipes, and the program as a subprocess."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.packages import with_packages
from transformers import AutoTokenizer

from megatron_dapo.config.schema import Config
from megatron_dapo.files.linux import signal_at_parents_death

PROGRAM = Path(__file__).resolve().with_name("trl_dapo.py")

Settings = dict[str, Any]


def peer_specification(
    config: Config, directory: Path, settings: Settings, cores: int = 2, device: str = "cpu", **limits: Any
) -> dict[str, Any]:
    """Return the specification for `trl_dapo.py`: the recipe's values, TRL's settings and the limits of the run.

    `settings`: "processes", which share `cores`, "rows_per_pass", and settings of GRPOConfig.
    """
    rollout, algorithm, optimizer, reward = config.rollout, config.algorithm, config.optimizer, config.reward
    if optimizer.schedule != "constant" or reward.verifier != "dapo" or algorithm.loss.aggregation != "token_mean":
        raise ValueError(
            "the peer knows a constant learning rate, the dapo verifier and token_mean; the recipe differs"
        )
    overlong = reward.overlong_punishment
    return {
        "model": str(config.model.path),
        "train_paths": [str(path) for path in config.data.train_paths],
        "eval_paths": [str(path) for path in config.data.eval_paths],
        "stop_ids": [AutoTokenizer.from_pretrained(str(config.model.path)).eos_token_id],
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "prompts_per_step": rollout.prompts_per_step,
        "group_size": rollout.group_size,
        "max_response_tokens": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "optimizer_steps_per_batch": rollout.prompts_per_step // config.training.mini_batch_prompts,
        "clip_ratio_low": algorithm.loss.clip_ratio_low,
        "clip_ratio_high": algorithm.loss.clip_ratio_high,
        "dual_clip": 0.0 if algorithm.loss.dual_clip == "off" else algorithm.loss.dual_clip,
        "optimizer": {
            "learning_rate": optimizer.learning_rate,
            "warmup_steps": optimizer.warmup_steps,
            "weight_decay": optimizer.weight_decay,
            "betas": list(optimizer.betas),
            "epsilon": optimizer.epsilon,
            "clip_grad": optimizer.clip_grad,
        },
        "reward": {
            "correct": reward.correct,
            "incorrect": reward.incorrect,
            "overlong": overlong.model_dump() if overlong.enabled else None,
        },
        "evaluation": {
            "num_samples": config.evaluation.num_samples,
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "top_k": config.evaluation.top_k,
            "max_response_tokens": config.evaluation_response_tokens,
        },
        "seed": config.run.seed,
        "threads": max(1, cores // settings["processes"]),
        "device": device,
        # TRL's own way of training in bfloat16: the weights stay in float32.
        "bf16": device == "cuda" and config.model.dtype == "bfloat16",
        "settings": {name: value for name, value in settings.items() if name != "processes"},
        "report_path": str(directory / "report.json"),
        "output_dir": str(directory / "output"),
        **limits,
    }


def run_trl(packages: Path | None, specification: Mapping[str, Any], directory: Path, processes: int) -> dict[str, Any]:
    """Run TRL from `packages` (None: from this environment) and return its report.

    Raises RuntimeError with the end of its output if it fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "specification.json"
    file.write_text(json.dumps(specification), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    environment = {"OMP_NUM_THREADS": str(specification["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = with_packages(*filter(None, [packages]))
    run_logged([sys.executable, "-W", "ignore", *launcher, str(PROGRAM), str(file)], environment, directory / "log.txt")
    return json.loads(Path(specification["report_path"]).read_text(encoding="utf-8"))


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run a command to its end, its output in `log`; this process's PYTHONPATH comes after that of `environment`.

    Raises RuntimeError with the end of the output if it fails.
    """
    # Each side chooses its own number of threads: TRL through `threads`, ours one a process.
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    places = filter(None, [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
    with open(log, "w", encoding="utf-8") as stream:
        code = subprocess.run(
            command,
            env={**inherited, **environment, "PYTHONPATH": os.pathsep.join(places)},
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
            preexec_fn=signal_at_parents_death(signal.SIGTERM),
        ).returncode
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{command[0]} ended with code {code}; its last output:\n{tail}")
