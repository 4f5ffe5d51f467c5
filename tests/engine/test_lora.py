"""LoRA with real servers: adapters in SGLang's own format next to the weights, and merged weights in the same server's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_runs import ROOT, finish

RECIPE = ROOT / "examples" / "quickstart" / "quickstart.toml"
SMALL = ("run.total_steps=3", "rollout.prompts_per_step=6", "training.mini_batch_prompts=6", "rollout.group_size=4")
LORA = ("model.lora.rank=8", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0", "sglang.parity_interval=1")
SYNCS = {
    "adapters": ('model.lora.sync="adapters"', 'sglang.placement="disaggregated"'),
    "merged": ('model.lora.sync="merged"',),
}


@pytest.mark.long  # tests/unit/bridge/transports/test_adapters.py has a stand-in; tests/distributed/test_lora.py trains adapters
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sync", ["merged", "adapters"])
def test_servers_generate_with_the_adapters_of_each_step(engine_python: Path, tmp_path: Path, sync: str) -> None:
    """Parity has a gate at every weight sync: 1e-4 nats between both sides, after steps that change log-probs by far more."""
    run = tmp_path / "run"
    finish(RECIPE, run, engine_python, *SMALL, *LORA, *SYNCS[sync])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(row["mismatch/abs_logprob_diff_mean"] < 1e-4 for row in rows), rows
    log = "".join(path.read_text(errors="replace") for path in (run / "engines").glob("*.log"))
    checks = log.count("adapter sync OK")
    assert checks == (4 if sync == "adapters" else 0), log[-2000:]  # one before training, and one after each step
