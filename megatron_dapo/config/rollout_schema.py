"""Sections of everything up to a scored group: prompts, sampling, SGLang servers, rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Section,
    Seed,
)

TASK_PREFIX = "reasoning_gym:"  # of a source that is made, not read
Template = Literal["chat", "plain"]
Engine = Literal["embedded", "sglang"]
InjectionTemplate = Literal["distractor", "wrong_hint", "noise", "answer_range"]  # of data.injection.TEMPLATES
DynamicSampling = Literal["hard", "soft"]
ReplayOrder = Literal["oldest", "newest", "advantage", "staleness"]
PromptOrder = Literal["shuffled", "priority"]
PromptWeight = Literal["equal", "responses"]
PromptFilterName = Literal["none", "bounds", "model"]
OnExhausted = Literal["train_partial", "stop", "error"]
Responses = Literal["sampled", "given"]
Selection = Literal["diverse", "random"]
Embedding = Literal["hidden_states", "encoder", "ngrams"]


class InjectionConfig(Section):
    """Adversarial prompt injection: rewrites of training prompts with the same answer, see `megatron_dapo/data/injection.py`. It
    changes what the policy is trained on: watch held-out accuracy, and with wrong_hint the use of hints that are right."""

    templates: tuple[InjectionTemplate, ...] = ()
    """Harder: distractor (an irrelevant statement), wrong_hint (a confident wrong answer; for answers that are whole numbers),
    noise (capitals and spaces). Easier: answer_range (ten numbers that hold the answer, a whole number). Empty: off."""

    when: Literal["filtered", "visit"] = "filtered"
    """filtered: after a group that dynamic sampling dropped the next step samples a harder rewrite of its prompt if all were right,
    an easier one if all were wrong; templates whose groups are kept are chosen more often. visit: in the place of the prompt
    itself, whatever its pass rate."""

    rate: Fraction = 0.25
    """filtered: largest share of a batch's groups that are of rewrites. visit: share of the visits that get one."""

    ramp_prompts: NonNegativeInt = 0
    """Visits over which that share grows linearly from 0. 0: the full share from the beginning."""


class ColumnsConfig(Section):
    """Columns of the data files that hold what a run needs; dots lead into nested fields."""

    prompt: str = "prompt"
    """Chat messages, the same as JSON text, or a plain text."""

    answer: str = "reward_model.ground_truth"
    """Gold answer. "": there is none, for a reward function that needs none."""


class SourceConfig(Section):
    """One source of training prompts, a table [[data.sources]]. What it leaves out is as in [data]."""

    path: str
    """A file or saved directory as in data.train_paths, or reasoning_gym:TASK for made problems with a verifier of their own."""

    name: str = ""
    """Label in metrics, and data_source of rows that have none. "": the file's name, or the task's."""

    weight: float = 1.0
    """Share of the prompts drawn, relative to the other sources' weights; above 0."""

    columns: ColumnsConfig | None = None
    """Names of its columns."""

    system_prompt: str | None = None
    """System message in front of its prompts that have none."""

    prompt_template: str | None = None
    """Text of a prompt's last turn."""

    size: int = 10_000
    """Problems that are made for an epoch, of a reasoning_gym task; above 0."""

    fresh: bool = True
    """Make other problems for each epoch, of a reasoning_gym task. Off: every epoch has the first one's."""

    seed: int = 0
    """Seed of the made problems; another one gives others."""

    settings: dict[str, Any] = {}
    """Settings of the task, e.g. { min_terms = 2, max_terms = 3 }."""

    @property
    def makes_fresh_problems(self) -> bool:
        """True for a task whose problems come once."""
        return self.fresh and self.path.startswith(TASK_PREFIX)


