"""Names of other systems (TRL, verl, OpenRLHF, slime, NeMo-RL, prime-rl) and papers, and what says the same here.

An unknown key is looked up by its last two parts ("rollout.n") or its last one, whatever its section; a value by its field.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_VLLM = "SGLang and the embedded engine generate"
_GPUS = "set CUDA_VISIBLE_DEVICES; parallel.num_processes says how many"
_BY_TOKENS = "training.micro_batch_tokens, in tokens of packed sequences"

# Last parts of a key -> the field that says the same, with a note, or why there is none.
KEYS: Mapping[str, str] = {
    # responses and prompts of a step
    **dict.fromkeys(
        ("num_generations", "n_samples_per_prompt", "num_generations_per_prompt", "rollouts_per_example", "rollout.n"),
        "rollout.group_size",
    ),
    "generations_per_prompt": "rollout.group_size",
    "samples_per_prompt": "rollout.group_size",
    **dict.fromkeys(
        ("train_batch_size", "rollout_batch_size", "num_prompts_per_step", "gen_batch_size"), "rollout.prompts_per_step"
    ),
    "per_device_train_batch_size": _BY_TOKENS,
    "ppo_mini_batch_size": "training.mini_batch_prompts",
    "global_batch_size": "training.mini_batch_prompts, in prompts",
    "train_global_batch_size": "training.mini_batch_prompts, in prompts",
    **dict.fromkeys(
        ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_train_batch_size", "micro_batch_size"), _BY_TOKENS
    ),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "max_tokens_per_gpu"), "training.micro_batch_tokens"),
    "gradient_accumulation_steps": "training.mini_batch_prompts: micro-batches follow from training.micro_batch_tokens",
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_update_epochs", "max_epochs_per_batch"), "training.epochs"),
    **dict.fromkeys(("max_steps", "total_training_steps", "num_rollout", "max_num_steps"), "run.total_steps"),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes", "max_num_epochs"), "data.max_epochs"),
    # lengths and sampling
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "rollout_max_response_len", "generate_max_len", "max_new_tokens"),
        "rollout.max_response_tokens",
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "max_prompt_len"), "data.max_prompt_tokens"),
    **dict.fromkeys(
        ("max_model_len", "max_total_sequence_length", "seq_len"),
        "data.max_prompt_tokens and rollout.max_response_tokens",
    ),
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "allow_biased_sampling": "there is no bias to allow: rollout.top_p and rollout.top_k are trained as they are sampled",
    "min_p": "there is no min_p: rollout.top_p and rollout.top_k are",
    "repetition_penalty": "there is none: it would make the sampled distribution another than the trained one",
    # algorithm
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "algorithm.advantage"),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), "algorithm.loss.aggregation"),
    **dict.fromkeys(("clip_ratio", "eps_clip", "cliprange", "ratio_clip_min"), "algorithm.loss.clip_ratio_low"),
    "epsilon": "algorithm.loss.clip_ratio_low (optimizer.epsilon is AdamW's)",
    **dict.fromkeys(
        ("epsilon_high", "eps_clip_high", "ratio_clip_max"), "algorithm.loss.clip_ratio_high"
    ),
    **dict.fromkeys(("clip_ratio_c", "delta", "ratio_clip_c"), "algorithm.loss.dual_clip"),
    **dict.fromkeys(
        ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "reference_policy_kl_penalty", "kl_tau"),
        "algorithm.kl_loss_coefficient (kl_reward_coefficient in the reward)",
    ),
    **dict.fromkeys(("kl_loss_type", "kl_estimator_type"), "algorithm.kl_estimator"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "entropy_bonus"), "algorithm.entropy_coefficient"),
    "use_kl_loss": "algorithm.kl_loss_coefficient, 0 for none",
    "use_kl_in_reward": "algorithm.kl_reward_coefficient, 0 for none",
    **dict.fromkeys(
        ("scale_rewards", "norm_adv_by_std_in_grpo", "normalize_rewards"),
        'algorithm.advantage, of which "dr_grpo" divides by no standard deviation',
    ),
    **dict.fromkeys(
        ("use_tis", "vllm_importance_sampling_correction", "rollout_is"), "algorithm.off_policy.correction"
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "tis_imp_ratio_cap", "rollout_is_threshold", "tis_clip"), "algorithm.off_policy.high"
    ),
    **dict.fromkeys(("max_async_level", "max_off_policy_steps", "off_policy_steps"), "rollout.max_staleness"),
    **dict.fromkeys(("lam", "gae_lambda"), "advantage_estimation.policy_lambda and critic_lambda"),
    # dynamic sampling and shaping of rewards
    **dict.fromkeys(("filter_groups.enable", "use_dynamic_sampling"), "rollout.filter_groups"),
    "over_sampling_batch_size": "rollout.oversample",
    "dynamic_sampling_max_gen_batches": "rollout.max_num_gen_batches",
    "mask_truncated_completions": "reward.overlong_filter",
    "overlong_filtering": "reward.overlong_filter",
    "overlong_buffer": "reward.overlong_punishment",
    "overlong_buffer_len": "reward.overlong_punishment.cache_length",
    **dict.fromkeys(
        ("reward_funcs", "reward_fn", "reward_function", "custom_reward_function", "custom_rm_path", "rm_type", "remote_rm_url"),
        "reward.verifier",
    ),
    "reward_weights": "reward.mix, tables with verifier and weight",
    # model, engine, hardware
    **dict.fromkeys(("model_name_or_path", "pretrain", "hf_checkpoint", "model_name", "load"), "model.path"),
    **dict.fromkeys(("torch_dtype", "bf16", "fp16", "param_dtype"), "model.dtype"),
    **dict.fromkeys(("lora_rank", "lora_r", "use_peft", "peft_config"), "model.lora.rank"),
    "lora_alpha": "model.lora.alpha",
    **dict.fromkeys(("target_modules", "lora_target_modules"), "model.lora.targets"),
    "lora_adapter_path": "model.lora.path",
    "lora_dropout": "there is no dropout",
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"), "there are no quantized weights in training; sglang.quantization serves FP8"
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing"),
        "model.recompute_granularity",
    ),
    **dict.fromkeys(("flash_attn", "attn_implementation"), "model.attention_implementation"),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "adam_offload", "zero_stage", "cpu_offload"),
        "model.offload and optimizer.on_host",
    ),
    **dict.fromkeys(("device", "device_map", "cuda"), _GPUS),
    **dict.fromkeys(
        ("n_gpus_per_node", "num_gpus_per_node", "actor_num_gpus_per_node", "num_processes", "nproc_per_node"),
        "parallel.num_processes, of all nodes",
    ),
    **dict.fromkeys(
        ("nnodes", "num_nodes", "actor_num_nodes"),
        "the launcher (torchrun, srun) says how many nodes; --dry-run --nodes N plans them",
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "tensor_parallel_size", "tp"), "parallel.tp_size (sglang.tp_size of a server)"
    ),
    **dict.fromkeys(("pipeline_model_parallel_size", "pipeline_parallel_size", "pp"), "parallel.pp_size"),
    **dict.fromkeys(("context_parallel_size", "cp", "ulysses_sequence_parallel_size"), "parallel.cp_size"),
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size", "ep"), "parallel.ep_size"),
    **dict.fromkeys(("use_vllm", "vllm_mode", "vllm_num_engines"), f'rollout.engine = "sglang" ({NO_VLLM})'),
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization", "sglang_mem_fraction_static"), "sglang.mem_fraction_static"
    ),
    "colocate": 'sglang.placement = "colocated"',
    "colocate_all_models": 'sglang.placement = "colocated"',
    # optimizer
    **dict.fromkeys(("lr", "actor_learning_rate"), "optimizer.learning_rate"),
    "critic_learning_rate": "critic.optimizer.learning_rate",
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "lr_warmup_style"), "optimizer.schedule"),
    **dict.fromkeys(
        ("lr_warmup_steps", "lr_warmup_ratio", "warmup_ratio", "lr_warmup_steps_ratio"),
        "optimizer.warmup_steps, in steps",
    ),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), "optimizer.clip_grad"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "optimizer.betas, both in a list"),
    # data, records
    **dict.fromkeys(("train_files", "prompt_data", "dataset_name", "dataset", "train_dataset"), "data.train_paths"),
    **dict.fromkeys(("val_files", "eval_prompt_data", "eval_dataset", "val_dataset"), "data.eval_paths"),
    **dict.fromkeys(("prompt_key", "input_key"), "data.columns.prompt"),
    **dict.fromkeys(("label_key", "answer_key"), "data.columns.answer"),
    **dict.fromkeys(("apply_chat_template", "chat_template"), "data.template"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "save_period"), "checkpoint.interval"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep", "keep_top_k"), "checkpoint.keep"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode"), "checkpoint.resume"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval", "val_period"), "evaluation.interval"),
    **dict.fromkeys(
        ("val_kwargs.n", "n_samples_per_eval_prompt", "eval_n_samples_per_prompt"), "evaluation.num_samples"
    ),
    **dict.fromkeys(("report_to", "logger", "use_wandb"), "telemetry.trackers"),
    **dict.fromkeys(("experiment_name", "run_name"), "run.name"),
    **dict.fromkeys(("default_local_dir", "ckpt_path", "save_path"), "run.output_dir"),
    "logging_steps": "there is none: every step is recorded",
    "deepspeed": "there is none: Megatron-core trains; see [parallel]",
    "fsdp_config": "there is none: Megatron-core trains; see [parallel]",
}

# Field -> their name for a value -> ours.
VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.loss.name": {
        "grpo": 'ppo_clip with algorithm.advantage = "grpo"',
        "dapo": "ppo_clip with clip_ratio_high above clip_ratio_low",
        "clip_higher": "ppo_clip with clip_ratio_high above clip_ratio_low",
        "ppo": "ppo_clip with clip_ratio_high = clip_ratio_low",
        "vanilla": "ppo_clip",
        "dr_grpo": 'ppo_clip with aggregation = "dr_grpo" and algorithm.advantage = "dr_grpo"',
    },
    "algorithm.advantage.name": {
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "gae": 'algorithm.name = "ppo", which has a critic',
    },
    "algorithm.loss.aggregation": {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sample_mean",
        "seq-mean-token-sum": "seq_sum_mean",
        "grpo": "sample_mean",
        "bnpo": "token_mean",
        "dapo": "token_mean",
    },
    "algorithm.kl_estimator": {"low_var_kl": "k3", "mse": "k2", "kl": "k2: the gradient of k1 as a loss is not that of the divergence"},
    "algorithm.name": {
        "grpo": 'dapo with algorithm.advantage = "grpo", loss = "ppo_clip" and clip_ratio_high = clip_ratio_low',
        "dr_grpo": 'dapo with algorithm.advantage = "dr_grpo"',
        "gspo": 'dapo with algorithm.loss = "gspo"',
        "cispo": 'dapo with algorithm.loss = "cispo"',
        "rloo": 'dapo with algorithm.advantage = "rloo"',
        "reinforce_plus_plus": 'dapo with algorithm.advantage = "reinforce_pp"',
        "gae": "ppo",
    },
    "rollout.engine": {
        "vllm": f"sglang: {NO_VLLM}",
        "hf": "embedded",
        "transformers": "embedded",
        "megatron": "embedded",
    },
    "model.dtype": {
        "bf16": "bfloat16",
        "fp32": "float32",
        **dict.fromkeys(("fp16", "float16"), "bfloat16: float16 is not trained"),
    },
    "optimizer.schedule": {
        "constant_with_warmup": "constant with optimizer.warmup_steps",
        "cosine_with_min_lr": "cosine with optimizer.min_learning_rate",
    },
}


def counterpart(path: str) -> str | None:
    """Return what says the same as another system's key, by its last two parts or its last one; None if it is not known."""
    parts = path.split(".")
    return KEYS.get(".".join(parts[-2:])) or KEYS.get(parts[-1])
