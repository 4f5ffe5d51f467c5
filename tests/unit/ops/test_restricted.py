"""Log-probs under top-p and top-k against fp64 from all logits: the softmax over each token's support."""

from __future__ import annotations

import pytest
import torch
from lm_head_cases import make, relative_norm, upstream_of

from megatron_dapo.ops.restricted import sampled_logprobs


def supports_of(targets: torch.Tensor, vocab_size: int, most: int, whole: float = 0.0) -> torch.Tensor:
    """[P, most] int32: 1 to `most` ids a token in any order, its target among them; a share `whole` of rows has none."""
    generator = torch.Generator().manual_seed(len(targets) + most)
    table = torch.full((len(targets), most), -1, dtype=torch.int32)
    for row, target in enumerate(targets.tolist()):
        size = int(torch.randint(1, most + 1, (), generator=generator))
        others = [word for word in torch.randperm(vocab_size, generator=generator).tolist() if word != target]
        ids = torch.tensor([*others[: size - 1], target])
        table[row, :size] = ids[torch.randperm(size, generator=generator)].int()
        if float(torch.rand((), generator=generator)) < whole:
            table[row] = -1
    return table


def exact(hidden, weight, targets, support, temperature, vocab_size):
    """In fp64 from all logits, those outside the support at minus infinity; differentiated by autograd."""
    leaves = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = leaves[0] @ leaves[1][:vocab_size].T / temperature
    inside = torch.stack([torch.isin(torch.arange(vocab_size), row) | (row < 0).all() for row in support])
    log_q = torch.log_softmax(logits.masked_fill(~inside, float("-inf")), dim=1)
    entropy = -(log_q.exp() * log_q.masked_fill(~inside, 0.0)).sum(1)
    return outcome((log_q.gather(1, targets[:, None])[:, 0], entropy), leaves)


def outcome(outputs, leaves) -> list[torch.Tensor]:
    upstream = upstream_of(len(outputs[0]), outputs[0].device)
    (upstream[0] * outputs[0] + upstream[1] * outputs[1]).sum().backward()
    return [outputs[0].detach(), outputs[1].detach(), leaves[0].grad, leaves[1].grad]


@pytest.mark.parametrize("most", [1, 5, 37])
@pytest.mark.parametrize("whole", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tiles", [(None, None), (7, 5)])
def test_values_and_gradients_against_fp64(most, whole, tiles) -> None:
    hidden, weight, targets = make(40, 16, 37, 48)
    support = supports_of(targets, 37, most, whole)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    settings = {"temperature": 0.8, "vocab_size": 37, "chunk_tokens": tiles[0], "chunk_columns": tiles[1]}
    found = outcome(sampled_logprobs(*leaves, targets, support, **settings), leaves)
    right = exact(hidden, weight, targets, support, 0.8, 37)
    for name, one, other in zip(("log-prob", "entropy", "to hidden", "to weight"), found, right, strict=True):
        assert relative_norm(one, other) < 1e-6, name
    if most == 1 and not whole:
        assert not any(part.any() for part in found), "a token without alternatives has nothing to learn"


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, targets = (part.double() if part.is_floating_point() else part for part in make(6, 4, 11))
    support = supports_of(targets, 11, 5, 0.3)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *inputs: sampled_logprobs(*inputs, targets, support, temperature=0.7, vocab_size=11), leaves
    )


def test_the_whole_vocabulary_as_a_support_is_the_whole_head() -> None:
    hidden, weight, targets = make(30, 16, 37)
    every = torch.arange(37, dtype=torch.int32).repeat(30, 1)
    for one, other in zip(
        sampled_logprobs(hidden, weight, targets, every, vocab_size=37),
        sampled_logprobs(hidden, weight, targets, None, vocab_size=37),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["chunked", "chunked_bf16", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_of_a_first_step_is_exactly_1(name, dtype) -> None:
    if name == "chunked_bf16" and dtype == torch.float32:
        pytest.skip("it is for bfloat16")
    hidden, weight, targets = make(50, 16, 37, dtype=dtype)
    support = supports_of(targets, 37, 9, 0.2)
    settings = {"vocab_size": 37, "temperature": 0.9, "implementation": name}
    with torch.no_grad():
        old = sampled_logprobs(hidden, weight, targets, support, **settings)[0]
    new = sampled_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, support, **settings)[0]
    assert torch.equal((new - old).exp(), torch.ones(50))


def test_large_logits_of_one_sign_and_a_tiny_temperature() -> None:
    hidden, weight, targets = make(30, 16, 37, scale=300.0)
    hidden = hidden.abs()
    for sign in (1.0, -1.0):
        shifted = sign * weight.abs()
        support = supports_of(targets, 37, 6)
        leaves = hidden.clone().requires_grad_(), shifted.clone().requires_grad_()
        found = outcome(
            sampled_logprobs(*leaves, targets, support, vocab_size=37, temperature=0.05, chunk_columns=4), leaves
        )
        right = exact(hidden, shifted, targets, support, 0.05, 37)
        # Logits of 1e5 leave an fp32 log-prob 1e-2.
        assert all(torch.isfinite(part).all() for part in found) and relative_norm(found[0], right[0]) < 1e-5


@pytest.mark.parametrize("whole", [0.0, 0.5])
def test_gradients_go_to_main_grad(whole) -> None:
    hidden, weight, targets = make(40, 16, 37, 48, dtype=torch.bfloat16)
    support = supports_of(targets, 37, 5, whole)
    leaf = weight.clone().requires_grad_()
    leaf.main_grad = torch.full(weight.shape, 0.5)
    outputs = sampled_logprobs(
        hidden, leaf, targets, support, vocab_size=37, implementation="chunked", adds_to_main_grad=True
    )
    (upstream_of(40, hidden.device)[0] * outputs[0] + upstream_of(40, hidden.device)[1] * outputs[1]).sum().backward()
    right = exact(hidden, weight, targets, support, 1.0, 37)[3]
    assert leaf.grad_added_to_main_grad
    assert relative_norm(leaf.main_grad - 0.5, torch.nn.functional.pad(right, (0, 0, 0, 48 - len(right)))) < 1e-6


def test_a_target_outside_its_support_is_not_a_number() -> None:
    hidden, weight, targets = make(4, 16, 37)
    support = torch.stack([targets, (targets + 1) % 37], dim=1).int()
    support[2] = (targets[2] + 2) % 37
    logprobs, entropy = sampled_logprobs(hidden, weight, targets, support, vocab_size=37)
    assert logprobs.isnan().tolist() == [False, False, True, False] and entropy.isfinite().all()
