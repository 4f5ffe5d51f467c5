"""Program for the engine's environment: SGLang's own sizing of the KV cache, for GPUs that are only numbers.

    PYTHONPATH=<root> python sglang_cache_probe.py CASES.json

Each case is {"directory", "tensor_parallel", "fraction", "free_before", "free_after"}, the bytes free before and after the
weights are loaded. The answer is a line of JSON: [bytes of a token, tokens] of each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_dapo.engines.sglang import cpu

cpu.prepare_imports()

import torch  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator  # noqa: E402
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator  # noqa: E402
from sglang.srt.runtime_context import get_parallel, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

GIB = 1 << 30


def sized(case: dict) -> list[int]:
    """Return bytes of a token and tokens of the pool, by SGLang's functions; the machine's answers stand in for a GPU's."""
    config = ModelConfig(case["directory"], dtype="bfloat16")
    not_speculative = SimpleNamespace(
        **{name: (lambda: False) for name in ("is_eagle", "is_standalone", "is_dflash_family")}
    )
    arguments = ServerArgs(
        model_path=case["directory"], device="cpu", attention_backend="torch_native", skip_tokenizer_init=True,
        mem_fraction_static=case["fraction"],
    )  # fmt: skip
    publish(arguments, role="scheduler")
    configurator = SimpleNamespace(
        kv_cache_dtype_str="auto", kv_cache_dtype=torch.bfloat16, model_config=config, use_mla_backend=False,
        layer_info=SimpleNamespace(num_effective_layers=config.num_hidden_layers), spec_algorithm=not_speculative,
        is_draft_worker=False, ps=SimpleNamespace(pp_size=1), mambaish_config=None, post_capture_kv_active=False,
        server_args=arguments, device="cuda", gpu_id=0,
    )  # fmt: skip
    module = kv_cache_configurator
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
    return [pool._cell_size, tokens]


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    print("SIZED " + json.dumps([sized(case) for case in cases]))