class DataConfig(Section):
    """Prompts to train and evaluate on."""

    train_paths: tuple[InputPath, ...] = ()
    """Rows: .parquet, .jsonl, .json (a list of objects) or .csv files, directories written by `save_to_disk` of datasets, or
    hf://OWNER/NAME of the Hub. Relative: from the recipe's directory."""

    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, tables [[data.sources]], instead of train_paths."""

    eval_paths: tuple[InputPath, ...] = ()
    """Held-out data with the same columns, of the same kinds. Of several each has metrics of its own, by its file's name, beside
    those of all problems. Empty: no evaluation."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns; those of DAPO-Math-17k where nothing else is said."""

    system_prompt: str = ""
    """System message in front of prompts that have none. "": none."""

    prompt_template: str = "{prompt}"
    """Text of a prompt's last turn, with {prompt} for the turn itself, e.g. "{prompt} End with a line 'Answer: ...'."."""

    template: Template = "chat"
    """chat: the tokenizer's chat template. plain: the contents of the messages as they are, for models without a
    template."""

    chat_template_options: dict[str, Any] = {}
    """Variables that the chat template gets, e.g. { enable_thinking = false }."""

    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt in tokens; longer ones are dropped and counted."""

    deduplicate: bool = True
    """Keep one of several equal (prompt, answer) rows, and say how many there were."""

    shuffle_seed: Seed = 0
    """Seed of the order of prompts, apart from run.seed so that two runs may share the order."""

    order: str = ""
    """Function of the user's own that orders the prompts of each epoch, as "package.module:function" or
    "path/to/file.py:function": (prompts, epoch) -> every index once, see docs/python.md. "": shuffled."""

    injection: InjectionConfig = InjectionConfig()
    """Harder and easier rewrites of training prompts."""

    max_epochs: NonNegativeInt = 0
    """Passes over the prompts after which the data is exhausted (see rollout.on_exhausted). 0: no limit."""


class BudgetConfig(Section):
    """Responses for each prompt by its difficulty: more for hard ones, fewer for easy ones, as many in all."""

    enabled: bool = False
    """Give each prompt a group size of its own: as many responses as hold a right one with probability 0.95, by its pass
    rate in earlier visits, fitted to prompts_per_step * group_size."""

    min_size: Annotated[int, Bounds(ge=2)] = 4
    """Smallest group."""

    max_size: Annotated[int, Bounds(ge=2)] = 64
    """Largest group."""

    prompt_weight: PromptWeight = "equal"
    """equal: every prompt counts alike in the loss, its advantages times mean size / size. responses: a prompt counts as
    often as it has responses."""


class PromptFilterConfig(Section):
    """Prompts that are left out because their groups would not disagree."""

    name: PromptFilterName = "none"
    """none: every prompt is tried. bounds: left out if the 95 % bound of its pass rate is below margin or above 1 -
    margin. model: left out if a model of its earlier visits gives its next group a chance below margin to disagree."""

    margin: Annotated[float, Bounds(gt=0, lt=0.5)] = 0.05
    """Threshold of the filter, see name."""

    audit_share: Annotated[float, Bounds(gt=0, le=1)] = 0.02
    """Share of the prompts to be left out that are tried all the same. They say how often the filter is wrong."""


class RolloutConfig(Section):
    """Sampling of responses, and the filter that groups pass before they are trained."""

    engine: Engine = "embedded"
    """embedded: transformers generation inside the trainer's processes, fed by the weight bridge. sglang: SGLang
    servers."""

    responses: Responses = "sampled"
    """Origin of the responses that are trained. sampled: the engine's. given: those in the rows of data.train_paths, learned by
    maximum likelihood; set by `megatron-dapo sft`."""

    prompts_per_step: PositiveInt = 512  # with 16 responses each, the rollout batch of DAPO's paper
    """Groups (prompts) of one rollout batch, i.e. of one train step."""

    group_size: PositiveInt = 16
    """Responses per prompt."""

    max_response_tokens: PositiveInt = 1024
    """Longest response in tokens, stop token included; a longer one is cut and counts as truncated."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs are taken at the same temperature."""

    top_p: ProbabilityMass = 1.0
    """Nucleus mass. Below 1 the engine renormalizes what the trainer does not: refused unless allow_biased_sampling."""

    top_k: NonNegativeInt = 0
    """Only the k likeliest tokens; 0: off. Above 0 it biases like top_p < 1: refused unless allow_biased_sampling."""

    allow_biased_sampling: bool = False
    """Allow top_p < 1 or top_k > 0 in training rollouts, knowing that the importance ratios are then wrong."""

    oversample: AtLeastOne = 1.0  # below 1 the first round could never fill the batch
    """Prompts in flight at a time as a multiple of prompts_per_step. Above 1 later groups are generated while a batch waits
    for its longest response; they are trained by the next batches, within max_staleness. A group's place in the order of
    starts decides when it is trained, not its length."""

    max_num_gen_batches: NonNegativeInt = 10  # as in verl's recipe of DAPO
    """A generation round is prompts_per_step * oversample prompts; after this many in one step collecting ends as
    on_exhausted says. 0: no limit."""

    on_exhausted: OnExhausted = "train_partial"
    """What happens when rounds or prompts run out: train on the full groups there are, stop cleanly with a checkpoint,
    or fail, after a checkpoint as well."""

    filter_groups: bool = True
    """Dynamic sampling: keep a group only if accuracy_min < mean accuracy < accuracy_max, and refill the batch."""

    dynamic_sampling: DynamicSampling = "hard"
    """hard: refill the batch until it has prompts_per_step groups that pass the filter. soft: start prompts_per_step groups
    and train those that pass, however few (at least one): every step costs the same, and its batch varies."""

    accuracy_min: Fraction = 0.0
    """Exclusive lower bound on the mean accuracy (0..1, never the shaped reward) of a group that is kept."""

    accuracy_max: Fraction = 1.0
    """Exclusive upper bound on the mean accuracy of a group that is kept."""

    group_filter: str = ""
    """Function of the user's own in place of the two bounds, as "package.module:function" or "path/to/file.py:function": a
    `Group` -> True to train it, see docs/python.md. "": none."""

    max_staleness: NonNegativeInt = 0
    """Policy versions a carried-over group may be behind when it is trained; older ones are dropped and their
    prompts queued again. Above 0 needs algorithm.off_policy.correction."""

    partial_rollout: bool = False
    """Continue responses that are unfinished when a batch is full from where they are in the next generation step, each
    token with the version that sampled it. Off: the generation step ends when they have ended. Has an effect within
    max_staleness only."""

    routing_replay: bool = False
    """Train a mixture of experts with the experts that the SGLang servers chose (R3, arXiv:2510.11370): the router still weighs
    them, with gradients, and trainer and engine differ less. A token then takes layers x experts a token bytes from the
    servers to the loss, twice that with more than 256 experts."""

    replay_order: ReplayOrder = "oldest"
    """Order in which groups that wait are trained. oldest: those started first, none is passed over. newest: those
    started last. advantage: those with the largest spread of rewards. staleness: those of the newest policy. All but oldest
    may leave groups until they are too old, and choose what is trained; oversample above 1 gives them a choice."""

    prompt_order: PromptOrder = "shuffled"
    """shuffled: epochs, each prompt once. priority: after the first epoch, prompts with mixed or few outcomes first (the
    upper confidence bound of T-PPO's prompt pool)."""

    budget: BudgetConfig = BudgetConfig()
    """Group sizes by difficulty."""

    prompt_filter: PromptFilterConfig = PromptFilterConfig()
    """Prompts that are left out for a while."""

    slots_per_rank: PositiveInt = 64
    """Responses one rank of the embedded engine generates at a time. Raise it while memory allows."""


