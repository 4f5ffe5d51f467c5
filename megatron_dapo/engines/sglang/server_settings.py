"""Settings, command line and environment of an SGLang server, as pure functions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.config.rules import is_loopback
from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.engines.sglang.drafting import TOKENIZER, drafting_arguments

WEIGHT_LOADER = "megatron_dapo.bridge.protocol.weight_loader.load"
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# SGLang's names of element types -> ours.
DTYPE_NAMES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
Quantization = Literal["none", "fp8"]
# Overrides of fields in the checkpoint's config.json. Blocks do not divide the rows of beta and alpha in gated delta nets, which
# published FP8 checkpoints keep in bf16 as well.
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["in_proj_ba", "in_proj_b", "in_proj_a"],
}
_MODEL_OVERRIDES = {"none": None, "fp8": json.dumps({"quantization_config": _FP8})}
# Variables that servers get of this process's. Everything else stays out: secrets (AWS_*, HF_TOKEN, WANDB_API_KEY), proxies (the
# key must only go to the engine), Slurm's (they include credentials, and nothing in SGLang needs them), and what the launcher
# set for the trainer's processes (RANK, MASTER_ADDR, PYTHONPATH).
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CC|CXX"  # kernels compiled at first use
    r"|(?:CUDA|NVIDIA|NVCC|CUDNN|CUBLAS|NCCL|NVSHMEM|GLOO|UCX|FI|IBV|MLX5|RDMAV|OMP|MKL|KMP|OPENBLAS)_\w+"
    r"|(?:TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|FLASHINFER|DG|NUMBA)_\w+|XDG_CACHE_HOME|HF_HOME|HF_HUB_CACHE"
    r"|MEGATRON_DAPO_SGLANG_\w+"  # read by examples/gpu/engine_python.sh
)
# SGLang's memory saver refuses expandable segments, which trainers are often started with.
_TRAINERS_OWN = re.compile(r"PYTORCH_(?:CUDA_)?ALLOC_CONF")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SEEDS_BETWEEN_RESTARTS = 1 << 16  # more than servers, whose seeds follow each other


@dataclass(frozen=True)
class Meeting:
    """Address on its first node at which the ranks of a server meet, and the port that its other parts stay connected to."""

    host: str
    port: int
    lifeline_port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.lifeline_port}"

    @classmethod
    def parse(cls, text: str) -> Meeting:
        host, port, lifeline_port = text.rsplit(":", 2)
        return cls(host, int(port), int(lifeline_port))

    @property
    def init_address(self) -> str:
        """SGLang's --dist-init-addr."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ServerSettings:
    """One server, or a node's part of one. What may differ between the servers of a run is the cores or GPUs they get."""

    python: Path
    """Interpreter of the environment SGLang is installed in."""
    model_path: Path
    """Hugging Face checkpoint. Its weights are not read with `random_weights`."""
    key_file: Path
    log_dir: Path
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = 1
    dtype: str = "float32"
    host: str = "127.0.0.1"
    """Address to bind: loopback, that of one interface, or 0.0.0.0 with an advertised_host."""
    advertised_host: str = ""
    """Address at which the other nodes of the run reach the server; "": host."""
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """Tokens the KV cache holds; None: as many as fit into `memory_fraction` (a GPU), 65,536 (a CPU)."""
    context_length: int | None = None
    """Longest prompt + response; None: what the model's config.json allows."""
    memory_fraction: float | None = None
    """Share of the device's memory for weights and KV cache; None: SGLang's choice on a GPU, 0.3 on a CPU."""
    memory_saver: bool = False
    """Let weights and KV cache be released and resumed (engines that share a GPU with the trainer)."""
    attention_backend: str = ""
    """On a GPU; "": SGLang's choice. On a CPU it is torch_native."""
    sampling_backend: str = ""
    """On a GPU; "": SGLang's choice. On a CPU it is pytorch."""
    prefill_cuda_graph: bool = True
    """Capture CUDA graphs of prefill on a GPU."""
    seeded: bool = False
    """Tokens depend on the request's seed and not on what else runs in the batch (SGLang's deterministic mode)."""
    routing: bool = False
    """Answers can hold the experts that were chosen."""
    max_support: int = 0
    """Most ids that tokens will be drawn from and that answers must hold; 0: none are requested."""
    update_pause: UpdatePause = "abort"
    """What weight syncs will do with running requests."""
    cpu_overlap: bool = False
    """Launch a batch before the last one's tokens are known, as on a GPU. On a CPU it only costs time."""
    draft_tokens: int = 0
    """Tokens that a decoding step verifies of each response; 0: nothing is drafted."""
    draft_corpus_tokens: int = 0
    """Tokens of the corpus that drafts are looked up in."""
    quantization: Quantization = "none"
    """fp8: linear layers in e4m3 with a scale for every 128 x 128 values, whatever the checkpoint's config.json says."""
    random_weights: bool = False
    """Start with random weights instead of the checkpoint's: for engines that are filled by a first update."""
    random_seed: int = 0
    num_restarts: int = 0
    """Servers before this one in its place. Each draws other random numbers."""
    replaced_cache_tokens: int | None = None
    """Tokens that the cache of the first server in this place held: an upper bound if max_total_tokens is None."""
    start_timeout_s: float = 300.0
    gpus: tuple[int, ...] = ()
    """GPUs of this server here, one a rank, by their numbers in the process that starts it; empty: the first ones visible."""
    num_nodes: int = 1
    """Nodes over which its tensor ranks are spread."""
    node_rank: int = 0
    """Number of this node among them. The part on node 0 answers requests; the others only compute."""
    meeting: str = ""
    """Where the parts meet (`Meeting`), as the part on node 0 has chosen it; "" there."""
    more_arguments: tuple[str, ...] = ()
    """Further arguments for SGLang's server."""
    more_environment: tuple[str, ...] = ()
    """Names of variables that it gets in addition to the allow-list."""

    def __post_init__(self) -> None:
        if self.quantization != "none" and self.device == "cuda" and self.dtype in ("float32", "float"):
            raise ValueError("FP8 on a GPU takes activations of 16 bits, not float32: set model.dtype = bfloat16")
        if self.draft_tokens and self.device == "cpu":
            raise ValueError('on a CPU SGLang verifies drafts greedily and would not sample: set sglang.drafting = "off"')

    @property
    def url_host(self) -> str:
        """Host of the server's URL, the same on every node."""
        return self.advertised_host or self.host


