"""Sections of sampling: groups, their sizes and filters, rejection sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    FunctionPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Rule,
    Section,
)

Engine = Literal["embedded", "sglang"]
DynamicSampling = Literal["hard", "soft"]
ReplayOrder = Literal["oldest", "newest", "advantage", "staleness"]
Order = Literal["start", "guarded"]
PromptOrder = Literal["shuffled", "priority"]
PromptWeight = Literal["equal", "responses"]
PromptFilterName = Literal["none", "bounds", "model"]
OnExhausted = Literal["train_partial", "stop", "error"]
Selection = Literal["diverse", "random"]
MAX_SUPPORT = 4096  # ids that a token may be drawn from if they are recorded; SGLang's own bound
Embedding = Literal["hidden_states", "encoder", "ngrams"]


class BudgetConfig(Section):
    """Group sizes by difficulty: more responses for hard prompts, fewer for easy ones, with the same total."""

    enabled: bool = False
    """Choose each prompt's group size: as many responses as include a correct one with probability 0.95, estimated from
    the prompt's pass rate in earlier visits and fitted to prompts_per_step * group_size in total."""

    min_size: Annotated[int, Bounds(ge=2)] = 4
    """Smallest group."""

    max_size: Annotated[int, Bounds(ge=2)] = 64
    """Largest group."""

    prompt_weight: PromptWeight = "equal"
    """equal: every prompt has the same weight in the loss; its advantages are multiplied by mean size / size.
    responses: a prompt's weight is its number of responses."""


class PromptFilterConfig(Section):
    """Filter that leaves out prompts whose groups would not disagree."""

    name: PromptFilterName = "none"
    """none: every prompt is tried. bounds: a prompt is left out if the 95 % bound of its pass rate is below margin or
    above 1 - margin. model: a prompt is left out if a model of its earlier visits predicts that its next group
    disagrees with a probability below margin."""

    margin: Annotated[float, Bounds(gt=0, lt=0.5)] = 0.05
    """Threshold of the filter, see name."""

    audit_share: Annotated[float, Bounds(gt=0, le=1)] = 0.02
    """Share of the filtered prompts that are sampled anyway, to measure how often the filter is wrong."""


