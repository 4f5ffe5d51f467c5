"""A small critic's directory, its transformers fp64 reference (values, gradients, AdamW steps), and checks for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_checks import (
    LENGTHS,
    MODELS,
    SIZES,
    TEMPERATURE,
    differing,
    fill_local,
    in_fp64,
    largest_over_ranks,
    make_micro_batch,
    ragged_batch,
    random_weight,
    snapshot,
    stored_buffers,
    take_over,
)
from actor_checks import loss_fn as policy_loss
from replica_checks import drifted_replicas
from safetensors.torch import load_file, save_file

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.parallel_state import join_as_nonmember
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks, partition_ranks
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.types import MicroBatch

STEPS = (10, 11, 12, 13)  # seeds of the batches of the reference's AdamW steps
LEARNING_RATE = 3e-3
# A larger epsilon than usual: gradients that are pure rounding error (of key biases) must not become whole steps.
OPTIMIZER = {"betas": (0.8, 0.9), "epsilon": 1e-4, "weight_decay": 0.3, "clip_grad": 0.5}
SINGLE = ParallelLayout(world_size=1)
VALUE_HEAD = "ForTokenClassification"
FROZEN = "-frozen"  # ends the name of a critic whose attention keeps its weights
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the implementations that compute in fp64


def model_of(name: str, head: str, **fields: Any) -> Any:
    """A transformers model of `actor_checks.MODELS` with another head, fp32, random in every tensor."""
    model_class = class_of(name, head)
    fields = {**SIZES, **MODELS[name][1], **fields}
    fields.pop("model_type", None)
    model = model_class(model_class.config_class(**fields))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(random_weight(MODELS[name][0], parameter_name, noise))
    return model


def class_of(name: str, head: str) -> Any:
    """The transformers class of `actor_checks.MODELS` with another head."""
    import transformers
    from transformers.modeling_layers import GenericForTokenClassification

    family, _ = MODELS[name]
    # transformers has none for the tokens of these language models: this is its generic one.
    own = {"Gemma3": "Gemma3Text", **{one: one for one in ("Qwen3_5", "Qwen3_5Moe", "Glm4Moe", "Glm4MoeLite")}}
    if family not in own or head != VALUE_HEAD:
        return getattr(transformers, family + head)
    bases = GenericForTokenClassification, getattr(transformers, family + "PreTrainedModel")
    config_class = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    return type(own[family] + VALUE_HEAD, bases, {"config_class": config_class})


def write_critic(directory: str | Path, name: str) -> None:
    """Write the directory `directory`/`name` of a critic, and its fp64 reference next to it."""
    path, family = Path(directory) / name, name.removesuffix(FROZEN)
    model_of(family, VALUE_HEAD, num_labels=1).save_pretrained(path)
    model = in_fp64(class_of(family, VALUE_HEAD).from_pretrained(path, **EAGER)).eval()
    if (model_type := MODELS[family][1].get("model_type")) is not None:  # transformers has no class for the family.
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    if family != name:
        _freeze_attention(model, MODELS[family][0])
    loss, values = _loss_and_values(model, seed=3)
    loss.backward()
    tensors = {f"values/{index}": part.detach().contiguous() for index, part in enumerate(values)}
    gradients = _whole("gradient", model, lambda each: torch.zeros_like(each) if each.grad is None else each.grad)
    tensors |= {"loss": loss.detach(), **gradients}
    losses, norms = _adamw_steps(model)
    tensors |= {"losses": losses, "norms": norms, **_whole("stepped", model, lambda parameter: parameter.detach())}
    save_file(tensors, Path(directory) / f"{name}.safetensors")


def _freeze_attention(model: Any, family: str) -> None:
    """Freeze the projections of every attention and the norms before and, in Gemma 3, after them."""
    parts = ["self_attn.", "input_layernorm.", *(["post_attention_layernorm."] if family == "Gemma3" else [])]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def _whole(kind: str, model: Any, of: Any) -> dict[str, torch.Tensor]:
    whole = {**dict(model.named_parameters()), **stored_buffers(model)}
    tensors = {name: of(tensor).clone() for name, tensor in whole.items()}
    return {f"{kind}/{name}": tensor.contiguous() for name, tensor in stored_tensors(tensors).items()}


def _loss_and_values(model: Any, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of `loss_fn`, one sequence at a time, and each micro-batch's values at real next tokens."""
    batch, total, everything = ragged_batch(seed), torch.zeros((), dtype=torch.float64), []
    for index, parts in enumerate(batch.micro_batches):
        packed = make_micro_batch(parts, SINGLE, batch.num_targets, seed=100 + index)
        values = torch.cat([model(part[None]).logits[0, :-1, 0] for part in parts])
        returns = packed.advantages[packed.loss_mask.bool()].double()
        total = total + ((values - returns) ** 2).sum() / 2 / batch.num_targets
        everything.append(values)
    return total, everything


