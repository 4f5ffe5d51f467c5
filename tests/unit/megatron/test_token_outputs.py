"""The head's settings reach the log-prob function, which reports its choice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.megatron import actor
from megatron_dapo.megatron.actor import HeadSettings, implementation, token_outputs


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The attributes of a last chunk that the head reads: an output matrix of 128 rows and a tensor-parallel group of one."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(actor, "output_weight", lambda chunk: weight)
    return SimpleNamespace(pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)))


def packed(positions: torch.Tensor | None, support: torch.Tensor | None = None) -> SimpleNamespace:
    """The fields of a micro-batch of nine tokens that the head reads."""
    return SimpleNamespace(targets=torch.arange(9), response_positions=positions, num_tokens=9, support=support)


def outputs(chunk: SimpleNamespace, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(1, 9, 128, generator=torch.Generator().manual_seed(1)) * 0.1
    micro_batch = packed(None)
    found = token_outputs(chunk, hidden, micro_batch, HeadSettings(100, 0.8, 4, name))
    return found.logprobs, found.entropy


def test_the_requested_implementation_computes(chunk) -> None:
    exact = outputs(chunk, "reference")
    for one, other in zip(outputs(chunk, "auto"), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    in_fp8 = (outputs(chunk, "te_fp8")[0] - exact[0]).abs().max()
    assert 1e-4 < in_fp8 < 0.5


@pytest.mark.parametrize("positions", [[2, 3, 4, 8], [0], []])
@pytest.mark.parametrize("is_restricted", [False, True])
def test_the_head_sees_response_positions_alone(chunk, positions: list[int], is_restricted: bool) -> None:
    hidden = torch.randn(1, 9, 128, generator=torch.Generator().manual_seed(1)).mul(0.1).requires_grad_()
    index, settings = torch.tensor(positions, dtype=torch.int64), HeadSettings(100, 0.8, 4)
    weights = torch.linspace(0.5, 2.0, 9)
    support = torch.arange(9).repeat(9, 1).int() if is_restricted else None
    gradients, found = [], []
    for response_positions in (None, index):
        micro_batch = packed(response_positions, support)
        out = token_outputs(chunk, hidden, micro_batch, settings)
        mask = torch.zeros(9).index_fill(0, index, 1.0) * weights
        ((out.logprobs + out.entropy) * mask).sum().backward()
        gradients.append(hidden.grad.clone())
        found.append(out)
        hidden.grad = None
    for everywhere, there in ((found[0].logprobs, found[1].logprobs), (found[0].entropy, found[1].entropy)):
        torch.testing.assert_close(there[index], everywhere[index])
        assert there.count_nonzero() == len(positions)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_it_is_named_with_its_reason_before_anything_runs(chunk) -> None:
    assert implementation(chunk, HeadSettings(100)).name == "chunked"
    assert "cpu" in implementation(chunk, HeadSettings(100)).reason
    assert implementation(chunk, HeadSettings(100, implementation="te_fp8")).reason.endswith("emulated in fp32")
    with pytest.raises(ValueError, match="no implementation 'fp8'"):
        implementation(chunk, HeadSettings(100, implementation="fp8"))


@pytest.mark.parametrize("positions", [None, [2, 3, 8]])
def test_the_loss_gets_the_divergence_from_a_reference(chunk, monkeypatch: pytest.MonkeyPatch, positions) -> None:
    """Against log-softmax of all logits in fp64, only at the response positions, with the gradient in the actor's states."""
    generator = torch.Generator().manual_seed(2)
    hidden, other = (torch.randn(1, 9, 128, generator=generator).mul(0.1) for _ in range(2))
    hidden.requires_grad_()
    index = None if positions is None else torch.tensor(positions)
    micro_batch = packed(index)
    kept = token_outputs(chunk, hidden, micro_batch, HeadSettings(100, 0.8, 4, keeps_input=True)).head
    assert token_outputs(chunk, hidden, micro_batch, HeadSettings(100, 0.8, 4)).head is None
    reference = actor.head_input(chunk, other, micro_batch, HeadSettings(100, 0.8, 4))
    found = kept.divergence_from(reference, 0.5, "reference")
    weight = actor.output_weight(chunk)[:100].double()
    wide = hidden.detach().double().requires_grad_()
    log_s, log_p = ((states[0].double() @ weight.T / 0.8).log_softmax(1) for states in (wide, other))
    q, d = (log_p / 2).softmax(1), log_p - log_s
    mse, cross = 0.5 * ((q * d.square()).sum(1) - (q * d).sum(1).square()), -(log_p.exp() * log_s).sum(1)
    mask = torch.ones(9) if index is None else torch.zeros(9).index_fill(0, index, 1.0)
    torch.testing.assert_close(found.weighted_mse.double(), mse * mask, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.cross_entropy.double(), cross * mask, rtol=1e-5, atol=1e-6)
    (found.weighted_mse + 2 * found.cross_entropy).sum().backward()
    ((mse + 2 * cross) * mask).sum().backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