Placement = Literal["colocated", "disaggregated"]
SharedMemory = Literal["host", "device"]
WeightTransport = Literal["shared_memory", "p2p", "disk"]
Quantization = Literal["none", "fp8"]
AttentionBackend = Literal["", "fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native"]
SamplingBackend = Literal["", "flashinfer", "pytorch"]


class SglangConfig(Section):
    """SGLang servers, where rollout.engine = "sglang": started on every node, or given by their URLs."""

    python: str = ""
    """Interpreter of the environment SGLang is installed in; "": the trainer's own. Relative: from the current
    directory."""

    tp_size: PositiveInt = 1
    """Tensor-parallel size of a server."""

    ep_size: PositiveInt = 1
    """Ranks a server's experts are dealt out over, within its tensor ranks. For mixture-of-experts models."""

    servers_per_node: PositiveInt = 1
    """Servers started on every node of the trainer."""

    urls: tuple[str, ...] = ()
    """Servers that run already (other nodes of the same job), instead of starting any. Needs api_key_file."""

    api_key_file: str = ""  # a file, not the key: recipes and resolved configurations are shared
    """File with the API key of the servers in urls, readable by its owner alone. "": servers started here get a fresh
    key in the run's directory."""

    host: str = "auto"
    """Address the started servers listen on. auto: loopback in a run on one node; on several, each node's own address
    towards the rendezvous host. 0.0.0.0: every interface, with the address of auto in the URL. Anything but loopback lets
    other nodes try the key."""

    environment: tuple[str, ...] = ()
    """Names of environment variables that started servers get beside a list of harmless ones (docs/security.md), e.g. SGLANG_LOG_MS.
    Secrets of the environment are not on that list."""

    placement: Placement = "colocated"
    """colocated: servers share the trainer's devices, generation and training alternate. disaggregated: servers have
    devices of their own; with rollout.max_staleness above 0 the next batch is generated while this one is trained."""

    weight_sync_transport: WeightTransport = "shared_memory"
    """Transport of the weight sync. shared_memory: every engine rank's own shard through shared memory of the node. p2p: from
    all trainer ranks at once by point-to-point, for servers on other nodes. disk: a Hugging Face directory."""

    shared_memory: SharedMemory = "host"
    """Memory of weight_sync_transport = "shared_memory". host: the node's, pinned, for servers on GPUs as well. device: the
    GPU that an engine rank shares with a trainer rank, opened by all through CUDA IPC; it has run on one GPU alone."""

    weight_sync_bucket_mb: PositiveInt = 64
    """Mebibytes of weights an engine rank receives at a time. Two buckets are the extra memory a sync needs."""

    quantization: Quantization = "none"
    """none: servers hold the weights in model.dtype. fp8: their linear layers in e4m3 with a scale for every 128 x 128
    values, rounded on the way to them as the trainer rounds. Needs algorithm.off_policy.correction, as servers then
    sample from another policy than the one that is trained."""

    allow_quantization_bias: bool = False
    """Allow quantization without an off-policy correction, knowing that the importance ratios are then wrong."""

    fp8_step0_max_mean_abs: PositiveFloat = 0.1
    """Takes the place of mismatch.step0_max_mean_abs where quantization = fp8: the gap of the first batch is then the
    rounding's. Servers on GPUs round activations as well, and so does a trainer in FP8; fixed prompts are then held
    against this, too, not against the tighter one."""

    max_running_requests: PositiveInt = 128
    """Responses a server generates at a time."""

    max_total_tokens: NonNegativeInt = 0
    """Tokens a server's KV cache holds. 0: as many as mem_fraction_static of its memory allows; on a CPU the most that
    max_running_requests responses of full length need."""

    mem_fraction_static: Annotated[float, Bounds(gt=0, lt=1)] = 0.6
    """Share of a device's memory for a server's weights and KV cache. Lower it when the trainer on the same device runs
    out of memory."""

    enable_deterministic_inference: bool = True  # the name of SGLang's own flag
    """Give every response its own seed (SGLang's deterministic mode, somewhat slower). Off: rollouts cannot be
    repeated."""

    attention_backend: AttentionBackend = ""
    """Attention kernels of started servers on GPUs. "": SGLang's choice for the GPU and the model. Rollout log-probs depend on
    it (mismatch/*), so that layouts name it."""

    sampling_backend: SamplingBackend = ""
    """Sampling kernels of started servers on GPUs. "": SGLang's choice. Deterministic mode always takes pytorch."""

    prefill_cuda_graph: bool = True
    """Capture CUDA graphs of prefill on GPUs, next to those of decoding. Off, a server starts 45 s earlier on an H100 and keeps
    hundreds of MiB less while it sleeps; long responses spend little time in prefill."""

    start_timeout_seconds: PositiveFloat = 600.0
    """Seconds a server may take to come up."""

    request_timeout_seconds: PositiveFloat = 1800.0
    """Seconds in which a server may finish no response at all. A request's time in the queue does not count while others
    finish."""

    abort_timeout_seconds: PositiveFloat = 60.0
    """Seconds without an answer of any server, after the requests under way were aborted, until servers that owe some are given
    up. Time does not count while answers arrive: with rollout.routing_replay they are 2 to 4 KB a token."""

    weight_sync_timeout_seconds: PositiveFloat = 600.0
    """Seconds each state of a weight update (pause, flush, transfer, verify) may take."""

    max_restarts: NonNegativeInt = 3
    """Times within an hour that a dead server is started again, for each server; then the attempt ends with a checkpoint and exit
    code 75. Restarts between which servers never served count whatever they took."""

    keep_seconds: NonNegativeFloat = 300.0
    """Seconds that started servers outlive trainer processes which failed, where torchrun or slurm.sh starts these again: the
    next attempt takes the servers over. 0: servers end with them, and under Slurm the whole job is requeued."""

    parity_interval: NonNegativeInt = 10
    """Train steps between comparisons of fixed prompts' log-probs, trainer against engine. The first update is always
    compared. 0: only that one."""

    @property
    def kernels(self) -> str:
        """Kernels of servers on GPUs, in words."""
        chosen = self.attention_backend or "SGLang's", self.sampling_backend or "SGLang's"
        return f"servers: attention {chosen[0]}, sampling {chosen[1]}, prefill graphs {'on' if self.prefill_cuda_graph else 'off'}"


