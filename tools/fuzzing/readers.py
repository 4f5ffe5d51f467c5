"""Readers of files from outside, each with the valid files that it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.fuzzing.mutations import OF_JSON, change_a_line, change_bytes, change_header, change_json, change_lines, nest
from tools.fuzzing.target import Target, check_message

CONFIGS = {
    "qwen2": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 300, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 2, "layer_types": ["full_attention"] * 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window": None, "use_sliding_window": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 300, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "eos_token_id": [2],
    },
    "gemma3": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
        },
    },
}  # fmt: skip
ROW = {
    "data_source": "math", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 0},
}  # fmt: skip


def _json_file(name: str, document: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(json.dumps(document), encoding="utf-8") and None


def _read_config(directory: Path) -> None:
    from megatron_dapo.engines.sglang.server import Expectation
    from megatron_dapo.engines.sglang.server_settings import ServerSettings
    from megatron_dapo.models.architecture import HEADS
    from megatron_dapo.models.config_json import read_architecture

    readers = (
        lambda path: read_architecture(path, heads=HEADS).shapes(),
        lambda path: Expectation.of(ServerSettings(path, path, path, path)),
    )
    _all(readers, directory)


def _all(readers: Sequence[Callable[[Path], object]], path: Path) -> None:
    """Call every reader; raise the last refusal. Only one of them may hold against a file what another takes."""
    refusal = None
    for read in readers:
        try:
            read(path)
        except (ValueError, OSError) as error:
            check_message(error, path)
            refusal = error
    if refusal is not None:
        raise refusal


def _write_model(directory: Path) -> None:
    import torch

    from megatron_dapo.checkpoints.formats.safetensors import SafetensorsWriter
    from megatron_dapo.reshard.layout import TensorSpec

    files = {"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "cd"}
    for file, names in files.items():
        specs = {name: TensorSpec((4, 3), torch.float32) for name in names}
        writer = SafetensorsWriter(directory / file, specs)
        for name in names:
            writer.write(name, torch.ones(4, 3))
        writer.close()
    index = {
        "metadata": {"total_size": 192},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    _json_file("model.safetensors.index.json", index)(directory)


def _read_model(directory: Path) -> None:
    from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint

    with HFCheckpoint(directory) as model:
        for name in model.specs:
            model.read_tensor(name)


def _write_checkpoint(directory: Path) -> None:
    import torch

    from megatron_dapo.checkpoints.store import CheckpointStore, save_checkpoint

    def write(writer: Any) -> None:
        writer.save_json("trainer.json", {"train_step": 3})
        writer.save_tensors("model.safetensors", {"w": torch.ones(3)})

    save_checkpoint(CheckpointStore(directory, keep=1), 3, write, metadata={"layout": "TP1"})


def _read_checkpoint(directory: Path) -> None:
    from megatron_dapo.checkpoints.store import CheckpointStore, find_resume

    checkpoint = find_resume("must", CheckpointStore(directory, keep=1))
    assert checkpoint is not None
    checkpoint.load_json("trainer.json")


def _write_recipe(directory: Path) -> None:
    _json_file("config.json", CONFIGS["qwen2"])(directory)
    (directory / "data.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    (directory / "recipe.toml").write_text(
        '[run]\nname = "x"\noutput_dir = "run"\ntotal_steps = 3\nseed = 1\n[model]\npath = "."\ndtype = "float32"\n'
        '[data]\ntrain_paths = ["data.jsonl"]\nmax_prompt_tokens = 64\n[rollout]\ngroup_size = 4\nprompts_per_step = 2\n'
        'engine = "embedded"\ntemperature = 1.0\nmax_response_tokens = 64\n[training]\nmini_batch_prompts = 2\n[parallel]\ntp_size = 1\npp_size = 1\n[optimizer]\nlearning_rate = 1e-6\n'
        '[algorithm]\nname = "dapo"\nloss = "ppo_clip"\n[reward]\nverifier = "dapo"\n[sglang]\nhost = "auto"\nurls = []\n',
        encoding="utf-8",
    )


def _read_recipe(directory: Path) -> None:
    from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, make_plan

    make_plan(directory / "recipe.toml", [], None, None, ONE_NODE_OF_CPUS)


def _read_rows(directory: Path) -> None:
    from megatron_dapo.data.files import read_rows

    list(read_rows(directory / "data.jsonl"))


def _write_batch(directory: Path) -> None:
    import torch

    from megatron_dapo.files.durable import HERE
    from megatron_dapo.telemetry.batch_dump import dump_batch
    from megatron_dapo.types import TrainSample

    values = torch.zeros(2)
    samples = [TrainSample(str(n), 0, torch.tensor([1, 2, 3, 4]), 2, torch.ones(2), values, values) for n in range(2)]
    dump_batch(directory / "step", samples, {"train_step": 1, "learning_rate": 1e-6}, HERE)


def _read_batch(directory: Path) -> None:
    from megatron_dapo.telemetry.batch_dump import load_batch

    load_batch(directory / "step")


def _write_records(directory: Path) -> None:
    lines = [json.dumps({"train_step": step, "response": "x" * step}) for step in range(1, 5)]
    (directory / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_records(directory: Path) -> None:
    from megatron_dapo.telemetry.writers import drop_steps_from

    drop_steps_from(directory / "samples.jsonl", 3)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    _json_file("config.json", CONFIGS["qwen2"])(directory)
    Tokenizer(WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    _json_file("tokenizer_config.json", settings)(directory)
    _json_file("generation_config.json", {"eos_token_id": [2], "temperature": 0.7, "do_sample": True})(directory)


def _read_tokenizer(directory: Path) -> None:
    from megatron_dapo.data.model_inputs import read_model_inputs

    read_model_inputs(directory, trust_remote_code=False)


def targets() -> Iterator[Target]:
    """Yield every reader of files from outside."""
    for name, config in CONFIGS.items():
        yield Target(
            f"config.json of {name}", "config.json", _json_file("config.json", config), _read_config, OF_JSON, 15
        )
    header = (change_header, change_header, change_header, change_bytes)
    yield Target("safetensors", "model-00001-of-00002.safetensors", _write_model, _read_model, header, 20)
    yield Target("index", "model.safetensors.index.json", _write_model, _read_model, OF_JSON)
    yield Target("manifest", "step_000003/manifest.json", _write_checkpoint, _read_checkpoint, OF_JSON)
    recipe = (change_lines, change_lines, change_bytes)
    yield Target("recipe", "recipe.toml", _write_recipe, _read_recipe, recipe, 10, lists=True)
    plan = "config.json of a recipe"
    yield Target(plan, "config.json", _write_recipe, _read_recipe, (change_json, change_json, nest), 10, lists=True)
    rows = tuple(map(change_a_line, (change_json, change_json, nest))) + (change_bytes,)
    row_file = lambda directory: (directory / "data.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3) and None  # noqa: E731
    yield Target("data rows", "data.jsonl", row_file, _read_rows, rows)
    yield Target("samples", "samples.jsonl", _write_records, _read_records, rows, 5)
    yield Target("replay facts", "step/batch.json", _write_batch, _read_batch, OF_JSON)
    yield Target("replay tensors", "step/batch.safetensors", _write_batch, _read_batch, header)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        yield Target(file, file, _write_tokenizer, _read_tokenizer, OF_JSON, 3)
