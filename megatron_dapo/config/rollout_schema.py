"""Sections for everything up to a scored group: prompts, sampling, SGLang servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    FunctionPath,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Rule,
    Section,
    Seed,
)

TASK_PREFIX = "reasoning_gym:"  # marks a source whose problems are generated, not read
Template = Literal["chat", "plain"]
Engine = Literal["embedded", "sglang"]
InjectionTemplate = Literal["distractor", "wrong_hint", "noise", "answer_range"]  # of data.injection.TEMPLATES
DynamicSampling = Literal["hard", "soft"]
ReplayOrder = Literal["oldest", "newest", "advantage", "staleness"]
PromptOrder = Literal["shuffled", "priority"]
PromptWeight = Literal["equal", "responses"]
PromptFilterName = Literal["none", "bounds", "model"]
OnExhausted = Literal["train_partial", "stop", "error"]
Selection = Literal["diverse", "random"]
Embedding = Literal["hidden_states", "encoder", "ngrams"]


class InjectionConfig(Section):
    """Adversarial prompt injection: rewrites of training prompts with the same answer; see
    `megatron_dapo/data/injection.py`. It changes the training distribution: watch held-out accuracy and, with
    wrong_hint, whether the policy still uses correct hints."""

    templates: tuple[InjectionTemplate, ...] = ()
    """Harder: distractor (an irrelevant statement), wrong_hint (a confident wrong answer; only if the answer is a whole
    number), noise (capitals and spaces). Easier: answer_range (ten numbers that include the answer, a whole number).
    Empty: off."""

    when: Literal["filtered", "visit"] = "filtered"
    """filtered: after dynamic sampling has dropped a group, the next step samples a harder rewrite of its prompt if all
    responses were right, an easier one if all were wrong; templates whose groups are kept are chosen more often. visit:
    a rewrite replaces the prompt itself, whatever its pass rate."""

    rate: Fraction = 0.25
    """filtered: largest share of rewrites among a batch's groups. visit: share of visits that get a rewrite."""

    ramp_prompts: NonNegativeInt = 0
    """Visits over which rate is reached linearly from 0. 0: the full rate from the beginning."""


class ColumnsConfig(Section):
    """Names of the data files' columns; dots lead into nested fields."""

    prompt: str = "prompt"
    """Chat messages, chat messages as JSON text, or plain text."""

    answer: str = "reward_model.ground_truth"
    """Gold answer. "": none, for a reward function that needs none."""


class SourceConfig(Section):
    """One source of training prompts, a table [[data.sources]]. Keys that it leaves out are as in [data]."""

    path: str
    """A file or saved directory as in data.train_paths, or reasoning_gym:TASK for generated problems that bring their
    verifier."""

    name: str = ""
    """Label in metrics, and the data_source of rows that have none. "": the name of the file or task."""

    weight: float = 1.0
    """Relative share of the prompts that come from this source; above 0."""

    columns: ColumnsConfig | None = None
    """Names of its columns."""

    system_prompt: str | None = None
    """System message for its prompts that have none."""

    prompt_template: str | None = None
    """Text of a prompt's last turn."""

    size: int = 10_000
    """Problems generated per epoch, for a reasoning_gym task; above 0."""

    fresh: bool = True
    """Generate new problems for each epoch, for a reasoning_gym task. Off: every epoch repeats those of the first."""

    seed: int = 0
    """Seed of the generated problems."""

    settings: dict[str, Any] = {}
    """Settings of the task, e.g. { min_terms = 2, max_terms = 3 }."""

    @property
    def makes_fresh_problems(self) -> bool:
        """True for a task whose problems do not repeat."""
        return self.fresh and self.path.startswith(TASK_PREFIX)


