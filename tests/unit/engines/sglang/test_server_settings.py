"""Settings of a server: refused values, the command line, and the inherited environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server_settings import Meeting, ServerSettings, command, environment


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., ServerSettings]:
    """settings(**fields)."""

    def make(**fields: Any) -> ServerSettings:
        known = {"python": tmp_path / "python", "model_path": tmp_path, "log_dir": tmp_path}
        return ServerSettings(**{**known, "key_file": create_key(tmp_path), **fields})

    return make


def test_the_key_is_not_in_the_command(settings: Any, tmp_path: Path) -> None:
    some = settings(tensor_parallel=2, seeded=True, random_weights=True)
    line = command(some, 1, 2, tmp_path)
    assert read_key(some.key_file) not in " ".join(line)
    assert {"--enable-deterministic-inference", "--skip-tokenizer-init"} <= set(line)
    assert line[line.index("--load-format") + 1] == "dummy" and line[line.index("--tp-size") + 1] == "2"


def test_kernels_on_a_gpu_are_those_of_the_configuration(settings: Any, tmp_path: Path) -> None:
    named = {"attention_backend": "fa3", "sampling_backend": "flashinfer", "prefill_cuda_graph": False}
    line = command(settings(device="cuda", **named), 1, 2, tmp_path)
    assert line[line.index("--attention-backend") + 1] == "fa3"
    assert line[line.index("--sampling-backend") + 1] == "flashinfer"
    assert "--disable-prefill-cuda-graph" in line
    default = command(settings(device="cuda"), 1, 2, tmp_path)
    assert not {"--attention-backend", "--sampling-backend", "--disable-prefill-cuda-graph"} & set(default)
    # A CPU has one of each.
    assert command(settings(**named), 1, 2, tmp_path) == command(settings(), 1, 2, tmp_path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_idle_servers_neither_spin_nor_end_themselves(settings: Any, tmp_path: Path, device: str) -> None:
    some = settings(device=device)
    assert "--sleep-on-idle" in command(some, 1, 2, tmp_path)
    assert environment(some, tmp_path, {})["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] == "false"


def test_a_restarted_server_has_another_seed_and_no_larger_cache(settings: Any, tmp_path: Path) -> None:
    def value(name: str, **fields: Any) -> str:
        line = command(settings(device="cuda", **fields), 1, 2, tmp_path)
        return line[line.index(name) + 1] if name in line else ""

    # 64 servers, each restarted up to 8 times.
    seeds = {value("--random-seed", random_seed=7 + i, num_restarts=n) for i in range(64) for n in range(9)}
    assert len(seeds) == 64 * 9 and all(0 <= int(seed) < 1 << 31 for seed in seeds)
    assert value("--random-seed", random_seed=(1 << 31) - 1, num_restarts=1) == str((1 << 16) - 1)
    assert value("--max-total-tokens") == "" and value("--max-total-tokens", replaced_cache_tokens=500) == "500"
    assert value("--max-total-tokens", replaced_cache_tokens=500, max_total_tokens=400) == "400"


def test_fp8_is_requested_regardless_of_the_directory(settings: Any, tmp_path: Path) -> None:
    assert "--json-model-override-args" not in command(settings(), 1, 2, tmp_path)
    line = command(settings(quantization="fp8"), 1, 2, tmp_path)
    override = json.loads(line[line.index("--json-model-override-args") + 1])
    assert override["quantization_config"]["quant_method"] == "fp8"
    assert override["quantization_config"]["weight_block_size"] == [128, 128]
    with pytest.raises(ValueError, match="16 bits, not float32"):
        settings(quantization="fp8", device="cuda", dtype="float32")


def test_the_launchers_variables_do_not_reach_the_engine(settings: Any, tmp_path: Path) -> None:
    inherited = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
        "PYTHONHOME": "/x", "VIRTUAL_ENV": "/v", "PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/cuda",
    }  # fmt: skip
    found = environment(settings(tensor_parallel=2), tmp_path, inherited)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "VIRTUAL_ENV"} & set(found)
    assert "PYTHONHOME" not in found and found["PATH"] == "/bin" and found["LD_LIBRARY_PATH"] == "/cuda"
    assert len(found["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2 and found["OMP_NUM_THREADS"] == "1"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"


def test_only_known_variables_and_those_named_reach_the_engine(settings: Any, tmp_path: Path) -> None:
    secrets = dict.fromkeys(
        """AWS_SECRET_ACCESS_KEY AWS_PROFILE HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY GITHUB_TOKEN SLURM_JWT
        SSH_AUTH_SOCK KUBECONFIG http_proxy HTTPS_PROXY SGLANG_API_KEY MY_PATH HF_HUB_CACHE_TOKEN""".split(),
        "secret",
    )
    needed = dict.fromkeys(
        """PATH HOME LC_ALL LD_LIBRARY_PATH CUDA_HOME CUDA_CACHE_PATH NVIDIA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME NCCL_IB_HCA
        GLOO_SOCKET_IFNAME UCX_NET_DEVICES FI_PROVIDER TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_CUDA_ARCH_LIST CC
        XDG_CACHE_HOME MEGATRON_DAPO_SGLANG_DIR MEGATRON_DAPO_SGLANG_PYTHON""".split(),
        "needed",
    )
    found = environment(settings(device="cuda", host="10.0.0.1"), tmp_path, {**secrets, **needed})
    assert "secret" not in found.values() and needed.items() <= found.items()
    found = environment(settings(more_environment=("WANDB_API_KEY", "NOT_SET")), tmp_path, secrets)
    assert [name for name, value in found.items() if value == "secret"] == ["WANDB_API_KEY"]


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [({}, "2,3"), ({"CUDA_VISIBLE_DEVICES": "4, 5,6,7"}, "6,7"), ({"CUDA_VISIBLE_DEVICES": "GPU-a,b,c,d"}, "c,d")],
)
def test_gpus_are_counted_among_those_that_the_run_may_use(settings: Any, tmp_path: Path, inherited, expected) -> None:
    found = environment(settings(device="cuda", tensor_parallel=2, gpus=(2, 3)), tmp_path, inherited)
    assert found["CUDA_VISIBLE_DEVICES"] == expected


def test_gpus_beyond_those_that_the_run_may_use(settings: Any, tmp_path: Path) -> None:
    one = settings(device="cuda", gpus=(1,))
    with pytest.raises(ValueError, match=r"on GPU 1, but this process sees 1 \(CUDA_VISIBLE_DEVICES=5\)"):
        environment(one, tmp_path, {"CUDA_VISIBLE_DEVICES": "5"})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_trainers_allocator_is_its_own(settings: Any, tmp_path: Path, name: str) -> None:
    """SGLang's memory saver ends a process with expandable segments, which trainers are often started with."""
    assert name not in environment(settings(), tmp_path, {name: "expandable_segments:True"})


