"""Bytes of a step's samples on a trainer rank and on its node, assuming that all have the largest length."""

from __future__ import annotations

import math
from collections import Counter

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.memory.parameters import FP32

TOKEN_BYTES = 72  # a packed token's (types.MicroBatch): five indices of 8 bytes and eight numbers of 4
NUM_TERMS = 3  # a trained token's until its optimizer step: old and reference log-probs, importance weight
ID_BYTES = 4  # an id of a token's support
SERVED_CHOICE = 4  # bytes per chosen expert in a server


def step_responses(config: Config) -> int:
    """Return the number of responses in a train step."""
    return config.rollout.prompts_per_step * config.rollout.group_size


def choice_bytes(config: Config, architecture: ModelArchitecture) -> int:
    """Return the bytes of a token's chosen experts in all layers, 0 without routing replay."""
    if not config.rollout.routing_replay:
        return 0
    item = 1 if architecture.num_experts <= 256 else 2
    return architecture.num_layers * architecture.num_experts_per_token * item


def support_bytes(config: Config) -> int:
    """Return the most bytes of the ids that a token was drawn from, 0 if that is the whole vocabulary."""
    return ID_BYTES * config.rollout.top_k if config.rollout.is_restricted else 0


def read_bytes(config: Config) -> int:
    """Return the most bytes of a response's prompts as teachers in the trainer's processes read them, 0 if they read the
    policy's."""
    section = config.distillation
    readers = [teacher for teacher in section.models if teacher.prompt]
    everywhere = sum(not teacher.sources for teacher in readers)
    by_source = Counter(source for teacher in readers for source in set(teacher.sources))
    return ID_BYTES * config.data.max_prompt_tokens * (everywhere + max(by_source.values(), default=0))


def share_tokens(config: Config, responses: int, processes: int) -> int:
    """Return the tokens in a replica's share of these responses."""
    p = config.parallel
    replicas = max(1, processes // (p.tp_size * p.pp_size * p.cp_size))
    return -(-responses // replicas) * config.longest_trained


def batch_bytes(config: Config, architecture: ModelArchitecture, processes: int) -> int:
    """Return the bytes of samples on a device while a model is trained: one mini-batch, and the log-probs of the whole step."""
    packed = TOKEN_BYTES + choice_bytes(config, architecture) + support_bytes(config)
    terms = NUM_TERMS * FP32 * share_tokens(config, step_responses(config), processes) // config.parallel.cp_size
    return packed * mini_batch_tokens(config, processes) + terms


def mini_batch_tokens(config: Config, processes: int) -> int:
    """Return the tokens in a replica's share of an optimizer step."""
    responses = min(step_responses(config), config.training.mini_batch_prompts * config.rollout.group_size)
    return share_tokens(config, responses, processes)


def host_batch_bytes(
    config: Config, architecture: ModelArchitecture, processes: int, ranks_of_node: int, served_tokens: int
) -> int:
    """Return the bytes of a step's samples on the first node.

    Every rank holds its replica's mini-batches in pinned memory, rank 0 the chosen experts and supports of all responses, and the
    node's servers the chosen experts of the `served_tokens` in their caches.
    """
    chosen, responses = choice_bytes(config, architecture), step_responses(config)
    packed = (TOKEN_BYTES + chosen + support_bytes(config)) * share_tokens(config, responses, processes)
    packed += read_bytes(config) * share_tokens(config, responses, processes) // config.longest_trained
    of_response = (chosen + support_bytes(config)) * config.longest_trained + read_bytes(config)
    generated = of_response * math.ceil(config.rollout.oversample * responses)
    of_servers = SERVED_CHOICE * architecture.num_layers * architecture.num_experts_per_token * served_tokens
    return ranks_of_node * packed + generated + (of_servers if chosen else 0)
