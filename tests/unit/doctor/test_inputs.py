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
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.doctor.inputs import input_problems, quick_problems
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
TRAIN, CSV = "data.train_paths", ("data.train_paths=['OWN/t.csv']", "data.columns.prompt=q", "data.columns.answer=a")
WEIGHTS = "base_model/model.safetensors"
# (what is done to the directory, overrides, field that is named, words of the line)
BAD: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str, tuple[str, ...]]] = {
    "empty data": (written("train.jsonl", ""), (), "data.train_paths", ("has no rows",)),
    "blank data": (written("train.jsonl", "\n\n"), (), "data.train_paths", ("has no rows",)),
    "no JSON": (written("train.jsonl", "hello\n"), (), "data.train_paths", ("line 1 is not valid JSON",)),
    "a list a line": (written("train.jsonl", "[1]\n"), (), "data.train_paths", ("line 1", "JSON object")),
    "bad UTF-8": (written("train.jsonl", b'{"prompt": "\xff"}\n'), (), "data.train_paths", ("line 1",)),
    "a cut line": (cut("train.jsonl", 0.99), (), "data.train_paths", ("is not valid JSON",)),
    "wrong columns": (renamed("prompt", "question"), (), "data.train_paths", ("missing column(s) prompt", "question")),
    "no answers": (renamed("reward_model", "gold"), (), "data.train_paths", ("missing column(s) reward_model",)),
    "an empty answer": (changed_row(3, reward_model={"ground_truth": " "}), (), "data.train_paths", ("line 4", "gold")),
    "an answer that is no text": (
        changed_row(2, reward_model={"ground_truth": 1.5}),
        (),
        "data.train_paths",
        ("line 3", "1.5"),
    ),
    "no ground truth": (changed_row(0, reward_model={"style": "rule"}), (), "data.train_paths", ("ground_truth",)),
    "an empty prompt": (changed_row(5, prompt=[]), (), "data.train_paths", ("line 6", "prompt must be")),
    "a message without content": (changed_row(5, prompt=[{"role": "user"}]), (), "data.train_paths", ("line 6",)),
    "images": (changed_row(0, images=["a.png"]), (), "data.train_paths", ("images", "only text is trained")),
    "a damaged held-out file": (written("heldout.jsonl", "{}\n"), (), "data.eval_paths", ("heldout.jsonl", "line 1")),
    "parquet that is none": (
        written("train.parquet", "PAR1"),
        ("data.train_paths=['OWN/train.parquet']",),
        "data.train_paths",
        ("train.parquet",),
    ),
    "another kind of file": (
        written("train.xlsx", "PK"),
        ("data.train_paths=['OWN/train.xlsx']",),
        "data.train_paths",
        ("unknown kind of data file '.xlsx'",),
    ),
    "prompts that are too long": (nothing, ("data.max_prompt_tokens=8",), "data.max_prompt_tokens", ("raise it to",)),
    "no weights": (removed(WEIGHTS), (), "model.path", ("base_model",)),
    "cut weights": (cut(WEIGHTS, 0.5), (), "model.path", ("model.safetensors",)),
    "weights that are none": (written(WEIGHTS, b"\0" * 64), (), "model.path", ("model.safetensors",)),
    "an empty weights file": (written(WEIGHTS, b""), (), "model.path", ("model.safetensors",)),
    "weights of a deeper model": (model_config(num_hidden_layers=40), (), "model.path", ("missing", "do not fit")),
    "weights of a wider model": (model_config(intermediate_size=4096), (), "model.path", ("of another shape",)),
    "another family": (model_config(model_type="mistral"), (), "model.path", ("mistral",)),
    "no tokenizer": (
        removed("base_model/tokenizer.json", "base_model/tokenizer_config.json"),
        (),
        "model.path",
        ("tokenizer",),
    ),
    "a damaged tokenizer": (written("base_model/tokenizer.json", "{"), (), "model.path", ("base_model",)),
    "a verifier of no module": (
        nothing,
        ("reward.verifier=no_such_module:score",),
        "reward.verifier",
        ("cannot import module 'no_such_module'",),
    ),
    "a verifier of no function": (
        nothing,
        ("reward.verifier=json:score",),
        "reward.verifier",
        ("has no function 'score'",),
    ),
    "an unknown verifier": (
        nothing,
        ("reward.verifier=dappo",),
        "reward.verifier",
        ("'dappo'", 'reward.verifier = "dapo"'),
    ),
    "a shadow verifier of no module": (
        nothing,
        ("reward.shadow_verifier=no_such_module:score",),
        "reward.shadow_verifier",
        ("cannot import module",),
    ),
    "prompts that ask for another format": (
        nothing,
        ("reward.answer_format=boxed",),
        "reward.verifier",
        ("disagrees with the format",),
    ),
    "a run directory that is a file": (written("run", "x"), (), "run.output_dir", ("is a file",)),
    "an engine without an interpreter": (
        nothing,
        ("rollout.engine=sglang", "sglang.python=/no/such/python"),
        "sglang.python",
        ("no such file",),
    ),
    "an engine without SGLang": (
        nothing,
        ("rollout.engine=sglang", f"sglang.python={sys.executable}"),
        "sglang.python",
        ("not installed",),
    ),
    # ---- data: rows
    "a null row": (written("train.jsonl", "null\n"), (), TRAIN, ("line 1", "NoneType")),
    "a row without columns": (row_text(b"\xef\xbb\xbf{}"), (), TRAIN, ("line 1: missing column(s) prompt",)),
    "UTF-16": (written("train.jsonl", '{"prompt": "a"}\n'.encode("utf-16")), (), TRAIN, ("line 1 is not valid JSON",)),
    "gzip": (written("train.jsonl", b"\x1f\x8b\x08\0\0"), (), TRAIN, ("line 1 is not valid JSON",)),
    "brackets without end": (deep, (), TRAIN, ("line 1 is not valid JSON",)),
    "a prompt that is a number": (changed_row(0, prompt=7), (), TRAIN, ("line 1", "prompt must be")),
    "a prompt of spaces": (changed_row(0, prompt="  "), (), TRAIN, ("line 1", "prompt must be")),
    "a prompt that is Python": (
        changed_row(0, prompt="[{'role': 'user', 'content': 'x'}]"),
        (),
        TRAIN,
        ("line 1", "json.dumps"),
    ),
    "a content of parts": (
        changed_row(0, prompt=[{"role": "user", "content": [{"type": "image"}]}]),
        (),
        TRAIN,
        ("only text is trained",),
    ),
    "an answer that is true": (changed_row(0, reward_model={"ground_truth": True}), (), TRAIN, ("line 1", "True")),
    "an answer that is a list": (changed_row(0, reward_model={"ground_truth": ["4"]}), (), TRAIN, ("gold answer",)),
    "a reward model that is text": (changed_row(0, reward_model="42"), (), TRAIN, ("has no field ground_truth",)),
    "columns that are not there": (
        nothing,
        ("data.columns.prompt=question", "data.columns.answer=gold"),
        TRAIN,
        ("missing column(s) question, gold", "data.columns"),
    ),
    # ---- data: files
    "a file that is not there": (nothing, ("data.train_paths=['OWN/trian.jsonl']",), TRAIN, ("did you mean",)),
    "no file": (nothing, ("data.train_paths=[]",), TRAIN, ("data.sources",)),
    "a directory of files": (directory("rows"), ("data.train_paths=['OWN/rows']",), TRAIN, ("no data set saved",)),
    "a saved set of splits": (
        lambda own: directory("s")(own) or written("s/dataset_dict.json", '{"splits": ["train", "test"]}')(own),
        ("data.train_paths=['OWN/s']",),
        TRAIN,
        ("has the splits train, test", "s/train"),
    ),
    "a saved set without its file": (
        saved({"_data_files": [{"filename": "data-0.arrow"}]}),
        ("data.train_paths=['OWN/saved']",),
        TRAIN,
        ("1 of its 1 files are missing, e.g. data-0.arrow",),
    ),
    "a saved set that is damaged": (
        saved({"_data_files": [{"filename": "data-0.arrow"}]}, "data-0.arrow"),
        ("data.train_paths=['OWN/saved']",),
        TRAIN,
        ("data-0.arrow", "cannot be read"),
    ),
    "a saved set without a state": (saved({}), ("data.train_paths=['OWN/saved']",), TRAIN, ("names no data files",)),
    "CSV with a cell too many": (written("t.csv", "q,a\n1,2,3\n"), CSV, TRAIN, ("line 2", "2 cells")),
    "CSV with an open quote": (written("t.csv", 'q,a\n"1,2\n'), CSV, TRAIN, ("t.csv, line",)),
    "CSV in Latin-1": (written("t.csv", "q,a\n\xe9,2\n".encode("latin-1")), CSV, TRAIN, ("t.csv", "utf-8")),
    "CSV without a row": (written("t.csv", "q,a\n"), CSV, TRAIN, ("has no rows",)),
    "JSON that is an object": (
        written("t.json", '{"rows": []}'),
        ("data.train_paths=['OWN/t.json']",),
        TRAIN,
        ("expected a list of objects, got dict",),
    ),
    "JSON lines called .json": (
        lambda own: shutil.copy(own / "train.jsonl", own / "t.json") and None,
        ("data.train_paths=['OWN/t.json']",),
        TRAIN,
        ("an object a line ends in .jsonl",),
    ),
    "an empty held-out file": (written("heldout.jsonl", ""), (), "data.eval_paths", ("has no rows",)),
    # ---- data: sources
    "sources beside files": (
        nothing,
        ("data.sources=[{path='OWN/train.jsonl'}]",),
        "data.sources",
        ("data.train_paths",),
    ),
    "a source without weight": (
        nothing,
        ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl', weight=0.0}]"),
        "data.sources",
        ("weight above 0",),
    ),
    "a source that is not there": (
        nothing,
        ("data.train_paths=[]", "data.sources=[{path='OWN/tr.jsonl'}]"),
        "data.sources",
        ("tr.jsonl",),
    ),
    "two sources of one name": (
        nothing,
        ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/train.jsonl'}]"),
        "data.sources",
        ("all called 'train'",),
    ),
    "a source with an unknown key": (
        nothing,
        ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl', wieght=2.0}]"),
        "data.sources",
        ("tables [[data.sources]] with the keys", "did you mean weight?"),
    ),
    "a damaged source": (
        written("b.jsonl", "x\n"),
        ("data.train_paths=[]", "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/b.jsonl'}]"),
        "data.sources",
        ("b.jsonl, line 1",),
    ),
    "several sources by priority": (
        lambda own: shutil.copy(own / "train.jsonl", own / "b.jsonl") and None,
        (
            "data.train_paths=[]",
            "data.sources=[{path='OWN/train.jsonl'}, {path='OWN/b.jsonl'}]",
            "rollout.prompt_order=priority",
        ),
        "rollout.prompt_order",
        ("weights of several sources", 'rollout.prompt_order = "shuffled"'),
    ),
    "fresh problems in an order by history": (
        nothing,
        ("data.train_paths=[]", "data.sources=[{path='reasoning_gym:chain_sum'}]", "rollout.budget.enabled=true"),
        "data.sources",
        ("set fresh = false", "rollout.budget.enabled = false"),
    ),
    # ---- Hub
    "a Hub model without a network": (nothing, ("model.path=Qwen/Qwen2.5-0.5B",), "model.path", ("hf download Qwen/",)),
    "Hub data without a network": (
        nothing,
        ("data.train_paths=['hf://openai/gsm8k']",),
        TRAIN,
        ("hf download openai/gsm8k --repo-type dataset",),
    ),
    # ---- model directory, weights, tokenizer
    "no model directory": (nothing, ("model.path=/no/such/model",), "model.path", ("/no/such/model",)),
    "no config.json": (removed("base_model/config.json"), (), "model.path", ("no config.json",)),
    "a config.json that is none": (written("base_model/config.json", "{"), (), "model.path", ("config.json",)),
    "a config.json that is a list": (written("base_model/config.json", "[]"), (), "model.path", ("config.json",)),
    "a config.json of text sizes": (model_config(hidden_size="64"), (), "model.path", ("hidden_size",)),
    "a vision model": (model_config(model_type="qwen2_vl"), (), "model.path", ("qwen2_vl", "supported are")),
    "a missing part of the weights": (without_weight_file, (), "model.path", ("1 of 1 weights files are missing",)),
    "pickled weights": (pickled, (), "model.path", (".bin files are pickles",)),
    "weights with bytes behind them": (longer(WEIGHTS, 9), (), "model.path", ("its header asks for",)),
    "weights of a pointer file": (
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
        (),
        "model.path",
        ("no safetensors file",),
    ),
    "a tokenizer without a chat template": (own_template(""), (), "model.path", ("no chat template", "plain")),
    "a chat template with an error": (own_template("{% if %}"), (), TRAIN, ("chat template",)),
    "a chat template without a system role": (
        own_template("{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"),
        ("data.system_prompt=Think.",),
        TRAIN,
        ("refuses messages of the roles system, user",),
    ),
    "options of no chat template": (
        nothing,
        ("data.template=plain", "data.chat_template_options={enable_thinking=false}"),
        "data.chat_template_options",
        ('data.template = "chat"',),
    ),
    "options that are no table": (
        nothing,
        ("data.chat_template_options=3",),
        "data.chat_template_options",
        ("a table",),
    ),
    # ---- values
    "an unknown key": (nothing, ("rollout.group_sise=8",), "rollout.group_sise", ("rollout.group_size",)),
    "a number in words": (nothing, ("rollout.group_size=eight",), "rollout.group_size", ("a whole number",)),
    "a negative length": (nothing, ("rollout.max_response_tokens=-1",), "rollout.max_response_tokens", (">= 1",)),
    "an unknown choice": (nothing, ("rollout.engine=vllm",), "rollout.engine", ("sglang",)),
    "a batch that does not divide": (
        nothing,
        ("training.mini_batch_prompts=7",),
        "training.mini_batch_prompts",
        ("rollout.prompts_per_step",),
    ),
    "groups of one": (nothing, ("rollout.group_size=1",), "rollout.group_size", ("compared within their group",)),
    "heads that do not divide": (nothing, ("parallel.tp_size=3",), "parallel.tp_size", ("num_attention_heads",)),
    "a micro-batch that is too small": (
        nothing,
        ("training.micro_batch_tokens=8",),
        "training.micro_batch_tokens",
        ("or more",),
    ),
    # ---- reward
    "a reward file that is not there": (
        nothing,
        ("reward.verifier=OWN/own_reward.py:reward",),
        "reward.verifier",
        ("own_reward.py",),
    ),
    "a reward with a typing error": (
        module("def reward(sample:\n"),
        ("reward.verifier=OWN/own_reward.py:reward",),
        "reward.verifier",
        ("own_reward.py",),
    ),
    "a reward that raises": (
        module("def reward(sample):\n    return sample.extra_info['level']\n"),
        ("reward.verifier=OWN/own_reward.py:reward",),
        "reward.verifier",
        ("KeyError",),
    ),
    "a reward that returns text": (
        module("def reward(sample):\n    return 'good'\n"),
        ("reward.verifier=OWN/own_reward.py:reward",),
        "reward.verifier",
        ("not str",),
    ),
    "a component named like a part of every reward": (
        nothing,
        ("reward.verifier=mix", "reward.mix=[{verifier='dapo'}, {verifier='lenient', name='overlong'}]"),
        "reward.mix",
        ("other names than verifier, overlong", "parts of every reward"),
    ),
    "a reward that fails at its import": (
        module("limit = undefined\n"),
        ("reward.verifier=OWN/own_reward.py:reward",),
        "reward.verifier",
        ("cannot import module", "NameError"),
    ),
    # ---- directories, critic, references
    "a run directory below a file": (
        written("file", "x"),
        ("run.output_dir=OWN/file/r",),
        "run.output_dir",
        ("is a file",),
    ),
    "checkpoints in a file": (
        written("saves", "x"),
        ("checkpoint.output_dir=OWN/saves",),
        "checkpoint.output_dir",
        ("is a file",),
    ),
    "a critic that is not there": (
        nothing,
        ("algorithm.name=vapo", "critic.path=OWN/critic"),
        "critic.path",
        ("pretrain-value",),
    ),
    "a critic without weights": (
        lambda own: shutil.copytree(own / "base_model", own / "critic") and (own / "critic/model.safetensors").unlink(),
        ("algorithm.name=vapo", "critic.path=OWN/critic"),
        "critic.path",
        ("no *.safetensors",),
    ),
    "a reference that is not there": (
        nothing,
        ("telemetry.references=['OWN/curve.json']",),
        "telemetry.references",
        ("curve.json",),
    ),
    # ---- engines, ports, GPUs
    "an engine that is no interpreter": (
        lambda own: written("python", "#!/bin/sh\necho hello\n")(own) or os.chmod(own / "python", 0o755),
        ("rollout.engine=sglang", "sglang.python=OWN/python"),
        "sglang.python",
        ("does not run",),
    ),
    "an engine's address of another machine": (
        nothing,
        ("rollout.engine=sglang", "sglang.host=192.0.2.7"),
        "sglang.host",
        ("no address of this node", "auto"),
    ),
    "an engine's address that is no name": (
        nothing,
        ("rollout.engine=sglang", "sglang.host=no.such.invalid"),
        "sglang.host",
        ("has no address",),
    ),
    "servers that do not run": (
        written("key", "x"),
        (*ATTACHED, "sglang.urls=['http://127.0.0.1:9']", "sglang.api_key_file=OWN/key"),
        "sglang.urls",
        ("no server listens there", "start that server first"),
    ),
    "servers by a URL that is none": (
        written("key", "x"),
        (*ATTACHED, "sglang.urls=['localhost:3000']", "sglang.api_key_file=OWN/key"),
        "sglang.urls",
        ("localhost:3000",),
    ),
    "a key that others may read": (
        lambda own: written("key", "x")(own) or os.chmod(own / "key", 0o644),
        (*ATTACHED, "sglang.urls=['http://127.0.0.1:9']", "sglang.api_key_file=OWN/key"),
        "sglang.api_key_file",
        ("key",),
    ),
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


def test_the_table_has_the_size_that_was_promised() -> None:
    assert len(BAD) >= 80


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_is_refused_in_one_line(case: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    damage, overrides, field, words = BAD[case]
    damage(own)
    start = time.process_time()
    lines = refusal(own, *overrides)
    assert time.process_time() - start < 10  # seconds of this process: the machine may be busy
    found = [line for line in lines if line.startswith(f"  - {field}:")]
    assert found, lines or "it would have started"
    for word in words:
        assert word in found[0]
    assert not (own / "run").is_dir() and not any("Traceback" in line for line in lines)


def test_more_gpus_than_this_machine_has_are_refused(own: Path) -> None:
    given = [f"run.output_dir={own / 'run'}"]
    with pytest.raises(
        ConfigError, match="parallel: the run needs 2 GPUs of its node, this machine has 1.* --gpus-per-node 2"
    ):
        make_plan(own / "quickstart.toml", given, "tp2", None, Machines(gpus_here=1))


def test_a_rendezvous_port_in_use_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        [line] = [line for line in refusal(own) if "MASTER_PORT" in line]
    assert "Address already in use" in line and "export another number" in line
    assert not any("MASTER_PORT" in line for line in refusal(own))


def test_a_recipe_that_runs_has_no_problem(own: Path) -> None:
    assert quick_problems(config_of(own)) == [] == input_problems(config_of(own))


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