class DataConfig(Section):
    """Prompts to train and evaluate on."""

    train_paths: tuple[InputPath, ...] = ()
    """Rows: .parquet, .jsonl, .json (a list of objects) or .csv files, directories written by `save_to_disk` of datasets, or
    hf://OWNER/NAME of the Hub. Relative: from the recipe's directory."""

    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, tables [[data.sources]], instead of train_paths."""

    eval_paths: tuple[InputPath, ...] = ()
    """Held-out data with the same columns and in the same formats. With several files, each has separate metrics under
    its file name, in addition to those over all problems. Empty: a part of train_paths is held out."""

    held_out_share: Fraction = 0.1
    """Share of the prompts of train_paths that is held out if eval_paths is empty: evaluated and never trained, at least 4 and at
    most 64 prompts, those whose text has the smallest hashes. The same file gives the same ones. With fewer than 20
    prompts none is held out. 0: none."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns. The defaults are those of DAPO-Math-17k."""

    system_prompt: str = ""
    """System message for prompts that have none. "": none."""

    prompt_template: str = "{prompt}"
    """Text of a prompt's last turn, with {prompt} in place of the original turn, e.g.
    "{prompt} End with a line 'Answer: ...'."."""

    template: Template = "chat"
    """chat: the tokenizer's chat template. plain: the unchanged contents of the messages, for models without a
    template."""

    chat_template_options: dict[str, Any] = {}
    """Variables passed to the chat template, e.g. { enable_thinking = false }."""

    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt in tokens; longer ones are dropped and counted."""

    deduplicate: bool = True
    """Keep one of several equal (prompt, answer) rows, and report how many there were."""

    shuffle_seed: Seed = 0
    """Seed of the order of prompts, separate from run.seed so that two runs can share the order."""

    order: FunctionPath = ""
    """User-defined function that orders the prompts of each epoch, as "package.module:function" or
    "path/to/file.py:function": (prompts, epoch) -> every index once; see docs/python.md. "": shuffled."""

    injection: InjectionConfig = InjectionConfig()
    """Harder and easier rewrites of training prompts."""

    max_epochs: NonNegativeInt = 0
    """Passes over the prompts after which the data is exhausted (see rollout.on_exhausted). 0: no limit."""

    @property
    def holds_out(self) -> bool:
        """True if a part of train_paths is evaluated instead of eval_paths."""
        return bool(self.train_paths) and not self.eval_paths and self.held_out_share > 0

    @property
    def has_held_out(self) -> bool:
        """True if there are problems to evaluate."""
        return bool(self.eval_paths) or self.holds_out

    def broken_rules(self) -> Iterator[Rule]:
        yield from self._broken_rules_of_sources()
        if self.template == "plain" and self.chat_template_options:
            yield Rule(
                "not data.chat_template_options",
                'leave data.chat_template_options out, or set data.template = "chat"',
                when='data.template == "plain"',
                reason="the plain template is no chat template and takes none",
            )
        if self.injection.when == "visit" and "answer_range" in self.injection.templates:
            yield Rule(
                '"answer_range" not in data.injection.templates',
                'leave answer_range out of data.injection.templates, or set data.injection.when = "filtered"',
                when='data.injection.when == "visit"',
                reason="it is for prompts that were not solved",
            )
        if "{prompt}" not in self.prompt_template:
            yield Rule(
                '"{prompt}" in data.prompt_template',
                "write data.prompt_template with the word prompt in braces, which stands for the text of the row",
            )

    def _broken_rules_of_sources(self) -> Iterator[Rule]:
        if not self.train_paths and not self.sources:
            yield Rule(
                "data.train_paths or data.sources",
                'set data.train_paths = ["train.jsonl"], or tables [[data.sources]]',
                reason="there is nothing to train on",
            )
        if self.train_paths and self.sources:
            yield Rule(
                "not (data.train_paths and data.sources)",
                "leave one of data.sources and data.train_paths out",
                reason="a source is a file with a weight",
            )
        if any(not source.weight > 0 or source.size < 1 for source in self.sources):
            yield Rule(
                "not any(not source.weight > 0 or source.size < 1 for source in data.sources)",
                "give every table of data.sources a weight above 0 and, if it is a task, a size of at least 1",
            )
        if self.order and self.sources:
            yield Rule(
                "not data.sources",
                'set data.order = "", or name all files in data.train_paths',
                when="data.order",
                reason="each of several sources has separate epochs",
            )
        if self.injection.templates and any(source.makes_fresh_problems for source in self.sources):
            yield Rule(
                "not any(source.makes_fresh_problems for source in data.sources)",
                "set fresh = false in the tables of data.sources that name a task, or data.injection.templates = []",
                when="data.injection.templates",
                reason="a problem that is made for one epoch comes once, and has no history and no rewrite",
            )


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

    prompts_per_step: PositiveInt = 512  # with 16 responses each, the rollout batch of DAPO's paper
    """Groups (prompts) of one rollout batch, i.e. of one train step."""

    group_size: PositiveInt = 16
    """Responses per prompt."""

    max_response_tokens: PositiveInt = 1024
    """Longest response in tokens, stop token included; a longer one is cut off and counts as truncated."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs are taken at the same temperature."""

    top_p: ProbabilityMass = 1.0
    """Nucleus mass. Below 1, the engine renormalizes probabilities and the trainer does not: refused unless
    allow_biased_sampling."""

    top_k: NonNegativeInt = 0
    """Sample only from the k likeliest tokens; 0: off. Above 0, it biases like top_p < 1: refused unless
    allow_biased_sampling."""

    allow_biased_sampling: bool = False
    """Allow top_p < 1 or top_k > 0 in training rollouts, although the importance ratios are then wrong."""

    oversample: AtLeastOne = 1.0  # below 1 the first round could never fill the batch
    """Prompts in flight at a time, as a multiple of prompts_per_step. Above 1, later groups are generated while a batch
    waits for its longest response; the next batches train them, within max_staleness. Groups are trained in the order
    in which they were started, whatever their length."""

    max_num_gen_batches: NonNegativeInt = 10  # as in verl's recipe of DAPO
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
    prompts queued again. Values above 0 need algorithm.off_policy.correction."""

    partial_rollout: bool = False
    """Continue responses that are unfinished when a batch is full in the next generation step; each token records the
    version that sampled it. Off: the generation step waits for them to end. Takes effect only within max_staleness."""

    routing_replay: bool = False
    """Train a mixture of experts with the experts that the SGLang servers chose (R3, arXiv:2510.11370): the router
    still weights them, with gradients, and trainer and engine differ less. Each token then carries layers x
    experts-per-token bytes from the servers to the loss, twice that with more than 256 experts."""

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

    def broken_rules(self) -> Iterator[Rule]:
        yield from self._broken_rules_of_groups()
        bias = "the trainer's log-probs are over the whole vocabulary"
        if self.top_p != 1 and not self.allow_biased_sampling:
            yield Rule(
                "rollout.top_p == 1 or rollout.allow_biased_sampling",
                "set rollout.top_p = 1.0, or rollout.allow_biased_sampling = true",
                reason=bias,
            )
        if self.top_k != 0 and not self.allow_biased_sampling:
            yield Rule(
                "rollout.top_k == 0 or rollout.allow_biased_sampling",
                "set rollout.top_k = 0, or rollout.allow_biased_sampling = true",
                reason=bias,
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


Placement = Literal["colocated", "disaggregated"]
SharedMemory = Literal["host", "device"]
WeightTransport = Literal["shared_memory", "p2p", "disk"]
Quantization = Literal["none", "fp8"]
AttentionBackend = Literal["", "fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native"]
SamplingBackend = Literal["", "flashinfer", "pytorch"]


class SglangConfig(Section):
    """SGLang servers, used if rollout.engine = "sglang": started on every node, or given by their URLs."""

    python: str = ""
    """Python interpreter of the environment that SGLang is installed in. "": the trainer's. Relative: from the current
    directory."""

    tp_size: PositiveInt = 1
    """Tensor-parallel size of a server."""

    ep_size: PositiveInt = 1
    """Expert-parallel size of a server, within its tensor ranks. For mixture-of-experts models."""

    servers_per_node: PositiveInt = 1
    """Servers started on every node of the trainer."""

    urls: tuple[str, ...] = ()
    """Servers that are already running (on other nodes of the same job); none are started then. Needs api_key_file."""

    api_key_file: str = ""  # a file, not the key: recipes and resolved configurations are shared
    """File with the API key of the servers in urls, readable only by its owner. "": servers started here get a new key
    in the run's directory."""

    host: str = "auto"
    """Address that started servers listen on. auto: loopback in a run on one node; on several nodes, each node's
    address on the route to the rendezvous host. 0.0.0.0: every interface, with the address of auto in the URL. With
    anything but loopback, other nodes can try keys."""

    environment: tuple[str, ...] = ()
    """Names of environment variables that started servers get in addition to a list of harmless ones
    (docs/security.md), e.g. SGLANG_LOG_MS. Secrets are not on that list."""

    placement: Placement = "colocated"
    """colocated: servers share the trainer's devices; generation and training alternate. disaggregated: servers have
    separate devices; with rollout.max_staleness above 0, the next batch is generated while this one is trained."""

    weight_sync_transport: WeightTransport = "shared_memory"
    """Transport of the weight sync. shared_memory: each engine rank's shard through the node's shared memory. p2p:
    point-to-point from all trainer ranks at once, for servers on other nodes. disk: a Hugging Face directory."""

    shared_memory: SharedMemory = "host"
    """Memory that weight_sync_transport = "shared_memory" uses. host: the node's, pinned, for servers on GPUs as well.
    device: the GPU that an engine rank shares with a trainer rank, opened by all through CUDA IPC; it has run on one
    GPU only."""

    weight_sync_bucket_mb: PositiveInt = 64
    """Mebibytes of weights that an engine rank receives at a time. A sync needs two buckets of extra memory."""

    quantization: Quantization = "none"
    """none: servers hold the weights in model.dtype. fp8: servers hold their linear layers in e4m3 with one scale per
    128 x 128 values, rounded during the weight sync as the trainer rounds. Needs algorithm.off_policy.correction,
    because servers then sample from a different policy than the one that is trained."""

    allow_quantization_bias: bool = False
    """Allow quantization without an off-policy correction, although the importance ratios are then wrong."""

    fp8_step0_max_mean_abs: PositiveFloat = 0.1
    """Replaces mismatch.step0_max_mean_abs if quantization = fp8, because the gap of the first batch then comes from
    rounding. Servers on GPUs round activations as well, and so does a trainer in FP8; the fixed prompts are then also
    compared with this limit instead of the tighter one."""

    max_running_requests: PositiveInt = 128
    """Responses a server generates at a time."""

    max_total_tokens: NonNegativeInt = 0
    """Tokens that a server's KV cache holds. 0: as many as mem_fraction_static allows; on a CPU, the most that
    max_running_requests responses of full length need."""

    mem_fraction_static: Annotated[float, Bounds(gt=0, lt=1)] = 0.6
    """Share of a device's memory for a server's weights and KV cache. Lower it when the trainer on the same device runs
    out of memory."""

    enable_deterministic_inference: bool = True  # the name of SGLang's own flag
    """Seed every response separately (SGLang's deterministic mode, somewhat slower). Off: rollouts are not
    reproducible."""

    attention_backend: AttentionBackend = ""
    """Attention kernels of started servers on GPUs. "": SGLang's choice for the GPU and the model. Rollout log-probs depend on
    it (mismatch/*), so the shipped layouts set it."""

    sampling_backend: SamplingBackend = ""
    """Sampling kernels of started servers on GPUs. "": SGLang's choice. Deterministic mode always uses pytorch."""

    prefill_cuda_graph: bool = True
    """Capture CUDA graphs of prefill on GPUs, in addition to those of decoding. When off, a server starts 45 s earlier
    on an H100 and holds hundreds of MiB less while it sleeps; long responses spend little time in prefill."""

    start_timeout_seconds: PositiveFloat = 600.0
    """Seconds that a server may take to start."""

    request_timeout_seconds: PositiveFloat = 1800.0
    """Longest time in seconds that a server may go without finishing a response. A request's time in the queue does not
    count while others finish."""

    abort_timeout_seconds: PositiveFloat = 60.0
    """Seconds without an answer from any server, after running requests were aborted, until servers that have not
    answered are given up. Time does not count while answers arrive: with rollout.routing_replay they are 2 to 4 KB per
    token."""

    weight_sync_timeout_seconds: PositiveFloat = 600.0
    """Seconds that each phase of a weight update (pause, flush, transfer, verify) may take."""

    max_restarts: NonNegativeInt = 3
    """Restarts of each dead server within an hour; after them, the attempt ends with a checkpoint and exit code 75.
    Consecutive restarts of servers that never served count however long they took."""

    keep_seconds: NonNegativeFloat = 300.0
    """Seconds that started servers outlive failed trainer processes if torchrun or slurm.sh restarts these: the next
    attempt takes over the servers. 0: servers end with the trainer, and under Slurm the whole job is requeued."""

    parity_interval: NonNegativeInt = 10
    """Train steps between comparisons of trainer and engine log-probs on fixed prompts. The first update is always
    compared. 0: only that one."""

    @property
    def kernels(self) -> str:
        """Description of the servers' kernels on GPUs."""
        chosen = self.attention_backend or "SGLang's", self.sampling_backend or "SGLang's"
        return f"servers: attention {chosen[0]}, sampling {chosen[1]}, prefill graphs {'on' if self.prefill_cuda_graph else 'off'}"


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