class RolloutConfig(Section):
    """Sampling of responses, and the filter that groups must pass to be trained."""

    engine: Engine = "embedded"
    """embedded: transformers generation inside the trainer's processes, with weights from the weight bridge. sglang:
    SGLang servers."""

    prompts_per_step: PositiveInt = 512  # 16 responses each: the rollout batch of DAPO's paper
    """Groups (prompts) of one rollout batch, i.e. of one train step."""

    group_size: PositiveInt = 16
    """Responses per prompt."""

    max_response_tokens: PositiveInt = 1024
    """Longest response in tokens, stop token included; a longer one is cut off and counts as truncated."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs are taken at the same temperature."""

    top_p: ProbabilityMass = 1.0
    """Nucleus mass. Below 1, engines record the ids that each token was drawn from, and the trainer renormalizes over them:
    log-probs, entropy and KL are those of the sampled distribution. Needs top_k, which bounds the record."""

    top_k: NonNegativeInt = 0
    """Sample only from the k likeliest tokens, 2 to 4096; 0: off. Trained exactly, as top_p is. A token then carries 4 bytes
    for each id it was drawn from, and 4 * top_k in a micro-batch."""

    oversample: AtLeastOne = 1.0  # below 1 the first round could never fill the batch
    """Prompts in flight at a time, as a multiple of prompts_per_step. Above 1, later groups are generated while a batch
    waits for its longest response; the next batches train them, within max_staleness. Groups are trained in the order
    in which they were started, whatever their length."""

    max_num_gen_batches: NonNegativeInt = 10  # verl's DAPO recipe
    """Most generation rounds of prompts_per_step * oversample prompts in one step; after them, on_exhausted applies. 0:
    no limit."""

    on_exhausted: OnExhausted = "train_partial"
    """Action when rounds or prompts run out: train on the complete groups so far, stop cleanly with a checkpoint, or
    save a checkpoint and fail."""

    filter_groups: bool = True
    """Dynamic sampling: keep a group only if accuracy_min < mean accuracy < accuracy_max, and refill the batch."""

    dynamic_sampling: DynamicSampling = "hard"
    """hard: refill the batch until it has prompts_per_step groups that pass the filter. soft: start prompts_per_step groups
    and train those that pass, however few (at least one): every step costs the same, but batch sizes vary."""

    accuracy_min: Fraction = 0.0
    """Exclusive lower bound on the mean accuracy (0..1, never the shaped reward) of a kept group."""

    accuracy_max: Fraction = 1.0
    """Exclusive upper bound on the mean accuracy of a kept group."""

    group_filter: FunctionPath = ""
    """User-defined function that replaces the two bounds, as "package.module:function" or "path/to/file.py:function":
    `Group` -> True to train it; see docs/python.md. "": none."""

    max_staleness: NonNegativeInt = 0
    """Most policy versions that a carried-over group may lag when it is trained; older groups are dropped and their
    prompts queued again. Values above 0 need algorithm.off_policy.correction. tppo: 1 generates the next windows while
    these are trained, on servers with separate devices."""

    partial_rollout: bool = False
    """Continue responses that are unfinished when a batch is full in the next generation step; each token records the
    version that sampled it. Off: the generation step waits for them to end. Takes effect only within max_staleness."""

    routing_replay: bool = False
    """Train a mixture of experts with the experts that the SGLang servers chose (R3, arXiv:2510.11370): the router
    still weights them, with gradients, and trainer and engine differ less. Each token then carries layers x
    experts-per-token bytes from the servers to the loss, twice that with more than 256 experts."""

    order: Order = "start"
    """start: a batch trains the groups that were started first, and waits for them. guarded: it trains groups as they
    end, and waits only for those that a later batch may not train within max_staleness: steps are shorter, nothing is
    dropped, and a group's age follows its length. The first max_staleness steps go by start. oversample above 1 gives
    it a choice."""

    ahead: NonNegativeFloat = 0.0
    """Groups started for later batches, as a multiple of prompts_per_step: at most max_staleness. 0: max_staleness. Less
    trains younger responses: with 0.5 and max_staleness = 1, half of a batch is started by its own policy."""

    tail_rounds: bool = False
    """Tail batching for runs on policy: a batch trains the groups that end first of oversample times as many, and the other
    prompts are put off. Once a batch of them waits, a long round samples them anew and trains all. Steps are shorter; their
    responses are, too, and what is put off is thrown away."""

    replay_order: ReplayOrder = "oldest"
    """Order in which waiting groups are trained. oldest: those started first; none is passed over. newest: those
    started last. advantage: those with the largest spread of rewards. staleness: those of the newest policy. All but
    oldest may leave groups waiting until they are too old, and so select what is trained; oversample above 1 gives them
    a choice."""

    prompt_order: PromptOrder = "shuffled"
    """shuffled: epochs with each prompt once. priority: after the first epoch, prompts with mixed or few outcomes first
    (the upper confidence bound of T-PPO's prompt pool)."""

    budget: BudgetConfig = BudgetConfig()
    """Group sizes by difficulty."""

    prompt_filter: PromptFilterConfig = PromptFilterConfig()
    """Filter that leaves prompts out for a while."""

    slots_per_rank: PositiveInt = 64
    """Responses one rank of the embedded engine generates at a time. Raise it while memory allows."""

    @property
    def is_restricted(self) -> bool:
        """True if tokens are not drawn from the whole vocabulary, and what each was drawn from is recorded."""
        return self.top_p < 1 or self.top_k > 0

    def broken_rules(self) -> Iterator[Rule]:
        yield from self._broken_rules_of_groups()
        if self.is_restricted and not 1 < self.top_k <= MAX_SUPPORT:
            yield Rule(
                f"1 < rollout.top_k <= {MAX_SUPPORT}",
                f"set rollout.top_k = {MAX_SUPPORT} or less, or rollout.top_p = 1.0 and rollout.top_k = 0",
                when="rollout.top_p < 1 or rollout.top_k > 0",
                reason="the ids that each token was drawn from are recorded, and it bounds them",
            )
        is_on_policy = self.oversample == 1 and self.max_staleness == 0
        if self.dynamic_sampling == "soft" and not (self.filter_groups and is_on_policy):
            yield Rule(
                "rollout.filter_groups and rollout.oversample == 1 and rollout.max_staleness == 0",
                "set rollout.filter_groups = true, rollout.oversample = 1.0 and rollout.max_staleness = 0, or "
                'rollout.dynamic_sampling = "hard"',
                path="rollout.dynamic_sampling",
                when='rollout.dynamic_sampling == "soft"',
                reason="a batch is what passes of the prompts started for it",
            )
        if self.order == "guarded" and not (self.oversample > 1 and self.replay_order == "oldest"):
            yield Rule(
                'rollout.oversample > 1 and rollout.replay_order == "oldest"',
                'set rollout.oversample = 2.0 and rollout.replay_order = "oldest", or rollout.order = "start"',
                path="rollout.order",
                when='rollout.order == "guarded"',
                reason="it chooses among more groups than a batch has, by their end and their age",
            )
        if self.tail_rounds and not (
            self.oversample > 1 and not self.max_staleness and not self.budget.enabled and self.dynamic_sampling == "hard"
        ):
            yield Rule(
                'rollout.oversample > 1 and rollout.max_staleness == 0 and not rollout.budget.enabled and '
                'rollout.dynamic_sampling == "hard"',
                "set rollout.oversample = 1.1, rollout.max_staleness = 0, rollout.budget.enabled = false and "
                'rollout.dynamic_sampling = "hard", or rollout.tail_rounds = false',
                path="rollout.tail_rounds",
                when="rollout.tail_rounds",
                reason="surplus groups are put off; with staleness later batches train what they have",
            )
        if self.ahead > self.max_staleness:
            yield Rule(
                "rollout.ahead <= rollout.max_staleness",
                f"set rollout.ahead = {self.max_staleness} or less, or rollout.max_staleness = {math.ceil(self.ahead)}",
                reason="what is started further ahead is too old when its batch is trained",
            )
        if self.replay_order != "oldest" and not self.oversample > 1:
            yield Rule(
                "rollout.oversample > 1",
                'set rollout.oversample = 2.0, or rollout.replay_order = "oldest"',
                path="rollout.replay_order",
                when='rollout.replay_order != "oldest"',
                reason="no group waits that another could be preferred to",
            )

    def _broken_rules_of_groups(self) -> Iterator[Rule]:
        size, budget = self.group_size, self.budget
        # Accuracies are multiples of 1 / size; bounds that lie between two neighboring multiples would keep no group.
        if self.filter_groups and size > 1:
            if not any(self.accuracy_min < k / size < self.accuracy_max for k in range(size + 1)):
                yield Rule(
                    "any(rollout.accuracy_min < k / rollout.group_size < rollout.accuracy_max for k in range(rollout.group_size + 1))",
                    "set rollout.accuracy_min = 0.0 and rollout.accuracy_max = 1.0",
                    when="rollout.filter_groups and rollout.group_size > 1",
                    reason="every group would be filtered",
                )
        if self.group_filter and not self.filter_groups:
            yield Rule(
                "rollout.filter_groups",
                'set rollout.filter_groups = true, or rollout.group_filter = ""',
                path="rollout.group_filter",
                when="rollout.group_filter",
                reason="it takes the place of the bounds on accuracy",
            )
        if budget.enabled and not budget.min_size <= size <= budget.max_size:
            yield Rule(
                "rollout.budget.min_size <= rollout.group_size <= rollout.budget.max_size",
                f"set rollout.budget.min_size = {min(budget.min_size, size)} and "
                f"rollout.budget.max_size = {max(budget.max_size, size)}",
                when="rollout.budget.enabled",
                reason="group_size is the mean",
            )


