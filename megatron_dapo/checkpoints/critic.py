"""The starting values of the critic's tensors.

A critic is the policy's layers and a head that gives one value per token: `score.weight` [1, h] and `score.bias` [1],
as transformers' *ForTokenClassification with one label has them. It starts from

| directory | head |
|---|---|
| a policy, *ForCausalLM, tied or not | weight fresh: small, normal, from only the seed; bias zero |
| a reward model, *ForSequenceClassification | weight from the directory, bias zero: the same function |
| a critic, *ForTokenClassification | both from the directory |

Every rank reads only its slices, by a plan between the directory's layout and the critic's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.checkpoints.load import RandomReader, TensorReader, WeightLoadReport, fill, random_normal
from megatron_dapo.models.architecture import HEADS, LANGUAGE_MODEL, VALUE_BIAS, VALUE_WEIGHT, ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.tokens import check_same_tokens
from megatron_dapo.reshard.execution import Buffers, ShardReader
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec

logger = logging.getLogger(__name__)

# Fields in which a policy and a critic of the same layers may differ.
_FREE_FIELDS = frozenset({"head", "tie_word_embeddings", "dtype", "max_position_embeddings"})


@dataclass(frozen=True)
class ValueHeadInit:
    """Initialization of a value head that the directory lacks: a weight of standard deviation `scale` / sqrt(h), so
    that values of hidden states of unit size are about `scale`."""

    seed: int = 0
    scale: float = 0.01

    def tensors(self, hidden_size: int) -> dict[str, torch.Tensor]:
        """Return the whole fp32 head tensors, the same on every rank and in every layout."""
        weight = random_normal(self.seed, VALUE_WEIGHT, (1, hidden_size)) * (self.scale / hidden_size**0.5)
        return {VALUE_WEIGHT: weight, VALUE_BIAS: torch.zeros(1)}


def critic_architecture(directory: str | Path, policy_directory: str | Path | None = None) -> ModelArchitecture:
    """Return the architecture of the critic that starts from `directory`.

    Raises ValueError if the head has more than one label and, given a `policy_directory`, if layers, vocabulary or
    tokenizer are not the policy's.
    """
    source = read_architecture(directory, heads=HEADS)
    if policy_directory is not None:
        _check_same_layers(directory, source, policy_directory, read_architecture(policy_directory))
        check_same_tokens("critic", directory, policy_directory)
    if source.head != LANGUAGE_MODEL:
        with HFCheckpoint(directory) as stored:
            _check_labels(stored, source)
    return source.with_value_head()


def load_critic(
    directory: str | Path, layout: MegatronLayout, rank: int, parameters: Buffers, init: ValueHeadInit
) -> WeightLoadReport:
    """Fill `parameters` (local name -> tensor) of `rank` from a policy, a reward model or a critic; padding becomes zero.

    Head tensors that the directory lacks start fresh, which is logged. Raises ValueError if the directory does not fit.
    """
    source = read_architecture(directory, heads=HEADS)
    with HFCheckpoint(directory) as stored:
        if source.head != LANGUAGE_MODEL:
            _check_labels(stored, source)
        stored.check(source)
        stored.check_aliases(source)
        shapes = source.shapes()
        specs = {name: stored.specs[name] for name in layout.tensors if name in shapes}
        # The comparison of aliases reads tensors too; the report counts only the load.
        already_read = stored.bytes_read
        report = _fill_with_head(specs, stored, layout, rank, parameters, init)
        report = replace(report, bytes_read=stored.bytes_read - already_read)
    _log_head(directory, report.fresh, init, rank)
    return report


def initialize_critic_randomly(
    seed: int, layout: MegatronLayout, rank: int, parameters: Buffers, init: ValueHeadInit
) -> WeightLoadReport:
    """Fill `parameters` of `rank` with the layers of the random policy for the same seed, and a fresh head."""
    head = layout.architecture.head_shapes()
    specs = {n: TensorSpec(s, torch.float32) for n, s in layout.architecture.shapes().items() if n not in head}
    report = _fill_with_head(specs, RandomReader(seed, layout.architecture), layout, rank, parameters, init)
    _log_head("random weights", report.fresh, init, rank)
    return report


def _fill_with_head(
    specs: Mapping[str, TensorSpec],
    reader: ShardReader,
    layout: MegatronLayout,
    rank: int,
    parameters: Buffers,
    init: ValueHeadInit,
) -> WeightLoadReport:
    """Fill from the tensors of `specs`, and from `init` for the head tensors that are not among them."""
    whole = init.tensors(layout.architecture.hidden_size)
    fresh = {name: whole[name] for name in layout.architecture.head_shapes() if name not in specs}
    source = SingleHolderLayout(
        {**specs, **{name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in fresh.items()}},
        layout.num_ranks,
    )
    report = fill(source, TensorReader(fresh, reader), layout, rank, parameters)
    return replace(report, fresh=tuple(fresh))


def _log_head(directory: str | Path, fresh: tuple[str, ...], init: ValueHeadInit, rank: int) -> None:
    if rank != 0:
        return
    # A warning, as a fresh head loses the trained values if a critic was meant to continue.
    if VALUE_WEIGHT in fresh:
        logger.warning(
            "critic from %s: fresh value head, standard deviation %g / sqrt(hidden size) from seed %d, bias 0",
            directory,
            init.scale,
            init.seed,
        )
    elif fresh:
        logger.info("critic from %s: its value head has no bias, which starts at 0", directory)
    else:
        logger.info("critic from %s, head included", directory)


def _check_labels(stored: HFCheckpoint, source: ModelArchitecture) -> None:
    spec = stored.specs.get(VALUE_WEIGHT)
    if spec is None:
        raise ValueError(
            f"{stored.path}: a {source.class_name} without {VALUE_WEIGHT}, which is the only tensor read as its head"
        )
    expected = source.head_shapes()[VALUE_WEIGHT]
    if spec.shape != expected:
        raise ValueError(
            f"{stored.path}: {VALUE_WEIGHT} is {tuple(spec.shape)}, a critic's is {expected}: one value a token; "
            "start from a model with one label, or from the policy"
        )


def _check_same_layers(
    directory: str | Path, source: ModelArchitecture, policy_directory: str | Path, policy: ModelArchitecture
) -> None:
    names = [field.name for field in fields(ModelArchitecture) if field.name not in _FREE_FIELDS]
    different = [name for name in names if getattr(source, name) != getattr(policy, name)]
    if different:
        values = ", ".join(f"{name} {getattr(source, name)} and {getattr(policy, name)}" for name in different)
        raise ValueError(
            f"critic {directory} is not of the policy's architecture ({policy_directory}): {values}; "
            "start from a critic of this model, or from the policy"
        )