class RejectionSamplingConfig(Section):
    """Responses that `megatron-dapo rejection-sample` draws from the policy, and those that it keeps for `sft`."""

    num_samples: PositiveInt = 8
    """Responses sampled for each prompt, as rollout.temperature, rollout.top_p and rollout.max_response_tokens say."""

    selection: Selection = "diverse"
    """diverse: by length, likeness and clusters, as below. random: as many of each prompt's correct responses, at random; for
    comparison."""

    min_tokens: NonNegativeInt = 1
    """Shortest response in tokens, stop token included."""

    max_tokens: NonNegativeInt = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    length_quantiles: Annotated[tuple[float, float], Bounds(ge=0, le=1)] = (0.05, 0.95)
    """Quantiles of the lengths of a prompt's correct responses; shorter and longer ones are left out."""

    near_duplicate_similarity: Annotated[float, Bounds(gt=0, le=1)] = 0.8
    """Jaccard similarity of word 5-grams from which on two responses to a prompt are nearly equal; the shorter one stays."""

    embedding: Embedding = "hidden_states"
    """hidden_states: the policy's last ones, their mean over the response. encoder: those of the model in encoder_path. ngrams:
    counts of hashed word n-grams, without a model."""

    encoder_path: str = ""
    """Hugging Face directory of a sentence encoder, for embedding = encoder. Relative: from the current directory."""

    cluster_similarity: Annotated[float, Bounds(gt=-1, le=1)] = 0.95
    """Cosine similarity to a cluster's first response from which on a response belongs to it."""

    max_per_cluster: PositiveInt = 1
    """Responses kept of a cluster, the shortest ones."""

    max_per_prompt: PositiveInt = 4
    """Responses kept of a prompt."""

    hard_pass_rate: Fraction = 0.25
    """Prompts with a smaller share of correct responses have no max_per_prompt: all their clusters are kept."""