def _adamw_steps(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the steps with the model; return their losses and gradient norms."""
    parameters = list(model.parameters())
    # The biases of all experts of a layer are a matrix.
    free = [p for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("_bias")]
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    assert sum(len(group["params"]) for group in groups) == len(parameters)
    adamw = torch.optim.AdamW(
        groups,
        lr=LEARNING_RATE,
        betas=OPTIMIZER["betas"],
        eps=OPTIMIZER["epsilon"],
        weight_decay=OPTIMIZER["weight_decay"],
    )
    losses, norms = [], []
    for seed in STEPS:
        adamw.zero_grad()
        loss, _ = _loss_and_values(model, seed)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad"]))
        adamw.step()
        losses.append(loss.detach())
    assert min(norms) > OPTIMIZER["clip_grad"], "the steps are meant to clip"
    return torch.stack(losses), torch.stack(norms)


@dataclass(frozen=True)
class CriticReference:
    """Compute in fp64 with transformers: values of real targets, loss, gradients, and AdamW steps from there."""

    directory: Path
    values: tuple[torch.Tensor, ...]
    loss: float
    gradients: Mapping[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    stepped: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, directory: str | Path, name: str) -> CriticReference:
        tensors = load_file(Path(directory) / f"{name}.safetensors")
        kinds = {
            kind: {key.removeprefix(kind): t for key, t in tensors.items() if key.startswith(kind)}
            for kind in ("gradient/", "stepped/")
        }
        return cls(
            Path(directory) / name,
            tuple(tensors[f"values/{index}"] for index in range(len(LENGTHS))),
            float(tensors["loss"]),
            kinds["gradient/"],
            tensors["losses"].tolist(),
            tensors["norms"].tolist(),
            kinds["stepped/"],
        )


def loss_fn(micro_batch: MicroBatch, values: torch.Tensor, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Half the squared distance to random returns, passed as advantages."""
    loss = (micro_batch.loss_weights * (values - micro_batch.advantages) ** 2).sum() / 2
    return loss, {"loss": loss.detach(), "num_targets": micro_batch.loss_mask.sum()}


def of_rank(layout: ParallelLayout, seed: int = 3, rank: int | None = None) -> list[MicroBatch]:
    rank = dist.get_rank() if rank is None else rank
    return [micro_batch for _, micro_batch in ragged_batch(seed).of_rank(layout, rank)]


def value_error(critic: MegatronCritic, want: CriticReference) -> float:
    """Largest relative (2-norm) difference of a micro-batch's values at this context rank's real targets."""
    layout, rank = critic.layout, critic.rank
    mine = ragged_batch().of_rank(layout, rank)
    outputs = critic.forward_values([micro_batch for _, micro_batch in mine])
    last = layout.coordinates(rank).pipeline == layout.pipeline - 1
    assert all((values is not None) == last for values in outputs), "values exist on the last pipeline stage only"
    errors = [0.0]
    for (index, micro_batch), values in zip(mine, outputs, strict=True):
        if values is None:
            continue
        expected = torch.zeros(micro_batch.num_tokens, dtype=torch.float64)
        expected[micro_batch.loss_mask.bool()] = want.values[index]
        whole = MicroBatch(**{**vars(micro_batch), "advantages": expected})
        local = slice_for_context(whole, layout.coordinates(rank).context, layout.context)
        mask = local.loss_mask.bool()
        assert values.dtype == torch.float32 and values.shape == mask.shape
        errors.append(float((values - local.advantages)[mask].norm() / want.values[index].norm()))
    return max(errors)


def distance(critic: MegatronCritic, local: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> float:
    """Largest over local buffers of |difference| / |expected|, both 2-norms."""
    expected = {name: torch.zeros(buffer.shape, dtype=torch.float64) for name, buffer in local.items()}
    fill_local(expected, critic.tensors, critic.rank, whole)
    return max(float((local[name] - want).norm() / want.norm().clamp(min=1e-12)) for name, want in expected.items())


def settings_of(case: Mapping[str, Any]) -> CriticSettings:
    return CriticSettings(
        model=ModelSettings(
            dtype=case.get("dtype", "float32"),
            recompute=case.get("recompute", "none"),
            megatron=case.get("megatron", {}),
        ),
        optimizer=OptimizerConfig(**OPTIMIZER),
        use_distributed_optimizer=case.get("distributed", True),
        freeze=("attention",) if case.get("model", "").endswith(FROZEN) else (),
    )


def layout_of(case: Mapping[str, Any], part: RankSet | None = None) -> ParallelLayout:
    return ParallelLayout(world_size=(part or all_ranks()).num_ranks, **case["layout"])


def train(critic: MegatronCritic, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of one step on each seed's batch."""
    results = [critic.train_step(of_rank(critic.layout, seed, critic.rank), loss_fn, LEARNING_RATE) for seed in seeds]
    assert all(result.applied for result in results)
    return [(result.metrics["loss"], result.grad_norm) for result in results]


def relative(ours: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, exact, strict=True))


def parity(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: errors of every case against its reference, the largest over ranks."""
    return [
        _parity_case(CriticReference.read(arguments["references"], case["model"]), case) for case in arguments["cases"]
    ]


def _parity_case(want: CriticReference, case: dict[str, Any]) -> dict[str, float]:
    return largest_over_ranks(_errors(MegatronCritic.build(want.directory, layout_of(case), settings_of(case)), want))


def _errors(critic: MegatronCritic, want: CriticReference) -> dict[str, float]:
    """Errors on this rank."""
    value = value_error(critic, want)
    metrics = critic.accumulate_gradients(of_rank(critic.layout, rank=critic.rank), loss_fn)
    frozen = {name: each.detach().clone() for name, each in critic.named_local_parameters().items() if not each.requires_grad}
    missing = {name: torch.zeros_like(each) for name, each in frozen.items()}
    gradient = distance(critic, {**missing, **critic.gradients()}, want.gradients)
    history = train(critic, STEPS)
    parameters = {name: parameter.detach() for name, parameter in critic.named_local_parameters().items()}
    return {
        "values": value,
        "loss": relative([metrics["loss"]], [want.loss]),
        "gradients": gradient,
        "losses": relative([loss for loss, _ in history], want.losses),
        "norms": relative([norm for _, norm in history], want.norms),
        "stepped": distance(critic, parameters, want.stepped),
        "drifted": len(drifted_replicas(critic.tensors, parameters, critic.part.group)),
        "thawed": sum(not torch.equal(parameters[name], before) for name, before in frozen.items()),
    }


def parity_of_parts(arguments: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Worker: pairs of cases at the same time, one on the first ranks and one on the last `num_last`, trained without
    communication between the two. Returns every rank's errors, in rank order, for each pair."""
    parts = partition_ranks(arguments["num_last"], timeout_s=120)
    mine = next(part for part in parts if part.is_member)
    everyone = Coordination(dist.group.WORLD)
    return [everyone.gather(_pair_of_parts(arguments["references"], pair, parts, mine)) for pair in arguments["pairs"]]


def _pair_of_parts(
    references: str, pair: Sequence[dict[str, Any]], parts: Sequence[RankSet], mine: RankSet
) -> dict[str, Any]:
    built = []
    for case, part in zip(pair, parts, strict=True):
        layout = layout_of(case, part)
        if part is mine:
            want = CriticReference.read(references, case["model"])
            built.append((MegatronCritic.build(want.directory, layout, settings_of(case), part=part), want))
        else:
            join_as_nonmember(layout, part)
    [(critic, want)] = built
    return {**_errors(critic, want), "layout": critic.layout.describe(), "rank": critic.rank}


# Two ranks: exact state, another layout than the actor's, export.


def resume(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare 4 steps in a row with 2 steps, save, build, load, 2 steps; return each case's differences on any rank."""
    return [
        _resume_case(CriticReference.read(arguments["references"], case["model"]), case) for case in arguments["cases"]
    ]


def _resume_case(want: CriticReference, case: dict[str, Any]) -> dict[str, Any]:
    def build() -> MegatronCritic:
        return MegatronCritic.build(want.directory, layout_of(case), settings_of(case))

    whole, first, second = build(), build(), build()
    history, begun = train(whole, STEPS), train(first, STEPS[:2])
    take_over(second, snapshot(first))
    num_loaded = len(differing(snapshot(first), snapshot(second)))
    continued = train(second, STEPS[2:])
    counts = {"loaded": num_loaded, "difference": len(differing(snapshot(whole), snapshot(second)))}
    return {**largest_over_ranks(counts), "history": history == begun + continued}


def beside(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train actor and critic on different layouts in alternate steps and separately, and compare."""
    want = CriticReference.read(arguments["references"], "qwen2")
    layouts = ParallelLayout(world_size=2, **arguments["actor"]), ParallelLayout(world_size=2, **arguments["critic"])
    settings = ActorSettings(), settings_of({})

    def actor_step(actor: MegatronActor, seed: int) -> None:
        assert actor.train_step(of_rank(actor.layout, seed), policy_loss, TEMPERATURE, LEARNING_RATE).applied

    apart = MegatronActor.build(arguments["policy"], layouts[0], settings[0])
    for seed in STEPS[:2]:
        actor_step(apart, seed)
    lonely = MegatronCritic.build(want.directory, layouts[1], settings[1])
    train(lonely, STEPS[:2])
    actor = MegatronActor.build(arguments["policy"], layouts[0], settings[0])
    critic = MegatronCritic.build(want.directory, layouts[1], settings[1], running_models=[actor])
    sharing = MegatronActor.build(arguments["policy"], layouts[0], settings[0], running_models=[actor, critic])
    for seed in STEPS[:2]:
        actor_step(actor, seed)
        critic.forward_values(of_rank(layouts[1], seed))
        sharing.forward_logprobs(of_rank(layouts[0], seed), TEMPERATURE)
        train(critic, [seed])
    counts = {
        "actor": len(differing(snapshot(apart), snapshot(actor))),
        "critic": len(differing(snapshot(lonely), snapshot(critic))),
    }
    MegatronCritic.build(want.directory, ParallelLayout(world_size=2), settings[1], running_models=[actor])
    refused = ""
    try:
        critic.forward_values(of_rank(layouts[1]))
    except ValueError as error:
        refused = str(error)
    actor.forward_logprobs(of_rank(layouts[0]), TEMPERATURE)
    return {**largest_over_ranks(counts), "shared": sharing.groups == actor.groups, "refused": refused}


def export(arguments: dict[str, Any]) -> None:
    """Directories of a critic that was only loaded, and of one that was trained, and the latter's values."""
    want, target = CriticReference.read(arguments["references"], "qwen3"), Path(arguments["target"])
    critic = MegatronCritic.build(want.directory, layout_of(arguments), settings_of({}))
    critic.export(target / "loaded", want.directory)
    train(critic, STEPS[:2])
    critic.export(target / "trained", want.directory)
    [values, *_] = critic.forward_values(of_rank(critic.layout))
    if values is not None:
        save_file({"values": values.contiguous()}, target / f"values{dist.get_rank()}.safetensors")


def two_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Worker: all of the above in one start of two processes."""
    return {
        "resume": resume(arguments | {"cases": arguments["resume"]}),
        "beside": beside(arguments | arguments["beside"]),
        "export": export(arguments | arguments["export"]),
    }