def command(
    settings: ServerSettings, port: int, rendezvous_port: int, scratch: Path, meeting: Meeting | None = None
) -> list[str]:
    """The command line of a server, or of its part on this node. It holds no secret.

    meeting: of a server on several nodes.
    """
    arguments = {
        "api-key-file": settings.key_file.resolve(),
        "scratch": scratch,
        "model-path": settings.model_path.resolve(),
        "host": settings.host,
        "port": port,
        "nccl-port": rendezvous_port,
        "tp-size": settings.tensor_parallel,
        "dtype": settings.dtype,
        "device": settings.device,
        "max-running-requests": settings.max_running_requests,
        "max-total-tokens": settings.max_total_tokens or settings.replaced_cache_tokens,
        "context-length": settings.context_length,
        "mem-fraction-static": settings.memory_fraction,
        "random-seed": (settings.random_seed + _SEEDS_BETWEEN_RESTARTS * settings.num_restarts) % (1 << 31),
        "load-format": "dummy" if settings.random_weights else None,
        "custom-weight-loader": WEIGHT_LOADER,
        "grammar-backend": "none",
        "json-model-override-args": _MODEL_OVERRIDES[settings.quantization],
    }
    if meeting is not None:
        arguments |= {
            "lifeline-port": meeting.lifeline_port,
            "nnodes": settings.num_nodes,
            "node-rank": settings.node_rank,
            "dist-init-addr": meeting.init_address,
        }
    # Without sleep-on-idle a scheduler takes a whole core while it waits.
    # A shared expert that SGLang fuses into the routed ones would lie in their buffers.
    switches = ["skip-server-warmup", "sleep-on-idle", "disable-shared-experts-fusion"]
    if settings.draft_tokens:
        tokenizer = scratch / TOKENIZER
        arguments |= drafting_arguments(settings.draft_tokens, settings.draft_corpus_tokens, tokenizer)
    else:  # token ids in, token ids out
        switches.append("skip-tokenizer-init")
    if settings.seeded:
        switches.append("enable-deterministic-inference")
    if settings.routing:
        switches.append("enable-return-routed-experts")
    if settings.memory_saver:
        switches.append("enable-memory-saver")
    if settings.device == "cpu":
        arguments |= _cpu_arguments(settings)
        switches.append("disable-cuda-graph")
        if not settings.cpu_overlap:
            switches.append("disable-overlap-schedule")
    else:
        arguments["attention-backend"] = settings.attention_backend or None
        arguments["sampling-backend"] = settings.sampling_backend or None
        if not settings.prefill_cuda_graph:
            switches.append("disable-prefill-cuda-graph")
        if settings.update_pause == "in_place":
            # A batch launched before the pause would end after it and be labeled with the new weights.
            switches.append("disable-overlap-schedule")
    valued = [text for name, value in arguments.items() if value is not None for text in (f"--{name}", str(value))]
    return [
        str(settings.python), "-m", "megatron_dapo.engines.sglang.serve",
        *valued, *(f"--{name}" for name in switches), *settings.more_arguments,
    ]  # fmt: skip


