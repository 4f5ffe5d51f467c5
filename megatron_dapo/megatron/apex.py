"""NVIDIA apex's AdamW, gradient norm and scaling in place of Transformer Engine's, on request.

Without Transformer Engine, megatron-core uses apex's anyway if they can be imported.
"""

from __future__ import annotations

import importlib

from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mixed_precision


def use_apex() -> None:
    """Make megatron-core use apex's optimizers in this process. Raise ValueError without apex or its CUDA
    extensions."""
    try:
        kernels = importlib.import_module("amp_C")
        adam = importlib.import_module("apex.optimizers").FusedAdam
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f'optimizer.implementation = "apex": {error}; build NVIDIA apex with --cpp_ext and --cuda_ext, or set "auto"'
        ) from None
    core_optimizer.Adam = distrib_optimizer.Adam = adam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    clip_grads.l2_norm_impl = kernels.multi_tensor_l2norm
    for module in (clip_grads, mixed_precision):
        module.multi_tensor_scale_impl = kernels.multi_tensor_scale
        module.multi_tensor_applier = applier