def test_the_parts_of_a_server_over_nodes_meet_at_the_first_ones_ports(settings: Any, tmp_path: Path) -> None:
    part = settings(tensor_parallel=4, num_nodes=2, node_rank=1, host="0.0.0.0", advertised_host="10.0.0.2")
    line = command(part, 1, 2, tmp_path, Meeting("10.0.0.1", 7, 8))
    options = dict(zip(line, line[1:]))
    wanted = {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:7", "--lifeline-port": "8", "--tp-size": "4"}
    assert {name: options[name] for name in wanted} == wanted
    assert environment(part, tmp_path, {})["SGLANG_HOST_IP"] == "10.0.0.2"
    alone = settings()
    assert not {"--nnodes", "--lifeline-port"} & set(command(alone, 1, 2, tmp_path))
    assert "SGLANG_HOST_IP" not in environment(alone, tmp_path, {})


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_a_meeting_is_read_as_it_is_written(host: str) -> None:
    meeting = Meeting(host, 20001, 20002)
    assert Meeting.parse(str(meeting)) == meeting
    assert meeting.init_address.rpartition(":")[0].strip("[]") == host


def test_a_server_on_a_cpu_does_not_draft(settings: Any) -> None:
    with pytest.raises(ValueError, match='verifies drafts greedily and would not sample: set sglang.drafting = "off"'):
        settings(draft_tokens=8)


def test_servers_that_draft_have_a_tokenizer_and_room_for_two_corpora(settings: Any, tmp_path: Path) -> None:
    line = command(settings(device="cuda", draft_tokens=9, draft_corpus_tokens=100), 1, 2, tmp_path)
    options = dict(zip(line, line[1:]))
    assert options["--speculative-algorithm"] == "NGRAM" and options["--speculative-num-draft-tokens"] == "9"
    assert options["--speculative-ngram-external-sam-budget"] == "4", "at most draft tokens less one"
    assert int(options["--speculative-ngram-external-corpus-max-tokens"]) >= 200
    assert options["--tokenizer-path"] == str(tmp_path / "tokenizer") and "--skip-tokenizer-init" not in line
    plain = command(settings(device="cuda"), 1, 2, tmp_path)
    assert "--skip-tokenizer-init" in plain and not [word for word in plain if "speculative" in word]
