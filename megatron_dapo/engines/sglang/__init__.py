"""Stock SGLang servers as rollout engines.

`serve`, `cpu` and `weight_loader` run inside the engine's processes, in a separate environment; everything else runs in
the trainer's. Nothing here but `serve` and `cpu` imports sglang.
"""
