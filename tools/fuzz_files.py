"""Feed hostile files to every reader of files from outside: python -m tools.fuzz_files --inputs 10000 --seed 0 --json.

Valid files are changed by structure (values of other types and sizes, keys that are missing, new or doubled, deep nesting) and by
bytes (flips, cuts, insertions). A reader may accept a file or refuse it by an error in one line that names the file or its
directory, within a second of processor time. Anything else is a finding: another exception (traceback), more time (hang), an
error that no one can read (message). Input N of a seed is the same on every machine; --only N shows it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_dapo.untrusted import printable

SECONDS = 1.0  # of processor time for one input
_LONGEST_MESSAGE = 4000
_MEMORY = 4 << 30  # of address space beyond what the imports take

Mutation = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """A reader: `read(directory)` reads `file` of a directory made by `write(directory)`."""

    name: str
    file: str
    write: Callable[[Path], None]
    read: Callable[[Path], object]
    mutations: tuple[Mutation, ...]
    weight: int = 10
    lists: bool = False  # its errors list one problem a line, e.g. of a recipe


@dataclass
class Report:
    """Counts over all inputs, and the findings."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    by_target: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str, int, str]] = field(default_factory=list)  # kind, target, input, message

    def to_json(self) -> dict[str, Any]:
        kinds = Counter(kind for kind, *_ in self.findings)
        counts = {"tracebacks": kinds["traceback"], "hangs": kinds["hang"], "unreadable_messages": kinds["message"]}
        facts = {**vars(self), "findings": self.findings[:20]}
        return {**counts, **facts}


class _Hang(BaseException):
    """The time of an input is over."""


# ---- mutations

_NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    10**9,
    2**31,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.5,
    1e308,
    -0.0,
    1e-320,
    float("nan"),
    float("inf"),
)
_TEXTS = (
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "a/b",
    ".",
    "\0",
    "\x1b[2J\u202e\u2028\n\r",
    "\ud800",
    "F32",
    "None",
    "x" * 20_000,
)
_OTHERS = (None, True, False, [], {}, [[]], [None], {"": {}}, [1] * 5000, {str(n): n for n in range(2000)})


def _value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(_NUMBERS)
    return rng.choice(_TEXTS) if kind < 0.7 else rng.choice(_OTHERS)


def change_json(rng: random.Random, content: bytes) -> bytes:
    """Change one to three places of a JSON document."""
    document = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        document = _changed(rng, document)
    text = json.dumps(document)
    if rng.random() < 0.1 and isinstance(document, dict) and document:  # a key twice
        name = rng.choice(list(document))
        text = f"{{{json.dumps(name)}: {json.dumps(_value(rng))}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def _changed(rng: random.Random, node: Any) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.9:
        node, name = dict(node), rng.choice(list(node))
        way = rng.random()
        if way < 0.12:
            del node[name]
        elif way < 0.2:
            node[rng.choice(_TEXTS)] = _value(rng)
        elif way < 0.25:
            node[rng.choice(_TEXTS)] = node.pop(name)
        else:
            node[name] = _changed(rng, node[name])
        return node
    if isinstance(node, list) and node and rng.random() < 0.8:
        node, place = list(node), rng.randrange(len(node))
        way = rng.random()
        if way < 0.2:
            del node[place]
        elif way < 0.4:
            node.insert(place, node[place] if rng.random() < 0.5 else _value(rng))
        else:
            node[place] = _changed(rng, node[place])
        return node
    if isinstance(node, int) and not isinstance(node, bool) and rng.random() < 0.4:
        return node + rng.choice((-1, 1, -node, node, 8, 10**6))
    return _value(rng)


def nest(rng: random.Random, content: bytes) -> bytes:
    """Put a value of JSON behind so many brackets that parsers which call themselves give up; or a number of many digits."""
    deep = rng.choice((b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000, b"1e99999", b"[" * 3000 + b"]" * 3000))
    places = [place for place, byte in enumerate(content) if byte in b":[,"]
    place = rng.choice(places) + 1 if places else 0
    return content[:place] + deep + content[place:]


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, insert and repeat bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        way = rng.randrange(5)
        if way == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[place:]
        elif way == 2:
            data[place:place] = rng.choice(
                (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", rng.randbytes(8), b"]}", b'"')
            )
        elif way == 3:
            data[place:place] = data[place : place + rng.randrange(64)]
        else:
            del data[place : place + rng.randrange(64)]
    return bytes(data)