def environment(settings: ServerSettings, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the server's processes."""
    kept = allowed_environment(inherited, settings.more_environment) | {
        "PYTHONPATH": str(_PACKAGE_ROOT),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # A server whose scheduler has crashed would hang for 65 s, to write dumps, before its connections break.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
        # An idle server would end itself over a difference in its accounts, which aborts and retractions can leave for a moment.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
        # What gated delta nets cache: convolutions' inputs without rounding them, states in fp32 as in training.
        "SGLANG_MAMBA_CONV_DTYPE": settings.dtype,
        "SGLANG_MAMBA_SSM_DTYPE": "float32",
    }
    if is_loopback(settings.host):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    if settings.num_nodes > 1:
        # Otherwise SGLang advertises the address of whichever interface it finds first.
        kept["SGLANG_HOST_IP"] = settings.url_host
    if settings.gpus:
        kept[_VISIBLE] = _visible(settings.gpus, inherited.get(_VISIBLE))
    return kept | (_cpu_environment(settings) if settings.device == "cpu" else {})


def allowed_environment(inherited: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of this process that SGLang's processes get: an allow-list, and those named in `more`."""
    return {
        name: value
        for name, value in inherited.items()
        if name in more or (_INHERITED.fullmatch(name) and not _TRAINERS_OWN.fullmatch(name))
    }


def _visible(gpus: Sequence[int], inherited: str | None) -> str:
    """GPUs by the names that a child of this process has to use: their numbers count what this process sees. ValueError
    if it does not see so many."""
    if inherited is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    if max(gpus) >= len(names):
        raise ValueError(
            f"a server is to run on GPU {max(gpus)}, but this process sees {len(names)} ({_VISIBLE}={inherited}): let the "
            "first process of a machine see all GPUs of the run"
        )
    return ",".join(names[gpu] for gpu in gpus)


def _cpu_arguments(settings: ServerSettings) -> dict[str, Any]:
    return {
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "mem-fraction-static": settings.memory_fraction or 0.3,
        "max-total-tokens": settings.max_total_tokens or settings.replaced_cache_tokens or 65536,
    }


def _cpu_environment(settings: ServerSettings) -> dict[str, str]:
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        _VISIBLE: "",
        # Two threads on the tiny products of a small model were 40 times slower than one.
        "OMP_NUM_THREADS": "1",
        # Compiling the sampler takes longer than it ever saves on a CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if settings.tensor_parallel > 1:
        # SGLang wants one list of cores a rank if the ranks outnumber the memory nodes.
        num_cores = os.cpu_count() or 1
        cores = (str(rank % num_cores) for rank in range(settings.tensor_parallel))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return variables
