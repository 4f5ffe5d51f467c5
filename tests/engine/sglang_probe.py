"""Program for the engine's environment: SGLang's own code without a server, its loading and its sizing of the KV cache.

    PYTHONPATH=<root> python sglang_probe.py CASES.json

CASES.json has two lists. "models": {"directory", "model_module", "tensor_parallel", "expert_parallel", "device", "output"};
SGLang's model classes load the directory, one rank after the other, and the parameters of rank r go to output/r.safetensors.
"caches": {"directory", "tensor_parallel", "fraction", "free_before", "free_after"}, the bytes free before and after the weights
are loaded on GPUs that are only numbers; [bytes of a token, tokens, responses with states] of each go to caches.json next to CASES.json.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace

from megatron_dapo.engines.sglang import cpu
from megatron_dapo.rounding import GIB

cpu.prepare_imports()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch, ModelConfig  # noqa: E402
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator  # noqa: E402
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator  # noqa: E402
from sglang.srt.runtime_context import get_parallel, get_schedule, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

VISION = ("vision_tower.", "multi_modal_projector.")


def start(directory: str, store: Path) -> None:
    """Set up the single-process state that model classes read."""
    arguments = ServerArgs(
        model_path=directory, device="cpu", attention_backend="torch_native", skip_tokenizer_init=True
    )
    publish(arguments, role="scheduler")
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    # From 0.5.21 on SGLang reads the published state instead, and compares the parallel sizes with groups of one rank.
    initialize_moe_config(*[arguments][: len(inspect.signature(initialize_moe_config).parameters)])
    runtime_context._validate_parallel = lambda parallel, source: None


def parameters(case: dict, rank: int) -> dict[str, torch.Tensor]:
    size, experts = case["tensor_parallel"], case["expert_parallel"]
    config = ModelConfig(case["directory"], dtype="float32")
    if case["device"] == "cpu":  # The model runner does this on a CPU only.
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), size)
    for heads in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(config.hf_config, heads) and not hasattr(config.hf_config, f"{heads}_cpu"):
            setattr(config.hf_config, f"{heads}_cpu", getattr(config.hf_config, heads))
    entry = importlib.import_module(case["model_module"]).EntryClass
    classes = {one.__name__: one for one in (entry if isinstance(entry, list) else [entry])}
    model_class = classes.get(config.hf_config.architectures[0], next(iter(classes.values())))
    cut = size // experts
    ranks = {"tp": (rank, size), "attn_tp": (rank, size), "moe_tp": (rank % cut, cut), "moe_ep": (rank // cut, experts)}
    values = {"pp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0}
    for name, (own, count) in ranks.items():
        group = copy.copy(getattr(get_parallel(), f"{name}_group"))  # 0.5.23 reads both from it.
        group.rank_in_group, group.world_size = own, count
        values |= {f"{name}_rank": own, f"{name}_size": count, f"{name}_group": group}
    with get_parallel().override(**values):
        model = model_class(config=config.hf_config, quant_config=None)
        for parameter in model.parameters():
            parameter.data.zero_()  # elements that the loader does not write are padding
        stored = load_file(Path(case["directory"]) / "model.safetensors")
        # transformers 5 gives the tensors of a vision tower other names than the published directories.
        model.load_weights((name, tensor) for name, tensor in stored.items() if not name.startswith(VISION))
    return {name: parameter.data for name, parameter in model.named_parameters()}


def sized(case: dict) -> list[int]:
    """Return bytes of a token, tokens of the pool and responses that have recurrent states (0: the model has none), by SGLang's
    functions; the machine's answers stand in for a GPU's."""
    config = ModelConfig(case["directory"], dtype="bfloat16")
    not_speculative = SimpleNamespace(
        **{name: (lambda: False) for name in ("is_eagle", "is_standalone", "is_dflash_family")}, is_none=lambda: True
    )
    recurrent, is_latent = mambaish_config(config), config.attention_arch == AttentionArch.MLA
    ServerArgs._validate_mamba_extra_buffer = lambda *unused: None  # it asks for a GPU
    arguments = ServerArgs(
        model_path=case["directory"], device="cpu", attention_backend="torch_native", skip_tokenizer_init=True,
        mem_fraction_static=case["fraction"],
    )  # fmt: skip
    publish(arguments, role="scheduler")
    configurator = SimpleNamespace(
        kv_cache_dtype_str="auto", kv_cache_dtype=torch.bfloat16, model_config=config, use_mla_backend=is_latent,
        layer_info=SimpleNamespace(
            num_effective_layers=config.num_hidden_layers, start_layer=0, end_layer=config.num_hidden_layers
        ), spec_algorithm=not_speculative,
        is_draft_worker=False, ps=SimpleNamespace(pp_size=1, attn_dp_size=1), mambaish_config=recurrent,
        post_capture_kv_active=False, server_args=arguments, device="cuda", gpu_id=0, hybrid_gdn_config=recurrent,
    )  # fmt: skip
    module = kv_cache_configurator
    for name in ("_handle_max_mamba_cache", "_calculate_mamba_ratio"):
        setattr(configurator, name, MethodType(getattr(module.KVCacheConfigurator, name), configurator))
    module.get_available_gpu_memory = lambda *unused, **also_unused: case["free_after"] / GIB
    world = SimpleNamespace(world_size=1, cpu_group=None)
    module.get_world_group = lambda: world
    size = case["tensor_parallel"]
    with get_parallel().override(
        tp_size=size, tp_rank=0, attn_tp_size=size, attn_tp_rank=0, attn_dp_size=1, attn_dp_rank=0, moe_tp_size=size,
        world_group=world,
    ):  # fmt: skip
        pool = DefaultPoolConfigurator(configurator)
        available = module.KVCacheConfigurator._profile_available_bytes(configurator, case["free_before"] / GIB)
        tokens = pool.calculate_pool_sizes(available, 1).max_total_num_tokens
        states = get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio() if recurrent else 0
    return [pool._cell_size, tokens, states]


def main(path: Path) -> None:
    cases = json.loads(path.read_text(encoding="utf-8"))
    torch.set_default_dtype(torch.float32)
    start(cases["models"][0]["directory"], path.with_suffix(".store"))
    for case in cases["models"]:
        output = Path(case["output"])
        output.mkdir()
        for rank in range(case["tensor_parallel"]):
            save_file(parameters(case, rank), output / f"{rank}.safetensors")
    path.with_name("caches.json").write_text(json.dumps([sized(case) for case in cases["caches"]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
