"""apex.optimizers: FusedAdam as apex 0.1 declares it, by torch's functional AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW; the step is counted once a group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.set_grad_none = set_grad_none

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        assert all(each is None for each in (closure, grads, output_params, scale, grad_norms, grad_scaler))
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (decay1, decay2), step = group["betas"], group["step"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float)
                gradient = parameter.grad.float()
                first = state["exp_avg"].lerp_(gradient, 1 - decay1)
                second = state["exp_avg_sq"].mul_(decay2).addcmul_(gradient, gradient, value=1 - decay2)
                root = (second / (1 - decay2**step)).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(first / (1 - decay1**step), root, value=-group["lr"])


class FusedSGD(torch.optim.SGD):
    """Imported with FusedAdam, and not used."""
