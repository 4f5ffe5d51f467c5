"""SGLang servers: where they run, how weights reach them, and how long anything of theirs may take."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.section import Bounds, NonNegativeInt, PositiveFloat, PositiveInt, Section

Placement = Literal["colocated", "disaggregated"]
SharedMemory = Literal["host", "device"]
WeightTransport = Literal["shared_memory", "p2p", "disk"]
Quantization = Literal["none", "fp8"]


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

    api_key_file: str = ""
    """File with the API key of the servers in urls, readable by its owner alone. "": servers started here get a fresh
    key in the run's folder."""

    host: str = "auto"
    """Address the started servers listen on. auto: loopback in a run on one node; on several, each node's own address
    towards the rendezvous host. 0.0.0.0: every interface, with the address of auto in the URL. Anything but loopback lets
    other nodes try the key."""

    placement: Placement = "colocated"
    """colocated: servers share the trainer's devices, generation and training alternate. disaggregated: servers have
    devices of their own; with rollout.max_staleness above 0 the next batch is generated while this one is trained."""

    weight_sync_transport: WeightTransport = "shared_memory"
    """How weights reach the servers. shared_memory: every engine rank's own shard through shared memory of the node. p2p: from
    all trainer ranks at once by point-to-point, for servers on other nodes. disk: a Hugging Face folder."""

    shared_memory: SharedMemory = "host"
    """Where the memory of weight_sync_transport = "shared_memory" lies. host: in the machine's, on a GPU as well. device: on the GPU that an
    engine rank shares with a trainer rank, opened by all through CUDA IPC; it has not run on a GPU yet."""

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

    router: bool = False
    """Send generation through SGLang's router instead of balancing it here. Needs sglang_router beside SGLang, and at
    least two servers."""

    max_running_requests: PositiveInt = 128
    """Responses a server generates at a time."""

    max_total_tokens: NonNegativeInt = 0
    """Tokens a server's KV cache holds. 0: as many as mem_fraction_static of its memory allows; on a CPU the most that
    max_running_requests responses of full length need."""

    mem_fraction_static: Annotated[float, Bounds(gt=0, lt=1)] = 0.6
    """Share of a device's memory for a server's weights and KV cache. Lower it when the trainer on the same device runs
    out of memory."""

    enable_deterministic_inference: bool = True
    """Give every response its own seed (SGLang's deterministic mode, somewhat slower). Off: rollouts cannot be
    repeated."""

    start_timeout_seconds: PositiveFloat = 600.0
    """Seconds a server may take to come up."""

    request_timeout_seconds: PositiveFloat = 1800.0
    """Seconds one response may take, its time in the queue included."""

    weight_sync_timeout_seconds: PositiveFloat = 600.0
    """Seconds each state of a weight update (pause, flush, transfer, verify) may take."""

    max_restarts: NonNegativeInt = 3
    """Times a dead server is started again in one run; after that the run ends with a checkpoint."""

    parity_interval: NonNegativeInt = 10
    """Train steps between comparisons of fixed prompts' log-probs, trainer against engine. The first update is always
    compared. 0: only that one."""
