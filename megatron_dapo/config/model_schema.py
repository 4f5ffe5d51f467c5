"""Sections of the models and of their optimizers: types, precision, parallelism, AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from megatron_dapo.config.section import (
    Bounds,
    FunctionPath,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Offload,
    PositiveFloat,
    PositiveInt,
    RelativeToRecipe,
    Rule,
    Section,
)
from megatron_dapo.rounding import nearest_divisor

Dtype = Literal["float32", "bfloat16"]
AttentionImplementation = Literal["auto", "flash"]
LogprobImplementation = Literal["auto", "reference", "chunked", "chunked_bf16", "triton", "triton_tuned", "te_fp8"]
Recompute = Literal["none", "selective", "full"]

LoraTarget = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
]
LoraSync = Literal["merged", "adapters"]


class LoraConfig(Section):
    """LoRA (arXiv:2106.09685): train two narrow matrices next to each linear layer, W + (alpha / rank) B A, and keep W."""

    rank: NonNegativeInt = 0
    """Rows of A and columns of B. 0: train all weights. 8 to 32 are common for RL; a higher learning rate than without LoRA
    is too, about 10 times."""

    alpha: PositiveFloat = 32.0
    """B A is multiplied by alpha / rank."""

    targets: tuple[LoraTarget, ...] = ()
    """Linear layers with adapters, by their names in Hugging Face models; those of an MLP are also those of experts. []: all that
    the model has."""

    path: Annotated[str, RelativeToRecipe()] = ""
    """PEFT directory of the adapters that a run starts from, of the same rank, alpha and targets. Relative: from the recipe's
    directory. "": new ones."""

    sync: LoraSync = "merged"
    """What a weight update brings to engines. merged: the sum of weights and adapters. adapters: only A and B, which SGLang
    servers on separate devices load next to the weights of model.path: 1 % of the bytes or less, and no rounding of the sum,
    but slower generation."""

    @property
    def serves_adapters(self) -> bool:
        """True if engines hold the adapters next to the weights."""
        return self.rank > 0 and self.sync == "adapters"

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class ModelConfig(Section):
    """The policy and its numeric types."""

    path: InputPath
    """Hugging Face directory of the initial policy (config.json, tokenizer, *.safetensors). Relative: from the recipe's
    directory."""

    family: FunctionPath = ""
    """User-defined `Family` for a model_type that is not supported, as "package.module:NAME" or "path/to/file.py:NAME";
    see docs/python.md. "": a supported family."""

    dtype: Dtype = "float32"
    """Type of parameters and activations; main params and moments are float32 either way. Use bfloat16 on accelerators.
    precision.recipe sets the precision of the linear layers' products, which may be FP8."""

    recompute_granularity: Recompute = "none"
    """Activations recomputed in the backward pass: none, selective (attention only) or full (whole layers). Raise it
    when activations do not fit in memory."""

    offload: Offload = "none"
    """State moved to host memory while engines generate or a critic works: nothing, the optimizer state and gradients,
    or those and the weights. Also applies to a reference policy."""

    trust_remote_code: bool = False  # the name of transformers' own argument
    """Run Python code that ships in the model directory. Only for directories whose author you trust."""

    allow_random_init: bool = False
    """Start from random parameters if the directory holds no weights. When off, missing weights are an error."""

    logprob_implementation: LogprobImplementation = "auto"
    """Implementation of log-probs and entropy. auto: triton for a 16-bit model on compute capability 8.0 or more,
    otherwise chunked. reference: full logits. chunked: tiles of tokens and vocabulary in torch. chunked_bf16: the same
    for a bf16 model on a CPU, with logits rounded to bf16. triton: this project's kernels. triton_tuned: the same,
    compiled with the shapes that were measured once as fastest on this GPU. te_fp8: FP8 products, an approximation."""

    attention_implementation: AttentionImplementation = "auto"
    """Attention kernels. auto: Transformer Engine's within its layers, otherwise torch's. flash: torch's flash
    attention within either, for a 16-bit model on compute capability 8.0 or more, with torch 2.10 and without context
    parallelism; it does not need to plan for each new micro-batch shape."""

    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at a time in the log-prob kernel. Lower it when the vocabulary is large."""

    lora: LoraConfig = LoraConfig()
    """Adapters to train in place of the weights; see docs/lora.md."""

    logprob_kept_gb: NonNegativeFloat = 0.0
    """Most memory per rank, in GB (10^9 bytes), for keeping a micro-batch's logits until its backward pass, which
    otherwise recomputes them: one of the head's four matrix products. They take 2 bytes per response token and column
    of the rank's vocabulary with the Triton kernels, otherwise 4; a micro-batch that needs more keeps none."""


