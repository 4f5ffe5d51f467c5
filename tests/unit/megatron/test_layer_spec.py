"""Descriptions of modules as megatron-core 0.16 and as 0.19 write them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dapo.megatron.experts import GroupedSigmoidRouter, SoftmaxFirstRouter, SoftmaxLastRouter
from megatron_dapo.megatron.implementations import _mlp_modules, _names
from megatron_dapo.megatron.layer_spec import class_of, route, submodules_of


class Built(MLP):
    @classmethod
    def as_submodule(cls, **settings):  # a method of megatron-core 0.19
        return cls(**settings)


DENSE = MLPSubmodules(linear_fc1=IdentityOp, linear_fc2=MLP)


@pytest.mark.parametrize(
    "mlp", [ModuleSpec(module=Built, submodules=DENSE), partial(Built.as_submodule, submodules=DENSE)]
)
def test_a_dense_layer_in_either_form(mlp) -> None:
    layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))
    assert class_of(mlp) is Built and submodules_of(mlp) is DENSE
    assert _mlp_modules(layer) == (mlp, IdentityOp, MLP)
    assert _names(*_mlp_modules(layer)).endswith("Built, megatron-core MLP")


@pytest.mark.parametrize(
    ("scores", "before", "router"),
    [
        ("softmax", True, SoftmaxFirstRouter),
        ("softmax", False, SoftmaxLastRouter),
        ("sigmoid", False, GroupedSigmoidRouter),
    ],
)
@pytest.mark.parametrize("form", [lambda parts: ModuleSpec(module=MoELayer, submodules=parts), partial])
def test_the_router_of_experts_in_either_form(form, scores: str, before: bool, router: type) -> None:
    parts = MoESubmodules(experts=IdentityOp)
    mlp = form(parts) if form is not partial else partial(MoELayer, submodules=parts)
    layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))
    route(SimpleNamespace(moe_router_score_function=scores, moe_router_pre_softmax=before), layer)
    assert parts.router is router and class_of(mlp) is MoELayer
    assert _mlp_modules(layer) == (mlp, IdentityOp)


def test_a_class_describes_itself() -> None:
    assert class_of(MLP) is MLP and submodules_of(MLP) is None
