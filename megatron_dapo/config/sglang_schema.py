"""Section of SGLang servers."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.section import Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Placement = Literal["colocated", "disaggregated"]
SharedMemory = Literal["host", "device"]
WeightTransport = Literal["shared_memory", "p2p", "disk"]
Quantization = Literal["none", "fp8"]
AttentionBackend = Literal["", "fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native"]
SamplingBackend = Literal["", "flashinfer", "pytorch"]
UpdatePause = Literal["abort", "retract", "in_place"]
Drafting = Literal["off", "history"]


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
    """Servers started on every node of the trainer. With nodes_per_server above 1: servers that each node has a part of."""

    nodes_per_server: PositiveInt = 1
    """Nodes over which a server's tensor ranks are spread, tp_size / nodes_per_server on each. Above 1 for models that the
    GPUs of one node cannot hold; servers are then disaggregated and get their weights by p2p."""

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

    weight_sync_full_interval: PositiveInt = 1
    """Weight updates from one full one to the next; those between send only the elements that changed, and the checksums
    of all are compared as ever. 1: all are full. Worth it for servers across a slow network and learning rates near 1e-6,
    at which 0.5 to 2 % of bf16 weights change; an update that changes more than about a tenth is full. Each trainer rank
    then keeps a copy of what it sends. Not for weight_sync_transport = "disk"."""

    update_pause: UpdatePause = "abort"
    """What a weight sync does with unfinished responses of disaggregated servers. abort: they come back with their tokens
    and are sent again. retract: they stay in the server, which drops all keys and values and computes them again by the
    new weights. in_place: they stay with their keys and values, which the new weights then read; only later requests
    compute theirs anew. retract and in_place need SGLang 0.5.23."""

    drafting: Drafting = "off"
    """history: servers on GPUs guess next tokens from what the policy has said before, to these prompts and in these groups, and
    verify several in one step (SGLang's NGRAM). Sampling stays what it is. Meant for the tail of a batch: with many
    responses at a time verifying costs more than it saves."""

    draft_tokens: Annotated[int, Bounds(ge=2)] = 8
    """Tokens of each response that a decoding step verifies if drafting = history, the one that is certain included."""

    draft_corpus_tokens: PositiveInt = 1_000_000
    """Tokens of earlier responses that each server looks drafts up in. The prompts with the longest expected responses come
    first; about 1 KB of host memory a token, twice while it is renewed."""

    draft_age: PositiveInt = 100
    """Policy versions after which earlier responses to a prompt are dropped. An epoch, if prompts are visited in each."""

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
    def ranks_per_node(self) -> int:
        """Ranks of a server on each of its nodes."""
        return max(1, self.tp_size // self.nodes_per_server)

    @property
    def places(self) -> str:
        """Description of where servers are."""
        over = f", each over {self.nodes_per_server} nodes" if self.nodes_per_server > 1 else ""
        return f"{self.servers_per_node} a node{over}"

    @property
    def kernels(self) -> str:
        """Description of the servers' kernels on GPUs."""
        chosen = self.attention_backend or "SGLang's", self.sampling_backend or "SGLang's"
        return f"servers: attention {chosen[0]}, sampling {chosen[1]}, prefill graphs {'on' if self.prefill_cuda_graph else 'off'}"