class RejectionSamplingConfig(Section):
    """Sampling and selection by `megatron-dapo rejection-sample`, which keeps responses for `sft`."""

    num_samples: PositiveInt = 8
    """Responses sampled per prompt, with rollout.temperature, rollout.top_p and rollout.max_response_tokens."""

    selection: Selection = "diverse"
    """diverse: by length, similarity and clusters, see the keys below. random: equally many of each prompt's correct
    responses at random, for comparison."""

    min_tokens: NonNegativeInt = 1
    """Shortest response in tokens, stop token included."""

    max_tokens: NonNegativeInt = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    length_quantiles: Annotated[tuple[float, float], Bounds(ge=0, le=1)] = (0.05, 0.95)
    """Quantiles of the lengths of a prompt's correct responses; shorter and longer ones are left out."""

    near_duplicate_similarity: Annotated[float, Bounds(gt=0, le=1)] = 0.8
    """Jaccard similarity of word 5-grams from which two responses to a prompt are near duplicates; the shorter one is
    kept."""

    embedding: Embedding = "hidden_states"
    """hidden_states: mean of the policy's last hidden states over the response. encoder: the same from the model in
    encoder_path. ngrams: counts of hashed word n-grams, without a model."""

    encoder_path: str = ""
    """Hugging Face directory of a sentence encoder, for embedding = encoder. Relative: from the current directory."""

    cluster_similarity: Annotated[float, Bounds(gt=-1, le=1)] = 0.95
    """Cosine similarity to a cluster's first response from which a response belongs to the cluster."""

    max_per_cluster: PositiveInt = 1
    """Most responses kept per cluster; the shortest ones are kept."""

    max_per_prompt: PositiveInt = 4
    """Most responses kept per prompt."""

    hard_pass_rate: Fraction = 0.25
    """max_per_prompt does not apply to prompts with a smaller share of correct responses: all their clusters are
    kept."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.embedding == "encoder" and not self.encoder_path:
            yield Rule(
                'rejection_sampling.encoder_path != ""',
                'set rejection_sampling.encoder_path to a Hugging Face directory, or rejection_sampling.embedding = "hidden_states"',
                when='rejection_sampling.embedding == "encoder"',
            )
        if self.length_quantiles[0] > self.length_quantiles[1]:
            yield Rule(
                "rejection_sampling.length_quantiles[0] <= rejection_sampling.length_quantiles[1]",
                "set rejection_sampling.length_quantiles = [0.05, 0.95]",
            )