def change_lines(rng: random.Random, content: bytes) -> bytes:
    """Change the values of a TOML file, double its lines, put others in."""
    values = [
        "0",
        "-1",
        "1e400",
        "nan",
        '""',
        '"\\u0000\\u001b[2J"',
        "true",
        "[]",
        "{}",
        "[[1]]",
        "1979-05-27",
        "9" * 5000,
    ]
    values += [
        "9223372036854775808",
        "[" * 5000,
        "{a=" * 3000,
        "'''\n\n'''",
        '"../x"',
        "'0.0.0.0'",
        "0x7fffffffffffffff",
        "2",
        "1000000007",
        "1e300",
    ]
    keys = [
        "run.seed",
        "base",
        "model.path",
        "parallel.tp_size",
        "[run]",
        "[[data]]",
        "x.y.z",
        '"\\u202e"',
        "algorithm.loss",
    ]
    lines = content.decode().splitlines()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        key, equals, _ = lines[place].partition("=")
        way = rng.random()
        if way < 0.6 and equals:
            lines[place] = f"{key}= {rng.choice(values)}"
        elif way < 0.8:
            lines.insert(place, f"{rng.choice(keys)} = {rng.choice(values)}")
        elif way < 0.9:
            lines.insert(rng.randrange(len(lines)), lines[place])
        else:
            del lines[place]
    return "\n".join(lines).encode()


def change_header(rng: random.Random, content: bytes) -> bytes:
    """Change the JSON header of a safetensors file, or its length."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.15:
        wrong = rng.choice((0, 1, length - 1, length + 1, 100_000_001, 2**63, 2**64 - 1))
        return wrong.to_bytes(8, "little") + header + data
    if rng.random() < 0.2:
        changed = json.loads(header)
        name = rng.choice(list(changed))
        shape = rng.choice(([1] * 100_000, [2**62, 4], [0] * 70, [2**31] * 3, [-1], [True], "12", [1.0]))
        changed[name] = {**changed[name], "shape": shape}
        header = json.dumps(changed).encode()
    else:
        header = rng.choice((change_json, change_json, nest))(rng, header)
    return len(header).to_bytes(8, "little") + header + data


def change_a_line(change: Mutation) -> Mutation:
    """Return a mutation of one line of a JSON-lines file."""

    def changed(rng: random.Random, content: bytes) -> bytes:
        lines = content.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = change(rng, lines[place])
        return b"\n".join(lines) + b"\n"

    return changed


_JSON = (change_json, change_json, change_json, nest, change_bytes)


# ---- readers

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
    from megatron_dapo.checkpoints.architecture import HEADS, ModelArchitecture
    from megatron_dapo.config.inputs import read_architecture
    from megatron_dapo.engines.sglang.served import Expectation

    readers = (
        read_architecture,
        lambda path: ModelArchitecture.from_directory(path, heads=HEADS).shapes(),
        lambda path: Expectation.of(SimpleNamespace(model_path=path, dtype="float32", tensor_parallel=1, seeded=False)),
    )
    _all(readers, directory)


def _all(readers: Sequence[Callable[[Path], object]], path: Path) -> None:
    """Call every reader; raise the last refusal. Only one of them may hold against a file what another takes."""
    refusal = None
    for read in readers:
        try:
            read(path)
        except (ValueError, OSError) as error:
            _check_message(error, path)
            refusal = error
    if refusal is not None:
        raise refusal


def _write_model(directory: Path) -> None:
    import torch

    from megatron_dapo.checkpoints.safetensors_file import SafetensorsWriter
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
    from megatron_dapo.checkpoints.huggingface import HFCheckpoint

    with HFCheckpoint(directory) as model:
        for name in model.specs:
            model.read_tensor(name)


def _write_checkpoint(directory: Path) -> None:
    import torch

    from megatron_dapo.recovery.checkpoint_store import CheckpointStore, save_checkpoint

    def write(writer: Any) -> None:
        writer.save_json("trainer.json", {"train_step": 3})
        writer.save_tensors("model.safetensors", {"w": torch.ones(3)})

    save_checkpoint(CheckpointStore(directory, keep=1), 3, write, metadata={"layout": "TP1"})


def _read_checkpoint(directory: Path) -> None:
    from megatron_dapo.recovery.checkpoint_store import CheckpointStore, find_resume

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
    from megatron_dapo.cli.plan import ONE_NODE_OF_CPUS, make_plan

    make_plan(directory / "recipe.toml", [], None, None, ONE_NODE_OF_CPUS)


def _read_rows(directory: Path) -> None:
    from megatron_dapo.data.files import read_rows

    list(read_rows(directory / "data.jsonl"))


def _write_batch(directory: Path) -> None:
    import torch

    from megatron_dapo.recovery.durable_files import HERE
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
    from megatron_dapo.trainer.build_rollout import read_model_inputs

    read_model_inputs(directory, trust_remote_code=False)


def _targets() -> Iterator[Target]:
    for name, config in CONFIGS.items():
        yield Target(
            f"config.json of {name}", "config.json", _json_file("config.json", config), _read_config, _JSON, 15
        )
    header = (change_header, change_header, change_header, change_bytes)
    yield Target("safetensors", "model-00001-of-00002.safetensors", _write_model, _read_model, header, 20)
    yield Target("index", "model.safetensors.index.json", _write_model, _read_model, _JSON)
    yield Target("manifest", "step_000003/manifest.json", _write_checkpoint, _read_checkpoint, _JSON)
    recipe = (change_lines, change_lines, change_bytes)
    yield Target("recipe", "recipe.toml", _write_recipe, _read_recipe, recipe, 10, lists=True)
    plan = "config.json of a recipe"
    yield Target(plan, "config.json", _write_recipe, _read_recipe, (change_json, change_json, nest), 10, lists=True)
    rows = tuple(map(change_a_line, (change_json, change_json, nest))) + (change_bytes,)
    row_file = lambda directory: (directory / "data.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3) and None  # noqa: E731
    yield Target("data rows", "data.jsonl", row_file, _read_rows, rows)
    yield Target("samples", "samples.jsonl", _write_records, _read_records, rows, 5)
    yield Target("replay facts", "step/batch.json", _write_batch, _read_batch, _JSON)
    yield Target("replay tensors", "step/batch.safetensors", _write_batch, _read_batch, header)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        yield Target(file, file, _write_tokenizer, _read_tokenizer, _JSON, 3)


# ---- the run


def _check_message(error: BaseException, directory: Path, lists: bool = False) -> None:
    """Raise AssertionError for an error that does not name the file, has several lines, or unprintable characters."""
    text = str(error)
    assert str(directory) in text, f"names no file: {text[:300]!r}"
    assert lists or "\n" not in text, f"has several lines: {text[:300]!r}"
    assert printable(text) == text, f"has unprintable characters: {text[:300]!r}"
    assert lists or len(text) <= _LONGEST_MESSAGE, f"has {len(text)} characters: {text[:100]!r}"


def fuzz(
    targets: Sequence[Target], num_inputs: int, seed: int, only: int | None = None, seconds: float = SECONDS
) -> Report:
    """Feed `num_inputs` inputs, spread over the targets by weight, and report."""
    report = Report()
    previous = signal.signal(signal.SIGPROF, _raise_hang)
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
            directories = _valid_directories(targets, Path(scratch))
            for number in range(num_inputs):
                rng = random.Random(f"{seed}/{number}")
                target = rng.choices(targets, [each.weight for each in targets])[0]
                if only is None or number == only:
                    _feed(target, directories[target.name], number, rng, report, seconds)
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGPROF, previous)
    return report


def _valid_directories(targets: Sequence[Target], scratch: Path) -> Mapping[str, Path]:
    """Write each target's valid files, and read them: what is refused from the start tests nothing."""
    directories = {}
    for number, target in enumerate(targets):
        directories[target.name] = directory = scratch / str(number)
        directory.mkdir()
        target.write(directory)
        target.read(directory)
    return directories


