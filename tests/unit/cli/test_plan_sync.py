"""`megatron-dapo plan sync` from a recipe whose model is only a config.json."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app

# Every number is chosen so that the figures below can be written by hand: no bias, no padding.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
NORMS = (4 * 2 + 1) * 64
MATRICES = 2 * 1024 * 64 + 4 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 128 * 64)


@pytest.fixture
def planned(recipe):
    """planned(arguments...) -> (exit code, JSON or text)."""

    def run(*arguments: str, as_json: bool = True, sizes: dict[str, int] | None = None):
        (recipe.parent / "model" / "config.json").write_text(json.dumps({**CONFIG, **(sizes or {})}))
        result = CliRunner().invoke(app, ["plan", "sync", str(recipe), *arguments, *(["--json"] if as_json else [])])
        if result.exit_code:
            return result.exit_code, result.stderr
        return 0, json.loads(result.stdout) if as_json else result.stdout

    return run


def test_same_cut_on_both_sides_moves_nothing_but_heads_and_gate_up(planned):
    """TP2 to TP2 on the same ranks: every rank has its own shard already."""
    code, figures = planned("--layout", "tp2", "--engine-tp", "2", "--set", "model.dtype=bfloat16")
    assert code == 0 and figures["sent"]["max"] == figures["messages"] == 0 and "network" not in figures["seconds"]
    assert figures["model_bytes"] == 2 * (MATRICES + NORMS)
    assert figures["shard_bytes"]["max"] == figures["local"]["min"] == 2 * (MATRICES // 2 + NORMS)
    assert figures["bytes_ratio"] == 1.0


def test_engines_apart_receive_just_their_shards(planned):
    code, figures = planned(
        "--layout", "tp2pp2", "--world-size", "16", "--engine-tp", "4", "--engines", "2", "--set", "sglang.weight_sync_transport=p2p",
        "--set", "sglang.placement=disaggregated", "--set", "model.dtype=float32",
    )  # fmt: skip
    assert code == 0
    shard = 4 * (MATRICES // 4 + NORMS)
    assert figures["shard_bytes"] == figures["received"] == {"min": shard, "mean": shard, "max": shard}
    assert (figures["trainer_ranks"], figures["engine_ranks"], figures["bytes_ratio"]) == (16, 8, 1.0)
    assert figures["sent_between_nodes"] == 8 * shard and figures["local"]["max"] == 0
    assert figures["sent"]["mean"] == 8 * shard / 16
    assert figures["seconds"]["network"] == pytest.approx(shard / (50e9 * 0.8)), "80 % of an H100's 400 Gbit/s"
    assert len(bytes.fromhex(figures["digest"])) == 32


def test_sixteen_thousand_ranks(planned):
    code, figures = planned("--layout", "tp8pp4", "--world-size", "16384", "--engine-tp", "8")
    assert code == 0 and figures["engine_ranks"] == 16384 and figures["bytes_ratio"] <= 1.0
    assert figures["sent"]["mean"] == figures["received"]["mean"] > 0


def test_fp8_halves_the_bytes_of_linear_layers(planned):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 8, "head_dim": 32}
    settings = ["--layout", "tp4", "--engine-tp", "2", "--set", "model.dtype=bfloat16"]
    fp8 = ["--set", "rollout.engine=sglang", "--set", "sglang.quantization=fp8"]
    fp8 += ["--set", "algorithm.off_policy.correction=tis"]
    _, plain = planned(*settings, sizes=sizes)
    code, figures = planned(*settings, *fp8, sizes=sizes)
    linear, blocks = 4 * (4 * 256 * 256 + 3 * 512 * 256), 4 * (4 * 4 + 3 * 8)
    assert code == 0 and figures["quantization"] == "fp8"
    assert plain["model_bytes"] - figures["model_bytes"] == linear - 4 * blocks
    assert plain["shard_bytes"]["max"] - figures["shard_bytes"]["max"] == (linear - 4 * blocks) // 2
    assert figures["bytes_ratio"] == 1.0
    code, text = planned(*settings[:3], "4", *fp8, sizes=sizes)
    assert code == 2 and "must begin at a multiple of 128" in text and "sglang.tp_size" in text


def test_text_for_a_person(planned):
    code, text = planned("--layout", "tp4", "--engine-tp", "1", as_json=False)
    assert code == 0 and "trainer: TP4 PP1 CP1 DP1, 4 ranks; engines: TP1 EP1 x 4 on cuda" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--engine-tp", "3", "--engines", "1", "--layout", "tp4"), "engine tensor parallel size 3"),
        (("--engine-tp", "8", "--layout", "tp2"), "an engine of 8 ranks does not fit 2 trainer ranks"),
        (("--engines", "3", "--layout", "tp2"), "3 engines of 1 ranks share the devices of 2 trainer ranks"),
        (("--layout", "tp16"), "does not divide num_attention_heads 8"),
        (("--gpu", "V100"), "--gpu V100: not known"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(planned, arguments, message):
    code, text = planned(*arguments)
    assert code == 2 and message in text
