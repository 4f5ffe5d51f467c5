"""The metric schema: every name, its unit and its meaning. A step emits exactly these names, whatever is switched on.

A disabled term still has its metric (entropy without an entropy bonus, KL without a KL loss), so runs stay comparable.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Parts of a train step, in order. Their times and "unaccounted" sum to the step time.
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "generate": "sampling responses and scoring what is not hidden behind it",
        "values": "the critic's values",
        "logprobs": "old and reference log-probs by the trainer",
        "advantages": "rewards to advantages, packing and balancing",
        "train": "forward, backward and optimizer",
        "train_critic": "forward, backward and optimizer of the critic",
        "offload": "moving models between the device and host memory",
        "weight_sync": "new weights into the engine, verified",
        "evaluate": "held-out evaluation since the row before",
        "checkpoint": "saving a checkpoint since the row before",
        "record": "writing metrics and samples",
    }
)


# Ends of episodes that count as truncated, and their limits.
EPISODE_LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "max_turns": "environment.max_turns",
        "max_tokens": "rollout.max_response_tokens",
        "max_context": "environment.max_context_tokens",
        "length": "environment.max_turn_tokens",
        "seconds": "environment.episode_seconds",
    }
)


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


def _section(prefix: str, *rows: tuple[str, str, str]) -> list[Metric]:
    return [Metric(f"{prefix}/{name}", unit, meaning) for name, unit, meaning in rows]


_STEP = [
    *_section(
        "progress",
        ("generation_steps", "steps", "collections of a batch, so far"),
        ("optimizer_steps", "steps", "optimizer steps applied, so far"),
        ("skipped_optimizer_steps", "steps", "optimizer steps skipped for a non-finite loss or gradient, so far"),
        ("policy_version", "version", "version of the policy after this step"),
        ("epoch", "passes", "passes over the prompts, so far"),
    ),
    *_section(
        "rollout",
        ("groups_trained", "groups", "groups in this step's batch"),
        ("groups_generated", "groups", "groups finished for this step, surplus of earlier steps not counted"),
        ("groups_filtered_share", "fraction", "share of the finished groups that dynamic sampling filtered"),
        ("groups_all_correct_share", "fraction", "share of the finished groups in which every response was correct"),
        ("groups_all_wrong_share", "fraction", "share of the finished groups in which no response was correct"),
        ("groups_carried_over", "groups", "surplus groups kept for the next step"),
        ("groups_dropped_stale", "groups", "surplus groups dropped for their age; their prompts were queued again"),
        ("generation_rounds", "rounds", "prompts submitted / (prompts_per_step * oversample), rounded up"),
        ("groups_unfinished", "groups", "unfinished groups that the next step continues (rollout.partial_rollout)"),
        ("staleness_mean", "versions", "policy versions the trained groups are behind (by their oldest token), mean"),
        ("staleness_max", "versions", "the same, largest"),
        ("token_staleness_mean", "versions", "policy versions the trained response tokens are behind, mean"),
        ("token_staleness_max", "versions", "the same, largest"),
        ("partial_share", "fraction", "share of the trained responses sampled by more than one policy version"),
        ("responses_continued", "responses", "times a response continued after tokens it already had"),
        ("continued_tokens", "tokens", "prompt and response tokens that those continued after, as sent to the engine"),
        ("prefix_cached_share", "fraction", "share of those whose keys and values the engine still had (0 if none)"),
        (
            "tokens_unrouted",
            "tokens",
            "new tokens of aborted answers without their experts or supports, generated again (rollout.routing_replay, top_p, top_k)",
        ),
        ("draft_accepted", "tokens", "tokens that a decoding step gave a response, drafts included (sglang.drafting; 0: off)"),
        ("tokens_discarded", "tokens", "response tokens thrown away unjudged or too stale"),
        ("accuracy_trained", "fraction", "mean accuracy of the trained responses"),
        ("accuracy_generated", "fraction", "mean accuracy of all responses generated for this step"),
        ("response_tokens_mean", "tokens", "mean length of the trained responses"),
        ("response_tokens_max", "tokens", "longest trained response"),
        ("response_tokens_filtered_mean", "tokens", "mean length of the filtered responses (0 if none)"),
        ("prompt_tokens_mean", "tokens", "mean length of their prompts"),
        ("truncated_share", "fraction", "share of the trained responses cut at the length limit"),
        (
            "injected_share",
            "fraction",
            "share of the trained groups whose prompt was a rewrite (data.injection)",
        ),
        ("injected_accuracy", "fraction", "mean accuracy of their responses (0 if none)"),
        ("duplicate_share", "fraction", "share of the trained responses equal to another one of their group"),
    ),
    *_section(
        "quality",
        ("repetition_mean", "fraction", "1 - distinct 20-grams / 20-grams, mean over the trained responses"),
        ("repetition_p99", "fraction", "the same, 99th percentile"),
        *(
            (f"repetition_{kind}_{name}", "fraction", f"the same, {meaning}, of {kind} responses (0 if none)")
            for kind in ("correct", "wrong", "truncated")
            for name, meaning in (("mean", "mean"), ("p99", "99th percentile"))
        ),
        ("tail_loop_share", "fraction", "share of the trained responses that end in a loop: three copies or more"),
        ("tail_loop_truncated_share", "fraction", "the same of those that were cut at the length limit (0 if none)"),
        ("tail_loop_token_share", "fraction", "share of the trained responses' tokens in such loops"),
        ("nll_correct_p95", "nat", "mean -log-prob of a correct response's tokens, 95th percentile (0 if none)"),
        ("nll_correct_p995", "nat", "the same, 99.5th percentile"),
        ("compression_mean", "1", "compressed / raw bytes of the token ids (zlib), mean; low is repetitive"),
        ("compression_p01", "1", "the same, first percentile"),
        ("probability_mean", "probability", "mean probability of the trained responses' tokens when they were sampled"),
    ),
    *_section(
        "prompts",
        ("skipped", "prompts", "left out by rollout.prompt_filter (0 without it, like all below)"),
        ("audited", "prompts", "tried although the filter would leave them out"),
        (
            "tokens_saved",
            "tokens",
            "estimate: group_size times the mean length of their last groups, of those left out",
        ),
        ("filter_precision", "fraction", "share of the tried prompts to be left out whose groups did not disagree"),
        (
            "filter_recall",
            "fraction",
            "share of prompts whose groups do not disagree that are to be left out (an estimate)",
        ),
        ("calibration_error", "fraction", "mean |predicted - observed| share of groups that disagree, in ten bins"),
        ("put_off", "prompts", "wait for a long round (rollout.tail_rounds)"),
        ("is_long_round", "1", "1 if the step trains prompts that were put off"),
        ("group_size_min", "responses", "smallest trained group"),
        ("group_size_max", "responses", "largest trained group"),
    ),
    *_section(
        "window",
        ("responses", "responses", "worked on, each for one window (0 without windows, like all of this section)"),
        ("finished_share", "fraction", "share of them that ended"),
        ("continued_share", "fraction", "share of them that continued earlier windows"),
        ("per_finished", "windows", "windows that the finished ones took, mean"),
        ("waiting", "responses", "in the pool afterwards: unfinished, or not yet started of groups that were begun"),
        ("prefix_tokens", "tokens", "response tokens of earlier windows that were sent to the engine again as context"),
    ),
    *_section(
        "episodes",
        ("turns_mean", "turns", "turns of the policy in a trained episode (0 without [environment], like all of this section)"),
        ("sampled_tokens_mean", "tokens", "tokens that the policy sampled in one"),
        ("observed_tokens_mean", "tokens", "tokens of the environment's answers in one, which are not trained"),
        ("segments_mean", "sequences", "sequences besides the main one: an agent's other conversations, or turns.history = rewrite"),
        ("end_done_share", "fraction", "share of the trained episodes that their environment ended; windows: of those that ended"),
        *(
            (f"end_{name}_share", "fraction", f"share of those that ended truncated, at {limit}")
            for name, limit in EPISODE_LIMITS.items()
        ),
        ("calls_mean", "calls", "tool calls in an episode"),
        ("calls_ok_share", "fraction", "share of them that were run and answered"),
        ("calls_unparsable_share", "fraction", "share of them that could not be read"),
        ("calls_unknown_tool_share", "fraction", "share of them that named no tool"),
        ("calls_bad_arguments_share", "fraction", "share of them with arguments that do not fit the tool"),
        ("calls_error_share", "fraction", "share of them whose tool failed"),
        ("calls_timeout_share", "fraction", "share of them whose tool took too long"),
        ("calls_refused_share", "fraction", "share of them that the environment refused"),
        ("generating_seconds_mean", "s", "seconds that an episode's turns were with the engine"),
        ("acting_seconds_mean", "s", "seconds that its environment took"),
        ("waiting_seconds_mean", "s", "seconds that it waited for a place in an environment's process"),
        ("retries", "times", "lost environments of the trained episodes that were started again"),
        (
            "begun_anew",
            "times",
            "trained episodes begun anew because their environment did not repeat its answers (or environment.resume = restart)",
        ),
        ("groups_lost", "groups", "groups dropped for a lost episode; their prompts were queued again"),
        ("left_out", "episodes", "lost episodes without which their groups were trained (environment.on_lost = shrink)"),
    ),
    *_section(
        "reward",
        ("mean", "reward", "mean total reward of the trained responses"),
        ("std", "reward", "its standard deviation (divisor n)"),
        ("group_std_mean", "reward", "mean of the groups' standard deviations"),
        ("verifier_mean", "reward", "mean of the verifier's part"),
        ("overlong_mean", "reward", "mean of the soft overlong punishment"),
        ("perplexity_mean", "reward", "mean of the soft perplexity penalty"),
        ("format_mean", "reward", "mean of the reward of the form"),
        ("outcome_correct", "fraction", "share of the trained responses with this outcome"),
        ("outcome_wrong", "fraction", "the same for wrong answers"),
        ("outcome_unparsable", "fraction", "the same if no answer was found"),
        ("outcome_timeout", "fraction", "the same if the verifier ran out of time"),
        ("outcome_truncated", "fraction", "the same if the response was cut"),
        ("outcome_error", "fraction", "the same if the verifier failed"),
        ("outcome_unfinished", "fraction", "the same for responses that continue in the next window"),
        (
            "failed_share",
            "fraction",
            "share of the trained responses whose reward, or a part of it in a mixture, timed out or failed",
        ),
        ("disagreement_share", "fraction", "share of responses the shadow verifier scores otherwise (0 without one)"),
    ),
    *_section(
        "advantage",
        ("mean", "1", "mean over the trained responses"),
        ("std", "1", "standard deviation over the trained responses"),
        ("abs_max", "1", "largest magnitude"),
        ("zero_std_groups_share", "fraction", "share of trained groups whose rewards are all equal"),
    ),
    *_section(
        "actor",
        ("loss", "1", "policy loss, mean over the step's optimizer steps"),
        ("entropy", "nat", "entropy of the policy at the sampled temperature, with top-p and top-k of what they leave; mean over trained tokens"),
        ("kl_loss", "nat", "KL to the initial policy by algorithm.kl_estimator (0 without a reference)"),
        (
            "gkl_weighted_mse",
            "nat^2",
            "half the weighted variance of the reference's less the policy's log-probs (0 without algorithm.gkl)",
        ),
        ("gkl_cross_entropy", "nat", "cross-entropy of the policy towards the reference (0 without algorithm.gkl)"),
        ("ratio_mean", "1", "mean of new / old probability over trained tokens"),
        ("approx_kl_k1", "nat", "KL(old || new) by k1 over trained tokens"),
        ("approx_kl_k3", "nat", "KL(old || new) by k3 over trained tokens"),
        ("clip_low_share", "fraction", "share of trained tokens clipped at the lower bound"),
        ("clip_high_share", "fraction", "share of trained tokens clipped at the upper bound"),
        ("dual_clip_share", "fraction", "share of trained tokens bounded by the dual clip"),
        ("positive_nll", "nat", "-log-prob of correct responses (0 without algorithm.positive_example_coefficient)"),
        ("trained_tokens", "tokens", "response tokens in the loss, over all optimizer steps of this step"),
        ("grad_norm", "1", "global gradient norm before clipping, mean over the step's optimizer steps"),
        ("grad_norm_max", "1", "the same, largest"),
        ("learning_rate", "1", "of the last optimizer step"),
    ),
    *_section(
        "critic",
        ("loss", "1", "value loss, mean over trained tokens (0 without a critic, like all of this section)"),
        (
            "explained_variance",
            "1",
            "1 - Var(return - value) / Var(return), of the critic before this step's update; 0 if all returns are equal",
        ),
        ("explained_variance_first_decile", "1", "the same over the first tenth of each response"),
        ("explained_variance_middle_decile", "1", "over the middle tenth"),
        ("explained_variance_last_decile", "1", "over the last tenth"),
        ("value_mean", "reward", "mean value over the tokens the critic learns from"),
        ("return_mean", "reward", "mean of its targets"),
        ("clip_low_share", "fraction", "share of those tokens held at the lower bound of the value clip"),
        ("clip_high_share", "fraction", "the same at the upper bound"),
        ("trained_tokens", "tokens", "response tokens in the value loss, over all its optimizer steps of this step"),
        ("grad_norm", "1", "gradient norm before clipping, mean over its optimizer steps"),
        ("learning_rate", "1", "of its last optimizer step"),
        ("optimizer_steps", "steps", "optimizer steps of the critic applied, so far"),
        ("skipped_optimizer_steps", "steps", "skipped for a gradient that was not finite, so far"),
        ("nonfinite_samples", "responses", "left out of this step for a value or KL penalty that was not finite"),
        ("finished_share", "fraction", "share of the step's responses that are finished (below 1 with windows)"),
    ),
    *_section(
        "mismatch",
        ("abs_logprob_diff_mean", "nat", "mean |old_logprobs - rollout_logprobs| over trained tokens"),
        ("abs_logprob_diff_max", "nat", "the same, largest"),
        ("abs_prob_diff_mean", "probability", "mean difference of the probabilities"),
        ("abs_prob_diff_max", "probability", "the same, largest"),
        ("kl_k1", "nat", "KL(rollout || old) by k1"),
        ("kl_k3", "nat", "KL(rollout || old) by k3"),
        ("ess", "fraction", "effective sample size of the importance weights, (sum w)^2 / (n sum w^2)"),
        ("ppl_ratio", "1", "perplexity under the trainer / under the engine"),
        ("weight_mean", "1", "mean of the off-policy correction's weights (1 without a correction)"),
        ("bounded_share", "fraction", "share of trained tokens whose weight the correction bounded or masked"),
        ("masked_share", "fraction", "share of trained tokens whose weight the correction set to 0"),
        (
            "routing_agreement",
            "fraction",
            "share of the engine's choices of experts that the trainer's routers would have made (1 without a replay)",
        ),
        *(
            (f"{lag}_{name}", unit, f"{meaning} {age}")
            for lag, age in (
                ("lag0", "sampled by the policy trained"),
                ("lag1", "sampled one policy version earlier"),
                ("lag2plus", "sampled two or more policy versions earlier"),
            )
            for name, unit, meaning in (
                ("token_share", "fraction", "share of trained tokens"),
                ("abs_logprob_diff_mean", "nat", "mean |old_logprobs - rollout_logprobs| of trained tokens"),
                ("kl_k3", "nat", "KL(rollout || old) by k3 over trained tokens"),
            )
        ),
    ),
    *_section(
        "throughput",
        ("samples_per_s", "responses/s", "trained responses / step time without evaluation and checkpoint"),
        ("generated_tokens_per_s", "tokens/s", "response tokens generated / time it took, during training or not"),
        ("trained_tokens_per_s", "tokens/s", "prompt and response tokens trained / train time"),
        ("generated_tokens", "tokens", "response tokens generated in this step, filtered ones included"),
    ),
    *_section(
        "async",
        ("trainer_idle", "fraction", "share of the step, without evaluation and checkpoint, that the trainer waits for responses"),
        ("engine_idle", "fraction", "share of the step, without evaluation and checkpoint, in which a server has no request (mean)"),
    ),
    *_section(
        "checkpoint",
        ("blocked_seconds", "s", "time for which the run waited for checkpoints since the row before"),
        (
            "save_seconds",
            "s",
            "of the newest checkpoint known to be in place since the row before, from its begin to its commit (0 if none)",
        ),
        ("loaded_node_bytes", "bytes", "files of tensors that the resume of this attempt read in memory of their node"),
        (
            "loaded_peer_bytes",
            "bytes",
            "files of tensors that the resume of this attempt read in memory of another node",
        ),
        ("loaded_storage_bytes", "bytes", "files of tensors that the resume of this attempt read in storage"),
    ),
    *_section(
        "nodes",
        ("alerts", "alerts", "faulty nodes found by their metrics in this attempt, so far (docs/nodes.md)"),
        *(
            row
            for name in PHASES
            for row in (
                (f"{name}_slowest_rank", "rank", f"rank that worked longest in phase {name} lately (-1: not compared)"),
                (f"{name}_over_median", "fraction", "how much longer than the median of the ranks (0 if not compared)"),
            )
        ),
    ),
    *_section(
        "memory",
        ("host_rss_mib", "MiB", "resident host memory of rank 0 at the end of the step"),
        (
            "device_unallocated_mib",
            "MiB",
            "most device memory that torch has reserved on rank 0 minus the most that it has allocated, so far (0 without a GPU)",
        ),
    ),
    *_section(
        "time",
        *((name, "s", meaning) for name, meaning in PHASES.items()),
        ("unaccounted", "s", "step time outside all phases"),
        ("step", "s", "wall time since the row before"),
    ),
]

_EVALUATION = _section(
    "eval",
    ("avg_at_k", "fraction", "accuracy of all responses, mean over problems"),
    ("avg_at_k_low", "fraction", "lower end of its bootstrap interval over problems"),
    ("avg_at_k_high", "fraction", "upper end of it"),
    ("pass_at_k", "fraction", "problems with at least one correct response"),
    ("cons_at_k", "fraction", "problems whose most frequent answer is correct"),
    ("truncated_share", "fraction", "responses cut at the length limit"),
    ("response_tokens_mean", "tokens", "mean length of a response"),
    ("seconds", "s", "time the evaluation took"),
    ("trained_problems", "problems", "held-out problems that are also trained on"),
)

STEP_METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _STEP})
EVALUATION_METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _EVALUATION})


REWARD_PART = "reward/part/"  # prefix of the means of a user-defined reward's parts
RECORDED = "episodes/recorded/"  # prefix of the means of what environments recorded of episodes
DISTILLED = "distillation/"  # prefix of mean divergences: DISTILLED + teacher/NAME/divergence or source/NAME/divergence
SOURCE = "rollout/source/"  # prefix of the metrics of one source of prompts: SOURCE + NAME/METRIC
SOURCE_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "accuracy_generated": "accuracy of the source's responses, before the filter",
        "groups_generated": "its groups that were scored",
        "groups_filtered_share": "share of them that the filter dropped",
    }
)


def checked(schema: Mapping[str, Metric], values: Mapping[str, float]) -> dict[str, float]:
    """Return `values` as floats in the schema's order, followed by those of reward parts, recorded figures and sources.

    Raises ValueError naming every unknown and missing metric.
    """
    own = sorted(name for name in values if name.startswith((REWARD_PART, RECORDED, SOURCE, DISTILLED)) or _is_of_source(name, schema))
    unknown = [f"{name}{_near(name, schema)}" for name in values if name not in schema and name not in own]
    missing = [name for name in schema if name not in values]
    if unknown or missing:
        parts = [
            f"unknown: {', '.join(unknown)}" if unknown else "",
            f"missing: {', '.join(missing)}" if missing else "",
        ]
        raise ValueError(
            "metrics of a step are exactly those of the schema; " + "; ".join(part for part in parts if part)
        )
    return {name: float(values[name]) for name in (*schema, *own)}


def _is_of_source(name: str, schema: Mapping[str, Metric]) -> bool:
    """Return True for a source's evaluation metric: eval/NAME/avg_at_k."""
    section, _, metric = name.rpartition("/")
    head, _, source = section.partition("/")
    return head == "eval" and bool(source) and f"eval/{metric}" in schema


def _near(name: str, schema: Mapping[str, Metric]) -> str:
    close = difflib.get_close_matches(name, schema, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
