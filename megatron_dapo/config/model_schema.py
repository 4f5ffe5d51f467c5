"""Sections of the models and of their optimizers: types, precision, parallelism, AdamW."""

from __future__ import annotations

from typing import Annotated, Literal

from megatron_dapo.config.section import (
    Bounds,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Offload,
    PositiveFloat,
    PositiveInt,
    Section,
)

Dtype = Literal["float32", "bfloat16"]
AttentionImplementation = Literal["auto", "flash"]
LogprobImplementation = Literal["auto", "reference", "chunked", "chunked_bf16", "triton", "triton_tuned", "te_fp8"]
Recompute = Literal["none", "selective", "full"]


class ModelConfig(Section):
    """The policy and how its numbers are held."""

    path: InputPath
    """Hugging Face directory of the initial policy (config.json, tokenizer, *.safetensors). Relative: from the recipe's
    directory."""

    family: str = ""
    """A `Family` of the user's own for a model_type that is not supported, as "package.module:NAME" or "path/to/file.py:NAME", see
    docs/python.md. "": one of those that are."""

    dtype: Dtype = "float32"
    """Type of parameters and activations; main params and moments are float32 either way. bfloat16 on accelerators. How
    linear layers multiply is precision.recipe's, which may be FP8."""

    recompute_granularity: Recompute = "none"
    """Activations recomputed in the backward pass: none, selective (attention only) or full (whole layers). Raise it
    when activations do not fit in memory."""

    offload: Offload = "none"
    """What leaves the device for host memory while engines generate or a critic works: nothing, the optimizer state and
    gradients, or those and the weights. A reference policy likewise."""

    trust_remote_code: bool = False  # the name of transformers' own argument
    """Run Python code that ships in the model directory. Only for directories whose author you trust."""

    allow_random_init: bool = False
    """Start from random parameters where the directory holds no weights. Otherwise missing weights are an error."""

    logprob_implementation: LogprobImplementation = "auto"
    """What computes log-probs and entropy. auto: triton for a 16-bit model on compute capability 8.0 or more, else
    chunked. reference: full logits. chunked: tiles of tokens and vocabulary by torch. chunked_bf16: the same for a bf16 model on
    a CPU, whose logits are rounded to bf16. triton: own kernels. triton_tuned: the same, compiled in the shapes that were the
    fastest here, once measured. te_fp8: FP8 products, an approximation."""

    attention_implementation: AttentionImplementation = "auto"
    """Kernels of attention. auto: Transformer Engine's within its layers, else torch's. flash: torch's flash
    attention within either, for a 16-bit model on compute capability 8.0 or more, with torch 2.10 and without context
    parallelism; it needs no plan for each new shape of a micro-batch."""

    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary scores are in memory at a time in the log-prob kernel. Lower it when the vocabulary is
    large."""

    logprob_kept_gb: NonNegativeFloat = 0.0
    """Most memory of a rank, in GB (10^9 bytes), in which a training pass keeps a micro-batch's logits until its backward
    pass, which otherwise computes them again: one of four matrix products of the head. They take 2 bytes for each response
    token and column of the rank's vocabulary by Triton's kernels, else 4; a micro-batch with more keeps none."""


class ParallelConfig(Section):
    """Parallel sizes of the policy. data-parallel size = processes / (tp_size * pp_size *
    cp_size)."""

    tp_size: PositiveInt = 1
    """Ranks every weight matrix is cut over; must divide attention heads and key-value heads."""

    pp_size: PositiveInt = 1
    """Stages the layers are cut into."""

    vpp_size: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule); 1 is the plain schedule. Raise it to shrink the pipeline
    bubble."""

    first_stage_layers: NonNegativeInt = 0
    """Layers of the first pipeline stage; the other stages share the rest evenly. 0: an even share. For models whose number
    of layers pp_size does not divide, and where the embedding makes the first stage slower."""

    last_stage_layers: NonNegativeInt = 0
    """Layers of the last pipeline stage, which also has the log-prob head. 0: an even share."""

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


RecipeName = Literal["", "fp32", "bf16", "fp8_blockwise", "fp8_current", "fp8_delayed"]


class PrecisionConfig(Section):
    """Precision of the linear layers. Whatever is not computed in FP8 has model.dtype; main params and moments are float32."""

    recipe: RecipeName = ""
    """"": as model.dtype says. fp32, bf16: the same by name; must agree with model.dtype. fp8_blockwise: e4m3 with a
    scale for 128 values and 128 x 128 of a weight, which SGLang serves (compute capability 9.0 and CUDA 12.9; emulated
    on a CPU). fp8_current, fp8_delayed: one scale a tensor, of the tensor or of earlier steps."""

    num_layers_at_start_in_bf16: NonNegativeInt = 0
    """First layers of the model that stay in model.dtype under an FP8 recipe. Raise it when FP8 costs learning."""

    num_layers_at_end_in_bf16: NonNegativeInt = 0
    """Last layers of the model that stay in model.dtype under an FP8 recipe."""

    fp8_param: bool = False
    """Hold the weights of FP8 layers as FP8 alone, beside their float32 main params. Saves memory; Transformer Engine only,
    needs parallel.use_distributed_optimizer."""


Schedule = Literal["constant", "cosine", "linear"]
OptimizerImplementation = Literal["auto", "apex"]
WarmupUnit = Literal["train_step", "optimizer_step"]
# Elements of main params that a step has on the device at a time under `on_host`: 0.8 GB with their moments. More would not move
# faster, and less would pay a launch and a wait for every small parameter.
PIECE_ELEMENTS = 1 << 26


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 1e-6  # DAPO's paper
    """Peak learning rate."""

    warmup_steps: NonNegativeInt = 0
    """Linear warm-up from 0 over this many steps, counted in warmup_unit."""

    warmup_unit: WarmupUnit = "train_step"
    """Unit of warmup_steps and of the decay: train_step (rollout batches trained) or optimizer_step (mini-batches).
    Generation steps are never counted."""

    schedule: Schedule = "constant"
    """After warm-up: constant, or cosine / linear down to min_learning_rate at run.total_steps."""

    min_learning_rate: NonNegativeFloat = 0.0
    """Final learning rate of the cosine and linear schedules."""

    weight_decay: NonNegativeFloat = 0.1  # DAPO's published script
    """Decoupled weight decay; not applied to biases and norms."""

    # Below 1, because Adam's bias correction divides by 1 - beta ** step.
    betas: Annotated[tuple[float, float], Bounds(ge=0, lt=1)] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient. 0: off."""

    implementation: OptimizerImplementation = "auto"
    """Kernels of AdamW, of the gradient's norm and of its scaling. auto: Transformer Engine's, else NVIDIA apex's, else
    torch's, the first that can be imported. apex: apex's."""

    on_host: bool = False
    """Keep float32 main params and moments in host memory, also while the model trains. A step brings them to the device a
    piece at a time, with the same results. 12 bytes a parameter less on the GPUs, for their way over PCIe and back each step."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 2e-6  # VAPO's paper: twice the policy's
    """Peak learning rate of the critic."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW of supervised fine-tuning and its learning-rate schedule."""

    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate of supervised fine-tuning."""

    schedule: Schedule = "cosine"
    """After warm-up: constant, or cosine / linear down to min_learning_rate at the last train step."""
