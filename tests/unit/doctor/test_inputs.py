"""A dry run refuses what cannot run: one line names the thing and the fix, and nothing was started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megatron_dapo.checkpoints.formats.saved_model import state_index
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.cli.main import app
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.doctor.inputs import input_problems, machine_problems, quick_problems
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.lora import adapter_shapes
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, Machines, make_plan

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The quickstart's recipe, model and some of its data in a directory that a test may damage."""
    shutil.copy(QUICKSTART / "quickstart.toml", tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:64]), encoding="utf-8")
    shutil.copytree(QUICKSTART / "base_model", tmp_path / "base_model")
    return tmp_path


def config_of(own: Path, *overrides: str) -> Config:
    # The recipe writes below the working directory.
    given = [override.replace("OWN", str(own)) for override in overrides]
    return load_config(own / "quickstart.toml", [f"run.output_dir={own / 'run'}", *given]).config


def rows_of(own: Path) -> list[dict]:
    return [json.loads(line) for line in (own / "train.jsonl").read_text().splitlines()]


def write_rows(own: Path, rows: list[dict]) -> None:
    (own / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_heldout(own: Path, rows: list[dict]) -> None:
    (own / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spaced(prompt: list[dict]) -> list[dict]:
    return [{**message, "content": message["content"].replace(" ", "\n ")} for message in prompt]


def changed_row(number: int, **columns: object) -> Callable[[Path], None]:
    def change(own: Path) -> None:
        rows = rows_of(own)
        rows[number].update(columns)
        write_rows(own, rows)

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda own: write_rows(own, [{new if k == old else k: v for k, v in row.items()} for row in rows_of(own)])


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda own: (own / name).write_bytes(data) and None


def together(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda own: [change(own) for change in changes] and None


def removed(*names: str) -> Callable[[Path], None]:
    return lambda own: [(own / name).unlink() for name in names] and None


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(own: Path) -> None:
        content = (own / name).read_bytes()
        (own / name).write_bytes(content[: int(len(content) * share)])

    return damage


def model_config(**fields: object) -> Callable[[Path], None]:
    def change(own: Path) -> None:
        path = own / "base_model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def adapters(rank: int = 4, projections: tuple[str, ...] = ("q_proj", "v_proj"), **config: object) -> Callable[[Path], None]:
    """A PEFT directory next to the recipe, with `rank` rows of each lora_A of the quickstart's model."""

    def make(own: Path) -> None:
        shapes = adapter_shapes(read_architecture(own / "base_model").shapes(), rank, projections)
        (own / "adapter").mkdir()
        tensors = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in shapes.items()}
        save_file(tensors, own / "adapter" / "adapter_model.safetensors")
        (own / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))

    return make


ADAPTED = ("model.lora.path=OWN/adapter", "model.lora.rank=4", "model.lora.alpha=8.0", 'model.lora.targets=["q_proj","v_proj"]')


def nothing(own: Path) -> None:
    pass


def row_text(text: bytes) -> Callable[[Path], None]:
    """A first line of these bytes before the others."""
    return lambda own: (own / "train.jsonl").write_bytes(text + b"\n" + (own / "train.jsonl").read_bytes()) and None


def module(text: str) -> Callable[[Path], None]:
    return written("own_reward.py", text)


def saved(state: object, *files: str) -> Callable[[Path], None]:
    def make(own: Path) -> None:
        (own / "saved").mkdir()
        (own / "saved" / "state.json").write_text(json.dumps(state))
        for name in files:
            (own / "saved" / name).write_bytes(b"ARROW")

    return make


def deep(own: Path) -> None:
    (own / "train.jsonl").write_text("[" * 100_000 + "\n")


def directory(*names: str) -> Callable[[Path], None]:
    return lambda own: [(own / name).mkdir(parents=True) for name in names] and None


def without_weight_file(own: Path) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (own / "base_model" / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(own: Path) -> None:
    (own / WEIGHTS).rename(own / "base_model" / "pytorch_model.bin")


def own_template(text: str) -> Callable[[Path], None]:
    return written("base_model/chat_template.jinja", text)


def longer(name: str, number: int) -> Callable[[Path], None]:
    return lambda own: (own / name).write_bytes((own / name).read_bytes() + b"\0" * number) and None


ATTACHED = ("rollout.engine=sglang", "sglang.placement=disaggregated", "sglang.weight_sync_transport=disk")
CSV = ("data.train_paths=['OWN/t.csv']", "data.columns.prompt=q", "data.columns.answer=a")
WEIGHTS = "base_model/model.safetensors"
OWN_REWARD = ("reward.verifier=OWN/own_reward.py:reward",)
# {field that is named: {case: (what is done to the directory, overrides, words of the line)}}
BAD: dict[str, dict[str, tuple[Callable[[Path], None], tuple[str, ...], *tuple[str, ...]]]] = {
    "data.train_paths": {
        "empty data": (written("train.jsonl", ""), (), "has no rows; write some, such as {"),
        "blank data": (written("train.jsonl", "\n\n"), (), "has no rows"),
        "no JSON": (written("train.jsonl", "hello\n"), (), "line 1 is not valid JSON", "a line is one object, such as {"),
        "a list over several lines": (written("train.jsonl", "[\n{}\n]"), (), "line 1", "ends in .json"),
        "a list a line": (written("train.jsonl", "[1]\n"), (), "line 1", "JSON object"),
        "bad UTF-8": (written("train.jsonl", b'{"prompt": "\xff"}\n'), (), "line 1", "iconv -f LATIN1 -t UTF-8"),
        "a cut line": (cut("train.jsonl", 0.99), (), "is not valid JSON"),
        "wrong columns": (renamed("prompt", "question"), (), "missing column(s) prompt", "question"),
        "no answers": (renamed("reward_model", "gold"), (), "missing column(s) reward_model"),
        "an empty answer": (
            changed_row(3, reward_model={"ground_truth": " "}),
            (),
            "line 4",
            'set data.columns.answer = ""',
        ),
        "an answer that is no text": (
            changed_row(2, reward_model={"ground_truth": 1.5}),
            (),
            "line 3",
            "got 1.5; write it as a text",
        ),
        "no ground truth": (changed_row(0, reward_model={"style": "rule"}), (), "ground_truth"),
        "an empty prompt": (changed_row(5, prompt=[]), (), "line 6", "prompt must be"),
        "a message without content": (changed_row(5, prompt=[{"role": "user"}]), (), "line 6"),
        "images": (changed_row(0, images=["a.png"]), (), "images", "only text is trained"),
        "parquet that is none": (
            written("train.parquet", "PAR1"),
            ("data.train_paths=['OWN/train.parquet']",),
            "train.parquet",
        ),
        "another kind of file": (
            written("train.xlsx", "PK"),
            ("data.train_paths=['OWN/train.xlsx']",),
            "unknown kind of data file '.xlsx'",
        ),
        "a null row": (written("train.jsonl", "null\n"), (), "line 1", "NoneType"),
        "a row without columns": (row_text(b"\xef\xbb\xbf{}"), (), "line 1: missing column(s) prompt"),
        "UTF-16": (
            written("train.jsonl", '{"prompt": "a"}\n'.encode("utf-16")),
            (),
            "line 1 is not valid JSON: it is UTF-16; save the file as UTF-8",
        ),
        "gzip": (written("train.jsonl", b"\x1f\x8b\x08\0\0"), (), "line 1 is not valid JSON"),
        "brackets without end": (deep, (), "line 1 is not valid JSON"),
        "a prompt that is a number": (changed_row(0, prompt=7), (), "line 1", "prompt must be"),
        "a prompt of spaces": (changed_row(0, prompt="  "), (), "line 1", "prompt must be"),
        "a prompt that is Python": (
            changed_row(0, prompt="[{'role': 'user', 'content': 'x'}]"),
            (),
            "line 1",
            "json.dumps",
        ),
        "a content of parts": (
            changed_row(0, prompt=[{"role": "user", "content": [{"type": "image"}]}]),
            (),
            "only text is trained",
        ),
        "an answer that is true": (changed_row(0, reward_model={"ground_truth": True}), (), "line 1", "True"),
        "an answer that is a list": (changed_row(0, reward_model={"ground_truth": ["4"]}), (), "gold answer"),
        "a reward model that is text": (changed_row(0, reward_model="42"), (), "has no field ground_truth"),
        "columns that are not there": (
            nothing,
            ("data.columns.prompt=question", "data.columns.answer=gold"),
            "missing column(s) question, gold",
            "data.columns",
        ),
        "a file that is not there": (nothing, ("data.train_paths=['OWN/trian.jsonl']",), "did you mean"),
        "no file": (nothing, ("data.train_paths=[]",), "data.sources"),
        "a directory of files": (directory("rows"), ("data.train_paths=['OWN/rows']",), "no data set saved"),
        "a saved set of splits": (
            lambda own: directory("s")(own) or written("s/dataset_dict.json", '{"splits": ["train", "test"]}')(own),
            ("data.train_paths=['OWN/s']",),
            "has the splits train, test",
            "s/train",
        ),
        "a saved set without its file": (
            saved({"_data_files": [{"filename": "data-0.arrow"}]}),
            ("data.train_paths=['OWN/saved']",),
            "1 of its 1 files are missing, e.g. data-0.arrow",
        ),
        "a saved set that is damaged": (
            saved({"_data_files": [{"filename": "data-0.arrow"}]}, "data-0.arrow"),
            ("data.train_paths=['OWN/saved']",),
            "data-0.arrow",
            "cannot be read",
        ),
        "a saved set without a state": (saved({}), ("data.train_paths=['OWN/saved']",), "names no data files"),
        "CSV with a cell too many": (written("t.csv", "q,a\n1,2,3\n"), CSV, "line 2", "2 cells"),
        "CSV with an open quote": (written("t.csv", 'q,a\n"1,2\n'), CSV, "t.csv, line"),
        "CSV in Latin-1": (
            written("t.csv", ("q,a\n" + 3000 * "1,2\n" + "\xe9,2\n").encode("latin-1")),
            CSV,
            "t.csv, line 3002: ",
            "iconv -f LATIN1 -t UTF-8",
        ),
        "CSV in UTF-16": (written("t.csv", "q,a\n1,2\n".encode("utf-16")), CSV, "iconv -f UTF-16 -t UTF-8"),
        "CSV with semicolons": (written("t.csv", "q;a\n1;2\n"), CSV, "the separator seems to be ';'"),
        "CSV with tabs": (written("t.csv", "q\ta\n1\t2\n"), CSV, "the separator seems to be a tab"),
        "CSV without a row": (written("t.csv", "q,a\n"), CSV, "has no rows"),
        "JSON that is an object": (
            written("t.json", '{"rows": []}'),
            ("data.train_paths=['OWN/t.json']",),
            "expected a list of objects, got dict",
        ),
        "JSON lines called .json": (
            lambda own: shutil.copy(own / "train.jsonl", own / "t.json") and None,
            ("data.train_paths=['OWN/t.json']",),
            "an object a line ends in .jsonl",
        ),
        "Hub data without a network": (
            nothing,
            ("data.train_paths=['hf://openai/gsm8k']",),
            "hf download openai/gsm8k --repo-type dataset",
        ),
        "a chat template with an error": (own_template("{% if %}"), (), "chat template"),
        "a chat template that refuses": (
            own_template("{{ raise_exception('one turn only') }}"),
            (),
            "refuses messages of the roles user: one turn only; mend the template, or set data.template",
        ),
        "a chat template without a system role": (
            own_template("{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"),
            ("data.system_prompt=Think.",),
            "refuses messages of the roles system, user",
        ),
    },
    "data.eval_paths": {
        "a damaged held-out file": (written("heldout.jsonl", "{}\n"), (), "heldout.jsonl", "line 1"),
        "an empty held-out file": (written("heldout.jsonl", ""), (), "has no rows"),
        "the training file": (nothing, ("data.eval_paths=['OWN/train.jsonl']",), "all 64 held-out problems", "also trained on"),
        "a copy with other white space and answers": (
            lambda own: write_heldout(own, [{**row, "prompt": spaced(row["prompt"])} for row in rows_of(own)[:9]]),
            (),
            "all 9 held-out problems",
        ),
    },
    "data.max_prompt_tokens": {"prompts that are too long": (nothing, ("data.max_prompt_tokens=8",), "raise it to")},
    "model.path": {
        "no weights": (removed(WEIGHTS), (), "base_model"),
        "cut weights": (cut(WEIGHTS, 0.5), (), "model.safetensors"),
        "weights that are none": (written(WEIGHTS, b"\0" * 64), (), "model.safetensors"),
        "a pointer of Git LFS": (
            written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"),
            (),
            "a pointer of Git LFS, not the weights: run `git lfs pull`",
        ),
        "shards without their index": (
            lambda own: (own / WEIGHTS).rename(own / "base_model/model-00001-of-00002.safetensors") and None,
            (),
            "copy model.safetensors.index.json, too",
        ),
        "two types of weights": (
            model_config(dtype="bfloat16", torch_dtype="float16"),
            (),
            "dtype and torch_dtype are bfloat16 and float16; keep the right one",
        ),
        "a single file": (nothing, ("model.path=OWN/train.jsonl",), "name the directory"),
        "an empty weights file": (written(WEIGHTS, b""), (), "model.safetensors"),
        "weights of a deeper model": (model_config(num_hidden_layers=40), (), "missing", "do not fit"),
        "weights of a wider model": (model_config(intermediate_size=4096), (), "of another shape"),
        "another family": (model_config(model_type="mistral"), (), "mistral"),
        "no tokenizer": (removed("base_model/tokenizer.json", "base_model/tokenizer_config.json"), (), "tokenizer"),
        "a damaged tokenizer": (written("base_model/tokenizer.json", "{"), (), "base_model"),
        "a Hub model without a network": (nothing, ("model.path=Qwen/Qwen2.5-0.5B",), "hf download Qwen/"),
        "no model directory": (nothing, ("model.path=/no/such/model",), "/no/such/model"),
        "no config.json": (removed("base_model/config.json"), (), "no config.json"),
        "a config.json that is none": (written("base_model/config.json", "{"), (), "config.json"),
        "a config.json that is a list": (written("base_model/config.json", "[]"), (), "config.json"),
        "a config.json of text sizes": (model_config(hidden_size="64"), (), "hidden_size"),
        "a vision model": (model_config(model_type="qwen2_vl"), (), "qwen2_vl", "supported are"),
        "a missing part of the weights": (without_weight_file, (), "1 of 1 weights files are missing"),
        "pickled weights": (pickled, (), ".bin files are pickles"),
        "weights with trailing bytes": (longer(WEIGHTS, 9), (), "its header asks for"),
        "weights of a pointer file": (
            written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
            (),
            "git lfs pull",
        ),
        "a tokenizer without a chat template": (own_template(""), (), "no chat template", "plain"),
    },
    "model.lora.rank": {
        "adapters of another rank": (
            adapters(),
            (*ADAPTED, "model.lora.rank=8"),
            "model.lora.rank = 8, model.lora.alpha = 8",
            "set model.lora.rank = 4 and model.lora.alpha = 8",
        ),
        "adapters that nothing trains": (adapters(), ADAPTED[:1], "model.lora.rank = 0", "set model.lora.rank = 4"),
    },
    "model.lora.alpha": {
        "adapters of another scale": (adapters(use_rslora=True), ADAPTED, "and model.lora.alpha = 16"),
    },
    "model.lora.path": {
        "no adapters": (nothing, (*ADAPTED, "model.lora.path=OWN/adaptor"), "that PEFT's save_pretrained wrote"),
        "a directory without adapters": (nothing, (*ADAPTED, "model.lora.path=OWN/base_model"), "no adapter_config.json"),
        "adapters with magnitudes": (adapters(use_dora=True), ADAPTED, "use_dora = True: not plain LoRA"),
        "adapters of several ranks": (adapters(rank_pattern={"q_proj": 2}), ADAPTED, "rank_pattern = {'q_proj': 2}"),
        "adapters of changed weights": (adapters(init_lora_weights="pissa"), ADAPTED, "init_lora_weights = pissa"),
        "no LoRA": (adapters(peft_type="IA3"), ADAPTED, "adapters of another kind than LoRA"),
        "a rank that is text": (adapters(r="4"), ADAPTED, "r = 4 and lora_alpha = 8 are not"),
        "other matrices": (adapters(), ADAPTED[:3], 'set model.lora.targets = ["q_proj", "v_proj"]'),
        "another shape": (adapters(rank=3), ADAPTED, "adapters of another model", "lora_A.weight (3, 96) there, (4, 96)"),
        "no tensors": (together(adapters(), removed("adapter/adapter_model.safetensors")), ADAPTED, "adapter_model.safetensors"),
        "tensors that were cut off": (together(adapters(), cut("adapter/adapter_model.safetensors", 0.9)), ADAPTED, "its header asks"),
    },
    "model.allow_random_init": {
        "adapters of random weights": (adapters(), (*ADAPTED, "model.allow_random_init=true"), "stored adapters belong to stored weights"),
    },
    "reward.verifier": {
        "a verifier of no module": (
            nothing,
            ("reward.verifier=no_such_module:score",),
            "cannot import module 'no_such_module'",
        ),
        "a verifier of no function": (nothing, ("reward.verifier=json:score",), "has no function 'score'"),
        "an unknown verifier": (nothing, ("reward.verifier=dappo",), "'dappo'", 'reward.verifier = "dapo"'),
        "prompts that ask for another format": (nothing, ("reward.answer_format=boxed",), "disagrees with the format"),
        "a reward file that is not there": (nothing, OWN_REWARD, "own_reward.py"),
        "a reward with a typing error": (module("def reward(sample:\n"), OWN_REWARD, "own_reward.py"),
        "a reward that raises": (
            module("def reward(sample):\n    return sample.extra_info['level']\n"),
            OWN_REWARD,
            "KeyError",
        ),
        "a reward that returns text": (module("def reward(sample):\n    return 'good'\n"), OWN_REWARD, "not str"),
        "a reward that fails at its import": (
            module("limit = undefined\n"),
            OWN_REWARD,
            "cannot import module",
            "NameError",
        ),
    },
    "reward.shadow_verifier": {
        "a shadow verifier of no module": (
            nothing,
            ("reward.shadow_verifier=no_such_module:score",),
            "cannot import module",
        )
    },
    "run.output_dir": {
        "a run directory that is a file": (written("run", "x"), (), "is a file"),
        "a run directory below a file": (written("file", "x"), ("run.output_dir=OWN/file/r",), "is a file"),
    },
    "sglang.python": {
        "an engine without an interpreter": (
            nothing,
            ("rollout.engine=sglang", "sglang.python=/no/such/python"),
            "no such file",
        ),
        "an engine without SGLang": (
            nothing,
            ("rollout.engine=sglang", f"sglang.python={sys.executable}"),
            "not installed",
        ),
        "an engine that is no interpreter": (
            lambda own: written("python", "#!/bin/sh\necho hello\n")(own) or os.chmod(own / "python", 0o755),
            ("rollout.engine=sglang", "sglang.python=OWN/python"),
            "does not run",
        ),
    },
    "data.sources": {
        "sources and files": (nothing, ("data.sources=[{path='OWN/train.jsonl'}]",), "data.train_paths"),
        "a source without weight": (
            nothing,
            ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl', weight=0.0}]"),
            "weight above 0",
        ),
        "a source that is not there": (
            nothing,
            ("data.train_paths=[]", "data.sources=[{path='OWN/tr.jsonl'}]"),
            "tr.jsonl",
        ),
        "two sources of one name": (
            nothing,
            ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/train.jsonl'}]"),
            "all called 'train'",
        ),
        "a source with an unknown key": (
            nothing,
            ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl', wieght=2.0}]"),
            "tables [[data.sources]] with the keys",
            "did you mean weight?",
        ),
        "a damaged source": (
            written("b.jsonl", "x\n"),
            ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/b.jsonl'}]"),
            "b.jsonl, line 1",
        ),
        "fresh problems in an order by history": (
            nothing,
            ("data.train_paths=[]", "data.sources=[{path='reasoning_gym:chain_sum'}]", "rollout.budget.enabled=true"),
            "set fresh = false",
            "rollout.budget.enabled = false",
        ),
    },
    "rollout.prompt_order": {
        "several sources by priority": (
            lambda own: shutil.copy(own / "train.jsonl", own / "b.jsonl") and None,
            (
                "data.train_paths=[]",
                "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/b.jsonl'}]",
                "rollout.prompt_order=priority",
            ),
            "weights of several sources",
            'rollout.prompt_order = "shuffled"',
        )
    },
    "data.chat_template_options": {
        "options of no chat template": (
            nothing,
            ("data.template=plain", "data.chat_template_options={enable_thinking=false}"),
            'data.template = "chat"',
        ),
        "options that are no table": (nothing, ("data.chat_template_options=3",), "a table"),
    },
    "rollout.group_sise": {"an unknown key": (nothing, ("rollout.group_sise=8",), "rollout.group_size")},
    "rollout.group_size": {
        "a number in words": (nothing, ("rollout.group_size=eight",), "a whole number"),
        "groups of one": (
            nothing,
            ("rollout.group_size=1",),
            "rollout.group_size = 1: responses are compared within their group. Fix: set rollout.group_size = 8 or more",
        ),
    },
    "rollout.max_response_tokens": {"a negative length": (nothing, ("rollout.max_response_tokens=-1",), ">= 1")},
    "rollout.engine": {"an unknown choice": (nothing, ("rollout.engine=vllm",), "sglang")},
    "training.mini_batch_prompts": {
        "a batch that does not divide": (nothing, ("training.mini_batch_prompts=7",), "rollout.prompts_per_step")
    },
    "parallel.tp_size": {"heads that do not divide": (nothing, ("parallel.tp_size=3",), "num_attention_heads")},
    "training.micro_batch_tokens": {
        "a micro-batch that is too small": (nothing, ("training.micro_batch_tokens=8",), "or more")
    },
    "reward.mix": {
        "a component named like a part of every reward": (
            nothing,
            ("reward.verifier=mix", "reward.mix=[{verifier='dapo'}, {verifier='lenient', name='overlong'}]"),
            "other names than verifier, overlong",
            "parts of every reward",
        )
    },
    "run.wait_timeout_seconds": {"no time to wait": (nothing, ("run.wait_timeout_seconds=1",), ">= 30")},
    "checkpoint.output_dir": {
        "a place without files": (nothing, ("checkpoint.output_dir=/proc/x",), "/proc/x cannot be created"),
        "checkpoints in a file": (written("saves", "x"), ("checkpoint.output_dir=OWN/saves",), "is a file")
    },
    "critic.path": {
        "a critic that is not there": (nothing, ("algorithm.name=vapo", "critic.path=OWN/critic"), "pretrain-value"),
        "a critic without weights": (
            lambda own: (
                shutil.copytree(own / "base_model", own / "critic") and (own / "critic/model.safetensors").unlink()
            ),
            ("algorithm.name=vapo", "critic.path=OWN/critic"),
            "no *.safetensors",
        ),
    },
    "telemetry.references": {
        "a reference that is not there": (nothing, ("telemetry.references=['OWN/curve.json']",), "curve.json")
    },
    "sglang.host": {
        "an engine's address of another machine": (
            nothing,
            ("rollout.engine=sglang", "sglang.host=192.0.2.7"),
            "no address of this node",
            "auto",
        ),
        "an engine's address that is no name": (
            nothing,
            ("rollout.engine=sglang", "sglang.host=no.such.invalid"),
            "has no address",
        ),
    },
    "sglang.urls": {
        "servers that do not run": (
            written("key", "x"),
            (*ATTACHED, "sglang.urls=['http://127.0.0.1:9']", "sglang.api_key_file=OWN/key"),
            "no server listens there",
            "start that server first",
        ),
        "servers by a URL that is none": (
            written("key", "x"),
            (*ATTACHED, "sglang.urls=['localhost:3000']", "sglang.api_key_file=OWN/key"),
            "localhost:3000",
        ),
    },
    "sglang.api_key_file": {
        "a key that others may read": (
            lambda own: written("key", "x")(own) or os.chmod(own / "key", 0o644),
            (*ATTACHED, "sglang.urls=['http://127.0.0.1:9']", "sglang.api_key_file=OWN/key"),
            "key",
        )
    },
}


def refusal(own: Path, *overrides: str) -> list[str]:
    """The lines of a run that is refused by what takes a second, else those of a dry run."""
    given = [f"run.output_dir={own / 'run'}", *(override.replace("OWN", str(own)) for override in overrides)]
    for inputs in ("quick", "all"):
        try:
            make_plan(own / "quickstart.toml", given, None, None, ONE_NODE_OF_CPUS, inputs=inputs)
        except (ConfigError, ValueError) as error:
            return str(error).splitlines()
    return []


@pytest.mark.parametrize(("field", "case"), [(field, case) for field, cases in BAD.items() for case in cases])
def test_what_cannot_run_is_refused_in_one_line(
    field: str, case: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    damage, overrides, *words = BAD[field][case]
    damage(own)
    start = time.process_time()
    lines = refusal(own, *overrides)
    assert time.process_time() - start < 10  # seconds of this process: the machine may be busy
    found = [line for line in lines if line.startswith((f"  - {field}:", f"  - {field} = "))]
    assert found, lines or "it would have started"
    for word in words:
        assert word in found[0]
    assert not (own / "run").is_dir() and not any("Traceback" in line for line in lines)


def write_checkpoint(directory: Path, model: Path, dtype: torch.dtype = torch.float32) -> None:
    """The index of a policy's state, as a save on one rank writes it."""
    layout = megatron_layout(read_architecture(model), ParallelLayout(1), dtype)
    directory.mkdir(parents=True)
    index = state_index(layout.tensors, layout.parallel, True, {"policy_00000.safetensors": layout.shards(0)})
    (directory / "policy.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama", "gemma3_text"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_same_model_is_resumed(
    family: str, tied: bool, own: Path, make_model_directory: Callable[..., Path]
) -> None:
    model = make_model_directory(family, tied=tied)
    write_checkpoint(own / "run" / "checkpoints" / "step_000003", model)
    assert not [one for one in machine_problems(config_of(own, f"model.path={model}"), True)]


def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(own: Path) -> None:
    other = own / "other"
    shutil.copytree(own / "base_model", other)
    facts = json.loads((other / "config.json").read_text())
    for changes, words in (
        ({"vocab_size": 7}, "1 tensors differ, first model.embed_tokens.weight (7, 96) there, (451, 96) in the model"),
        ({"num_hidden_layers": 1}, "is missing there"),
        ({"intermediate_size": 8}, "mlp.gate_proj.weight (8, 96) there"),
    ):
        (other / "config.json").write_text(json.dumps({**facts, **changes}))
        shutil.rmtree(own / "run", ignore_errors=True)
        write_checkpoint(own / "run" / "checkpoints" / "step_000003", other)
        [problem] = machine_problems(config_of(own), True)
        assert problem.path == "run.output_dir" and "step_000003 is of another model: " in str(problem)
        assert words in str(problem) and "set checkpoint.output_dir or run.output_dir to a new directory" in str(problem)
    shutil.rmtree(own / "run")
    write_checkpoint(own / "saves" / "step_000003", own / "base_model", torch.bfloat16)
    [problem] = machine_problems(config_of(own, f"checkpoint.output_dir={own / 'saves'}"), True)
    assert str(problem).startswith("checkpoint.output_dir: ") and "type BF16, model.dtype is float32" in str(problem)
    (own / "saves" / "step_000003" / "policy.json").write_text("{")  # damaged: an older one is resumed
    assert not list(machine_problems(config_of(own, f"checkpoint.output_dir={own / 'saves'}"), True))


def test_more_gpus_than_this_machine_has_are_refused(own: Path) -> None:
    given = [f"run.output_dir={own / 'run'}"]
    with pytest.raises(ConfigError, match="processes = 2, num_nodes = 1, gpus_per_node = 1.* --gpus-per-node"):
        make_plan(own / "quickstart.toml", given, "tp2", None, Machines(1, 1))


def test_a_rendezvous_port_in_use_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        [line] = [line for line in refusal(own) if "MASTER_PORT" in line]
    assert "Address already in use" in line and "export another number" in line
    assert not any("MASTER_PORT" in line for line in refusal(own))


def test_a_recipe_that_runs_has_no_problem(own: Path) -> None:
    assert quick_problems(config_of(own)) == [] == input_problems(config_of(own))


def test_held_out_problems_that_are_trained_on_are_counted(own: Path) -> None:
    rows = rows_of(own)
    held_out = (own / "heldout.jsonl").read_text()
    write_heldout(own, [*rows[:2], *map(json.loads, held_out.splitlines())])
    plan = make_plan(own / "quickstart.toml", [], None, None, ONE_NODE_OF_CPUS, inputs="quick")
    assert plan.warnings == (
        f"data.eval_paths: 2 of 66 held-out problems are also trained on, the first at {own / 'heldout.jsonl'}, line 1, "
        "which makes accuracy look better. Fix: remove them from one of both",
    )
    without = ["evaluation.at_start=false", "evaluation.at_end=false", "evaluation.interval=0"]
    assert make_plan(own / "quickstart.toml", without, None, None, ONE_NODE_OF_CPUS, inputs="quick").warnings == ()


def test_gold_answers_that_contradict_each_other_are_counted(own: Path) -> None:
    rows = rows_of(own)
    write_rows(own, [*rows, {**rows[0], "reward_model": {"ground_truth": "-7"}}, rows[1]])
    plan = make_plan(own / "quickstart.toml", [], None, None, ONE_NODE_OF_CPUS, inputs="quick")
    [warning] = plan.warnings
    answer = rows[0]["reward_model"]["ground_truth"]
    place = own / "train.jsonl"
    assert warning.startswith("data.train_paths: 1 prompt has several gold answers, of which at most one is right: ")
    assert f"{answer!r} ({place}, line 1) and '-7' ({place}, line 65)" in warning


def test_prompts_that_are_left_out_are_counted(own: Path) -> None:
    rows = rows_of(own)
    write_rows(own, [*rows, {**rows[0], "prompt": [{"role": "user", "content": "1 + " * 2000}]}])
    [warning] = make_plan(own / "quickstart.toml", [], None, None, ONE_NODE_OF_CPUS, inputs="all").warnings
    assert "data.max_prompt_tokens: 1 of 65 prompts that were read are longer than" in warning


def test_what_a_run_checks_before_its_processes_needs_no_torch() -> None:
    code = """
import sys
from pathlib import Path
from megatron_dapo.config import load_config
from megatron_dapo.doctor.inputs import quick_problems
assert not quick_problems(load_config(sys.argv[1], [f"run.output_dir={sys.argv[2]}"]).config)
sys.exit(bool({"torch", "transformers", "megatron.core"} & set(sys.modules)))
"""
    recipe = QUICKSTART / "quickstart.toml"
    assert subprocess.run([sys.executable, "-c", code, recipe, "/tmp/no_such_run"], check=False).returncode == 0


def test_all_problems_are_in_one_list(own: Path) -> None:
    written("train.jsonl", "hello\n")(own)
    cut(WEIGHTS, 0.5)(own)
    recipe = str(own / "quickstart.toml")
    overrides = ["--set", "training.mini_batch_prompts=7", "--output-dir", str(own / "run")]
    result = CliRunner().invoke(app, ["train", recipe, *overrides, "--dry-run"])
    assert result.exit_code == 2 and not (own / "run").exists()
    for word in ("training.mini_batch_prompts", "line 1 is not valid JSON", "model.safetensors"):
        assert word in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_large_files_are_read_in_places(kind: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged row at the end of a large file is found, and what lies between the places is not read."""
    from megatron_dapo.data import files

    rows = rows_of(QUICKSTART)[:1000]
    damaged = len(rows) - (1 if kind == "jsonl" else 100)  # the last one; of parquet the first of the last row group
    if kind == "jsonl":
        path = own / "large.jsonl"
        monkeypatch.setattr(files, "_SMALL_FILE_BYTES", 1000)
        monkeypatch.setattr(files, "_TAIL_BYTES", 5000)
    else:
        path = own / "large.parquet"
    write_table(path, rows)
    read = sum(1 for _ in files.sampled_rows(path, places=4, rows=50))
    assert 150 < read <= 200 < len(rows) // 2
    rows[damaged] = {**rows[damaged], "prompt": []}
    write_table(path, rows)
    with pytest.raises(ValueError, match="prompt must be a list"):
        list(files.sampled_rows(path, places=4, rows=50))


def write_table(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, len(rows) - 100), table.slice(len(rows) - 100)):
            writer.write_table(part, row_group_size=100)
