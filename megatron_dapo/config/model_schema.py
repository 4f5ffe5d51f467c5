"""What a run is told of the model and of how it is cut over processes."""

from __future__ import annotations

from typing import Literal

from megatron_dapo.config.section import InputPath, NonNegativeInt, Offload, PositiveInt, Section

Dtype = Literal["float32", "bfloat16"]
LogprobImplementation = Literal["auto", "reference", "chunked", "triton", "te_fp8"]
Recompute = Literal["none", "selective", "full"]


class ModelConfig(Section):
    """The policy and how its numbers are held."""

    path: InputPath
    """Hugging Face folder of the initial policy (config.json, tokenizer, *.safetensors). Relative: from the recipe's
    folder."""

    dtype: Dtype = "float32"
    """Type of parameters and activations; main params and moments are float32 either way. bfloat16 on accelerators. How
    linear layers multiply is precision.recipe's, which may be FP8."""

    recompute_granularity: Recompute = "none"
    """Activations recomputed in the backward pass: none, selective (attention only) or full (whole layers). Raise it
    when activations do not fit in memory."""

    offload: Offload = "none"
    """What leaves the device for host memory while engines generate or a critic works: nothing, the optimizer state and
    gradients, or those and the weights. A reference policy likewise."""

    trust_remote_code: bool = False
    """Run Python code that ships in the model folder. Only for folders whose author you trust."""

    allow_random_init: bool = False
    """Start from random parameters where the folder holds no weights. Otherwise missing weights are an error."""

    logprob_implementation: LogprobImplementation = "auto"
    """What computes log-probs and entropy. auto: triton for a 16-bit model on compute capability 8.0 or more, else
    chunked. reference: full logits. chunked: tiles of tokens and vocabulary by torch. triton: own kernels. te_fp8: FP8
    products, an approximation."""

    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary scores are in memory at a time in the log-prob kernel. Lower it when the vocabulary is
    large."""


class ParallelConfig(Section):
    """How the model and the batch are cut over processes. data-parallel size = processes / (tp_size * pp_size *
    cp_size)."""

    tp_size: PositiveInt = 1
    """Ranks every weight matrix is cut over; must divide attention heads and key-value heads."""

    pp_size: PositiveInt = 1
    """Stages the layers are cut into."""

    vpp_size: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule); 1 is the plain schedule. Raise it to shrink the pipeline
    bubble."""

    cp_size: PositiveInt = 1
    """Ranks every sequence is cut over. Raise it when one sequence's activations do not fit."""

    ep_size: PositiveInt = 1
    """Ranks experts are cut over, within context x data. For mixture-of-experts models only."""

    etp_size: NonNegativeInt = 0
    """Ranks each expert's matrices are cut over; 0: tp_size. Another size than tp_size needs ep_size > 1."""

    sequence_parallel: bool = False
    """Cut the activations between matrix products over the tensor ranks as well. Saves memory; needs tp_size > 1."""

    use_distributed_optimizer: bool = True
    """Cut optimizer state over the data-parallel ranks."""

    num_processes: NonNegativeInt = 0
    """Processes of the policy to start on this machine, or expected of an outside launcher; critic.parallel.num_processes
    come on top. 0: tp_size * pp_size * cp_size, or what the launcher gives."""