def _feed(target: Target, directory: Path, number: int, rng: random.Random, report: Report, seconds: float) -> None:
    path = directory / target.file
    valid = path.read_bytes()
    content = rng.choice(target.mutations)(rng, valid)
    path.write_bytes(content)
    report.inputs += 1
    report.by_target[target.name] += 1
    began = time.process_time()
    found = None
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        target.read(directory)
        report.accepted += 1
    except (ValueError, OSError, RuntimeError) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = _finding_of(error, directory, target)
        report.refused += 1
    except _Hang:
        found = ("hang", f"more than {seconds:g} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = ("traceback", _last_frames(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.write_bytes(valid)
    spent = time.process_time() - began
    report.slowest_seconds = max(report.slowest_seconds, round(spent, 3))
    if found is None and spent > seconds:
        found = ("hang", f"{spent:.1f} s")
    if found is not None:
        report.findings.append((found[0], target.name, number, found[1]))


def _finding_of(error: Exception, directory: Path, target: Target) -> tuple[str, str] | None:
    """Return what is wrong with a refusal: only errors made for users count as one."""
    from megatron_dapo.recovery.checkpoint_store import CheckpointError

    if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
        return "traceback", _last_frames(error)
    try:
        _check_message(error, directory, target.lists)
    except AssertionError as problem:
        return "message", f"{problem}; {_last_frames(error)}"
    return None


def _last_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]!r} at {places}"


def _raise_hang(signum: int, frame: object) -> None:
    raise _Hang


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print the report, and return 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="feed this input alone")
    parser.add_argument("--json", action="store_true")
    settings = parser.parse_args(arguments)
    targets = list(_targets())
    # Imports first: they take memory and time that no input asked for.
    fuzz(targets, 1, settings.seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    report = fuzz(targets, settings.inputs, settings.seed, settings.only).to_json()
    if settings.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in report.items() if name != "findings"))
        sys.stdout.write("".join(f"{' | '.join(map(str, finding))}\n" for finding in report["findings"]))
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