class ParallelConfig(Section):
    """Parallel sizes of the policy. data-parallel size = processes / (tp_size * pp_size *
    cp_size)."""

    tp_size: PositiveInt = 1
    """Ranks that every weight matrix is split over; must divide attention heads and key-value heads."""

    pp_size: PositiveInt = 1
    """Number of stages that the layers are split into."""

    vpp_size: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule); 1 is the plain schedule. Raise it to shrink the pipeline
    bubble."""

    first_stage_layers: NonNegativeInt = 0
    """Layers of the first pipeline stage; the other stages share the rest evenly. 0: an even share. For models whose number
    of layers is not divisible by pp_size, or if the embedding makes the first stage slower."""

    last_stage_layers: NonNegativeInt = 0
    """Layers of the last pipeline stage, which also has the log-prob head. 0: an even share."""

    cp_size: PositiveInt = 1
    """Ranks that every sequence is split over. Raise it when one sequence's activations do not fit."""

    ep_size: PositiveInt = 1
    """Ranks that experts are distributed over, within context x data. For mixture-of-experts models only."""

    etp_size: NonNegativeInt = 0
    """Ranks that each expert's matrices are split over; 0: tp_size. A size other than tp_size needs ep_size > 1."""

    sequence_parallel: bool = False
    """Also split the activations between matrix products over the tensor ranks. Saves memory; needs tp_size > 1."""

    use_distributed_optimizer: bool = True
    """Split optimizer state over the data-parallel ranks."""

    num_processes: NonNegativeInt = 0
    """Processes of the policy to start on this machine, or expected from an outside launcher;
    critic.parallel.num_processes are added to them. 0: tp_size * pp_size * cp_size, or the number that the launcher
    starts."""

    def broken_rules(self) -> Iterator[Rule]:
        # Megatron-core has no interleaved schedule with one stage and no sequence parallelism with one tensor rank.
        if self.pp_size == 1 and self.vpp_size != 1:
            yield Rule(
                "parallel.vpp_size == 1",
                "set parallel.vpp_size = 1, or parallel.pp_size = 2 or more",
                when="parallel.pp_size == 1",
            )
        if self.sequence_parallel and not self.tp_size > 1:
            yield Rule(
                "parallel.tp_size > 1",
                "set parallel.sequence_parallel = false, or parallel.tp_size = 2 or more",
                when="parallel.sequence_parallel",
            )
        if self.etp_size > 0 and self.tp_size % self.etp_size:
            yield Rule(
                "parallel.tp_size % parallel.etp_size == 0",
                f"set parallel.etp_size = {nearest_divisor(self.tp_size, self.etp_size)}",
                when="parallel.etp_size > 0",
            )
        elif self.etp_size > 0 and self.ep_size == 1 and self.etp_size != self.tp_size:
            yield Rule(
                "parallel.etp_size == parallel.tp_size",
                "set parallel.etp_size = 0, or parallel.ep_size = 2 or more",
                when="parallel.etp_size > 0 and parallel.tp_size % parallel.etp_size == 0 and parallel.ep_size == 1",
            )


RecipeName = Literal["", "fp32", "bf16", "fp8_blockwise", "fp8_current", "fp8_delayed"]


class PrecisionConfig(Section):
    """Precision of the linear layers. Everything not computed in FP8 uses model.dtype; main params and moments are
    float32."""

    recipe: RecipeName = ""
    """"": model.dtype. fp32, bf16: model.dtype by name; must agree with it. fp8_blockwise: e4m3 with one scale per 128
    values and per 128 x 128 of a weight, a format that SGLang serves (compute capability 9.0 and CUDA 12.9; emulated on
    a CPU). fp8_current, fp8_delayed: one scale per tensor, computed from the tensor or from earlier steps."""

    num_layers_at_start_in_bf16: NonNegativeInt = 0
    """First layers of the model that stay in model.dtype under an FP8 recipe. Raise it when FP8 costs learning."""

    num_layers_at_end_in_bf16: NonNegativeInt = 0
    """Last layers of the model that stay in model.dtype under an FP8 recipe."""

    fp8_param: bool = False
    """Hold the weights of FP8 layers only as FP8, in addition to their float32 main params. Saves memory; Transformer
    Engine only, needs parallel.use_distributed_optimizer."""

    def broken_rules(self) -> Iterator[Rule]:
        layers = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if self.recipe == "fp8_delayed" and layers != (0, 0):
            yield Rule(
                "precision.num_layers_at_start_in_bf16 == precision.num_layers_at_end_in_bf16 == 0",
                'set both to 0, or precision.recipe = "fp8_blockwise"',
                when='precision.recipe == "fp8_delayed"',
                reason="the maxima of delayed scaling are reduced over all layers at once",
            )


Schedule = Literal["constant", "cosine", "linear"]
OptimizerImplementation = Literal["auto", "apex"]
WarmupUnit = Literal["train_step", "optimizer_step"]
# Elements of main params on the device at a time under `on_host`: 0.8 GB with their moments. More would not be faster;
# less would cost a launch and a wait for every small parameter.
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
    """Kernels of AdamW and of the gradient's norm and scaling. auto: the first that can be imported of Transformer
    Engine's, NVIDIA apex's and torch's. apex: apex's."""

    on_host: bool = False
    """Keep float32 main params and moments in host memory, also while the model trains. A step brings them to the
    device piece by piece, with the same results. Saves 12 bytes per parameter on the GPUs, but moves them over PCIe and
    back each step."""


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
