"""The generalized KL against fp64 from all logits, the golden values, and the gradients it stands for."""

from __future__ import annotations

import pytest
import torch
from lm_head_cases import make

from megatron_dapo.ops.divergence import vocab_parallel_divergence
from megatron_dapo.ops.logprob import vocab_parallel_logprobs


def one_hot_model(logits: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight whose products are these logits."""
    table = torch.tensor(logits, dtype=torch.float64)
    return torch.eye(len(logits), dtype=torch.float64), table.T.contiguous()


def plain(logits: torch.Tensor, reference_logits: torch.Tensor, gamma: float, weigh_by: str):
    log_s, log_p = torch.log_softmax(logits, 1), torch.log_softmax(reference_logits, 1)
    q = torch.softmax(gamma * {"reference": log_p, "actor": log_s}[weigh_by].detach(), 1)
    d = log_p - log_s
    return 0.5 * ((q * d.square()).sum(1) - (q * d).sum(1).square()), -(log_p.exp() * log_s).sum(1)


@pytest.mark.parametrize("weigh_by", ["reference", "actor"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("tiles", [(None, None), (7, 5)])
def test_values_and_gradients_against_all_logits_in_fp64(weigh_by, gamma, tiles) -> None:
    hidden, weight, _ = make(20, 16, 37, 48, scale=0.4)
    reference_hidden, reference_weight = hidden[:, :12] * 0.9, weight[:, :12] * 1.1
    upstream = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = vocab_parallel_divergence(
        *leaves,
        reference_hidden,
        reference_weight,
        vocab_size=37,
        gamma=gamma,
        weigh_by=weigh_by,
        temperature=0.8,
        chunk_tokens=tiles[0],
        chunk_columns=tiles[1],
    )
    (upstream[0] * found.weighted_mse + upstream[1] * found.cross_entropy).sum().backward()
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    reference = reference_hidden.double() @ reference_weight[:37].double().T / 0.8
    mse, cross = plain(wide[0] @ wide[1][:37].T / 0.8, reference, gamma, weigh_by)
    (upstream[0] * mse + upstream[1] * cross).sum().backward()
    torch.testing.assert_close(found.weighted_mse.double(), mse, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.cross_entropy.double(), cross, rtol=1e-5, atol=1e-5)
    for leaf, right in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), right.grad, rtol=1e-4, atol=2e-5)


def golden(chapter, gamma: float = 1.0, weigh_by: str = "reference", temperature: float = 1.0, swap: bool = False):
    """The terms of the chapter's student (the actor) and teacher (the reference), or the other way round, and the actor's
    logits as a leaf."""
    student, teacher = chapter["student_logits"], chapter["teacher_logits"]
    return both_terms(*((teacher, student) if swap else (student, teacher)), gamma, weigh_by, temperature)


def both_terms(actor, reference, gamma: float = 1.0, weigh_by: str = "reference", temperature: float = 1.0):
    hidden, weight = one_hot_model(actor)
    leaf = weight.requires_grad_()
    settings = {"vocab_size": len(actor[0]), "gamma": gamma, "weigh_by": weigh_by, "temperature": temperature}
    return leaf, vocab_parallel_divergence(hidden, leaf, *one_hot_model(reference), **settings)


def fp64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_golden(actual: torch.Tensor, expected, atol: float = 1e-11) -> None:
    """`atol`: gradients of the chapter are numerical differences, good to 1e-8."""
    torch.testing.assert_close(torch.as_tensor(actual).detach(), fp64(expected), rtol=1e-9, atol=atol)


def over_batch(weighted_mse: torch.Tensor, teacher_logits, gamma: float, temperature: float = 1.0) -> torch.Tensor:
    """Return the mean under the authors' normaliser: a sample has the weight (sum p^gamma)^2.

    Ours is the mean of all tokens, which does not depend on what else is in the batch.
    """
    share = torch.softmax(fp64(teacher_logits) / temperature, 1).pow(gamma).sum(1).square()
    return (share * weighted_mse).sum() / share.sum()


def check_probabilities(chapter) -> None:
    for name in ("teacher", "student"):
        hidden, weight = one_hot_model(chapter[f"{name}_logits"])
        words = torch.arange(3)
        rows = [vocab_parallel_logprobs(row.expand(3, -1), weight, words, vocab_size=3)[0] for row in hidden]
        assert_golden(torch.stack(rows).exp(), chapter[f"p_{name}"])


def check_divergences(chapter) -> None:
    """A KL is the cross-entropy less the entropy, which is the cross-entropy of a model from itself."""
    student, teacher = chapter["student_logits"], chapter["teacher_logits"]
    of_teacher = both_terms(teacher, teacher)[1].cross_entropy
    of_student = both_terms(student, student)[1].cross_entropy
    assert_golden(of_teacher, chapter["H(teacher)"])
    assert_golden(golden(chapter)[1].cross_entropy - of_teacher, chapter["KL(teacher||student)"])
    assert_golden(golden(chapter, swap=True)[1].cross_entropy - of_student, chapter["KL(student||teacher)"])


def check_theorem_1(chapter) -> None:
    """The decoupled form has the gradients of KL(m || n), m the teacher and n the student, in both models' logits."""
    case = chapter["theorem1_grad_check"]
    leaf, found = golden(chapter, weigh_by="actor", swap=True)
    found.weighted_mse[0].backward()
    for name in ("dKL/do_m", "dDKL/do_m", "closed_form q*(d-E_q d)"):
        assert_golden(leaf.grad[:, 0], case[name], atol=1e-8)
    leaf, found = golden(chapter)
    found.cross_entropy[0].backward()
    assert_golden(leaf.grad[:, 0], case["dKL/do_n = s_n - s_m"], atol=1e-8)
    entropy = both_terms(chapter["teacher_logits"], chapter["teacher_logits"])[1].cross_entropy[0]
    mse, cross = found.weighted_mse[0], found.cross_entropy[0]
    assert_golden(cross - entropy, case["value_KL"])
    assert_golden(mse, case["value_wMSE"])
    assert_golden(cross, case["value_SCE"])
    assert_golden(mse + cross, case["value_wMSE_plus_SCE"])


def check_student_gradient(chapter) -> None:
    case = chapter["kd_student_grad"]
    for name, mse, cross in (("KL", 0, 1), ("GKL(a=b=g=1)", 1, 1), ("extra_wMSE", 1, 0)):
        leaf, found = golden(chapter)
        (mse * found.weighted_mse[0] + cross * found.cross_entropy[0]).backward()
        assert_golden(leaf.grad[:, 0], case[name], atol=1e-8)


def check_variance(chapter) -> None:
    case = chapter["identity wMSE = 0.5*Var_q(log-ratio)"]
    found = golden(chapter)[1].weighted_mse[0]
    assert_golden(found, case["wMSE"])
    assert_golden(found, case["half_var"])
    assert_golden(2 * found, case["var"])


def check_batch(chapter) -> None:
    """total = beta * weighted_mse + alpha * cross_entropy; both are coefficients of the configuration here."""
    section, teacher = chapter["gkl_batch_of_2"], chapter["teacher_logits"]
    for name, gamma in (("a1_b1_g1_T1", 1.0), ("a1_b1_g0.5", 0.5), ("a1_b1_g0(uniform)", 0.0)):
        found = golden(chapter, gamma)[1]
        mse, cross = over_batch(found.weighted_mse, teacher, gamma), found.cross_entropy.mean()
        assert_golden(mse, section[name]["wmse"])
        assert_golden(cross, section[name]["sce"])
        assert_golden(mse + cross, section[name]["total"])
    hot = section["cifar_kd wrn40_2->wrn40_1: a1_b12_g0.3_T4_T2_4"]
    found = golden(chapter, 0.3, temperature=4.0)[1]
    # The authors' T2 is only in the weights; ours divides the logits, whose squares are 16 times smaller.
    mse, cross = 16 * over_batch(found.weighted_mse, teacher, 0.3, 4.0), found.cross_entropy.mean()
    assert_golden(mse, hot["wmse"])
    assert_golden(cross, hot["sce"])
    assert_golden(12 * mse + cross, hot["total"])
    prior = section["cifar100_at: a4_b20_g0.4_T1 with prior"]
    cross = golden(chapter)[1].cross_entropy.mean()
    assert_golden(cross, prior["sce"])
    assert_golden(20 * prior["wmse"] + 4 * cross, prior["total"])


def check_normaliser(chapter) -> None:
    section, teacher = chapter["wmse_normaliser"], chapter["teacher_logits"]
    whole, half = golden(chapter)[1].weighted_mse, golden(chapter, 0.5)[1].weighted_mse
    assert_golden(over_batch(whole, teacher, 1.0), section["batch_sum (authors v2)"])
    assert_golden(whole.mean(), section["gamma=1: W_b=1 so equals mean of per-sample"])
    assert_golden(over_batch(half, teacher, 0.5), section["gamma=.5 batch"])
    assert_golden(half.mean(), section["gamma=.5 mean of per-sample"])


def check_reverse_kl(chapter) -> None:
    case = chapter["rl_reverse_kl_is_wmse_only"]
    leaf, found = golden(chapter, weigh_by="actor")
    found.weighted_mse[0].backward()
    assert_golden(leaf.grad[:, 0], case["grad_reverse_KL"], atol=1e-8)
    assert_golden(leaf.grad[:, 0], case["grad_wMSE(stop-grad weights)"], atol=1e-8)


def check_top_k(chapter) -> None:
    """The loss takes the whole vocabulary. Its values over the top words, and over them and one word for all others, are those
    of a smaller vocabulary."""
    case = chapter["topk"]
    assert case["V"] == len(case["teacher_logits"][0])
    student, teacher = fp64(case["student_logits"]), fp64(case["teacher_logits"])
    found = both_terms(student.tolist(), teacher.tolist())[1]
    assert_golden(found.weighted_mse[0], case["wmse_full"])
    assert_golden(found.cross_entropy[0], case["sce_full"])
    top = teacher[0].topk(case["k"]).indices
    assert top.tolist() == case["teacher_topk_idx"]
    assert_golden(torch.softmax(teacher, 1)[0, top].sum(), case["teacher_topk_mass"])
    few = both_terms(student[:, top].tolist(), teacher[:, top].tolist())[1]
    assert_golden(few.weighted_mse[0], case["wmse_top3_renormalised"])
    others = [word for word in range(case["V"]) if word not in top]
    joined = [
        torch.cat([each[:, top], each[:, others].logsumexp(1, keepdim=True)], 1).tolist() for each in (student, teacher)
    ]
    with_tail = both_terms(*joined)[1]
    assert_golden(with_tail.weighted_mse[0], case["wmse_top3_plus_tail_bucket"])
    assert_golden(with_tail.cross_entropy[0], case["sce_top3_plus_tail"])


CHECKS = (
    check_probabilities,
    check_divergences,
    check_theorem_1,
    check_student_gradient,
    check_variance,
    check_batch,
    check_normaliser,
    check_reverse_kl,
    check_top_k,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_golden_values(check, golden_file, golden_section) -> None:
    check(golden_section(golden_file["kl"], "kl"))


def test_every_golden_value_of_the_chapter_is_read(golden_file, golden_section) -> None:
    """One leaf is read and not computed: the weighted error under a prior of the classes, `wmse` of "with prior". The paper's
    prior means nothing for text, so there is none here, and the vectors do not say which one made the value."""
    chapter = golden_section(golden_file["kl"], "kl")
    for check in CHECKS:
        check(chapter)
    assert chapter.unread() == []


def test_weighted_mse_under_the_actor_s_weights_has_the_gradient_of_the_reverse_kl(golden_file) -> None:
    chapter = golden_file["kl"]
    leaf, found = golden(chapter, weigh_by="actor")
    found.weighted_mse[0].backward()
    other = one_hot_model(chapter["student_logits"])[1].requires_grad_()
    log_s = torch.log_softmax(other[:, 0], 0)
    log_p = torch.log_softmax(fp64(chapter["teacher_logits"][0]), 0)
    (log_s.exp() * (log_s - log_p)).sum().backward()
    torch.testing.assert_close(leaf.grad[:, 0], other.grad[:, 0], rtol=1e-12, atol=1e-12)


def test_a_model_from_itself_has_no_divergence_and_no_gradient() -> None:
    hidden, weight, _ = make(9, scale=3.0)
    leaf = weight.clone().requires_grad_()
    found = vocab_parallel_divergence(hidden, leaf, hidden, weight, vocab_size=37, gamma=0.5)
    (found.weighted_mse + found.cross_entropy).sum().backward()
    assert not found.weighted_mse.any() and leaf.grad.abs().max() < 1e-6


def test_no_tokens() -> None:
    hidden, weight, _ = make(0)
    found = vocab_parallel_divergence(hidden, weight, hidden, weight, vocab_size=37)
    assert found.weighted_mse.shape == found.cross_entropy.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weigh_by": "teacher"}, "weigh_by 'teacher' is none of reference, actor"),
        ({"gamma": -0.5}, "gamma -0.5 must be at least 0"),
        ({"vocab_size": 99}, "vocab_size 99 is not in"),
    ],
)
def test_bad_settings_are_errors(change, message) -> None:
    hidden, weight, _ = make(4)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_divergence(hidden, weight, hidden, weight, **({"vocab_size": 37} | change))


def test_models_of_different_vocabularies_are_an_error() -> None:
    hidden, weight, _ = make(4)
    with pytest.raises(ValueError, match="actor has 4 tokens and 37 rows, the reference 4 and 30"):
        vocab_parallel_divergence(hidden, weight, hidden, weight[:30], vocab_size=30)
