"""The arrows between packages point one way: a module imports only from lower layers; heavy libraries stay in one
directory each."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import megatron_dapo

PACKAGE = Path(megatron_dapo.__file__).parent

# From the bottom up: a package imports only from layers above it in this list, and none of the same layer.
ORDER = (
    ("types", "rounding", "svg", "untrusted", "affinity", "age_guard", "device_thread", "imports", "token_support", "_version"),
    ("precision", "hooks", "files", "workers"),
    ("models", "watch"),
    ("config", "nodes"),
    ("algorithms", "rewards", "data", "plan"),
    ("reshard", "parallel", "ops", "environments"),
    ("checkpoints",),
    ("megatron", "engines", "bridge", "telemetry"),
    ("rollout", "evaluation"),
    ("report",),
    ("trainer", "launch"),
    ("doctor", "proof", "converters", "quantization", "demo"),
    ("run",),  # the plan of a run tries what `doctor` tries
    ("api", "selection", "ablation"),
    ("cli",),
)
LAYERS = {package: number for number, packages in enumerate(ORDER) for package in packages}
# External module -> the only packages that may import it.
HEAVY = {
    "megatron": {"megatron"},
    "sglang": {"engines"},
    "aiohttp": {"engines"},
    "simdjson": {"engines"},
    "pybase64": {"engines"},
    "transformer_engine": {"megatron", "ops", "doctor"},  # doctor asks it, in a process of its own
    "triton": {"ops"},
    "modelopt": {"quantization"},
    "rich": {"telemetry", "cli", "proof"},
    "typer": {"cli"},
    "tensorboard": {"telemetry"},
    "wandb": {"telemetry"},
    "mlflow": {"telemetry"},
    "prometheus_client": {"telemetry"},
    "gradio": {"demo"},
    "matplotlib": {"ablation"},
    # bridge: SGLang's stock endpoint takes nothing else. converters: metadata of a torch_dist checkpoint, see below.
    "pickle": {"bridge", "converters"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


def package_of(module: str) -> str:
    return module.split(".")[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Modules a file imports when it runs; those only for type checkers do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}: write it absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from runtime_imports(node)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(runtime_imports(tree_of(path)))


def imports(*packages: str) -> Iterator[tuple[str, str]]:
    """Yield (module, what it imports) of these packages, or of all."""
    for path in MODULES:
        if not packages or package_of(module_name(path)) in packages:
            yield from ((module_name(path), imported) for imported in imports_of(path))


def test_imports_point_down() -> None:
    without_layer = {package_of(module_name(path)) for path in MODULES} - LAYERS.keys()
    assert not without_layer, "add them to LAYERS"
    violations = []
    for module, imported in imports():
        if imported.split(".")[0] != "megatron_dapo":
            continue
        importer, other = package_of(module), package_of(imported)
        if importer != other and LAYERS[other] >= LAYERS[importer]:
            violations.append(f"{module} (layer {LAYERS[importer]}) imports {imported} (layer {LAYERS[other]})")
    assert not violations


def test_the_trainer_knows_no_launcher_and_no_command_line() -> None:
    own = [(module, name) for module, name in imports("trainer") if name.startswith("megatron_dapo.")]
    assert own and not [(module, name) for module, name in own if package_of(name) in ("launch", "run", "cli")]


def test_heavy_libraries_stay_in_their_directory() -> None:
    heavy = [(module, imported) for module, imported in imports() if imported.split(".")[0] in HEAVY]
    assert heavy
    for module, imported in heavy:
        allowed = HEAVY[imported.split(".")[0]]
        assert package_of(module) in allowed, f"{module} imports {imported}; only {sorted(allowed)} may"


def test_lower_layers_know_no_process_groups() -> None:
    lower = [package for package, layer in LAYERS.items() if layer <= LAYERS["plan"]]
    assert not [(module, name) for module, name in imports(*lower) if name.startswith("torch.distributed")]


def test_configuration_needs_no_torch() -> None:
    heavy = ("torch", "transformers", "numpy")
    assert not [(module, name) for module, name in imports("config") if name.split(".")[0] in heavy]


def test_every_package_with_a_layer_exists() -> None:
    there = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    assert set(LAYERS) <= there


def test_nothing_is_unpickled() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if module_name(path) == "megatron_dapo.converters.torch_dist":
            # Only records of a checkpoint's index; tests/unit/converters/test_torch_dist.py feeds it pickles that run code.
            text = text.replace("class _MetadataUnpickler(pickle.Unpickler):", "").replace(
                "_MetadataUnpickler(file)", ""
            )
        assert "pickle.load" not in text and "Unpickler" not in text, f"{module_name(path)} reads a pickle"


THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "to_thread", "run_in_executor"}


def test_threads_next_to_torch_are_device_threads() -> None:
    """A new thread's current device is GPU 0, whichever is the rank's."""
    next_to_torch = [path for path in MODULES if any(name.split(".")[0] == "torch" for name in imports_of(path))]
    assert next_to_torch
    for path in next_to_torch:
        functions = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        called = {getattr(function, "attr", getattr(function, "id", "")) for function in functions}
        assert not called & THREADS, f"{module_name(path)} starts a thread: take megatron_dapo.device_thread"


def test_workers_of_environments_need_the_standard_library_only() -> None:
    """They run in any interpreter that a user names."""
    own = tuple(f"megatron_dapo.environments.{name}" for name in ("remote", "tools", "adapters"))
    helpers = (
        "megatron_dapo.hooks",
        "megatron_dapo.untrusted",
        "megatron_dapo.workers.pipes",
        "megatron_dapo.workers.supervisor",
    )
    sandbox = ("megatron_dapo.rewards.sandbox",)
    inside = (*own, *helpers, *sandbox)
    there = [path for path in MODULES if module_name(path).startswith(inside)]
    there += [PACKAGE / "environments" / "__init__.py"]
    there += [PACKAGE / package / "__init__.py" for package in ("workers", "rewards")]
    for path in there:
        for imported in imports_of(path):
            known = imported.split(".")[0] in sys.stdlib_module_names or imported.startswith(inside)
            # An adapter imports its library, and openenv the one that speaks to its server.
            libraries = (path.stem, "websockets") if path.stem == "openenv" else (path.stem,)
            known = known or (path.parent.name == "adapters" and imported.split(".")[0] in libraries)
            assert known or module_name(path).endswith("sandbox.runner"), f"{module_name(path)} imports {imported}"


def test_the_protocol_needs_only_torch_and_numpy() -> None:
    """bridge/protocol also runs inside the engine's processes: torch, numpy, the standard library, and reshard/ like it."""
    own = [path for path in MODULES if module_name(path).startswith("megatron_dapo.bridge.protocol")]
    own += [path for path in MODULES if package_of(module_name(path)) == "reshard"]
    allowed = (
        "megatron_dapo.bridge.protocol",
        "megatron_dapo.reshard",
        "megatron_dapo.device_thread",
        "megatron_dapo.rounding",
    )
    for path in own:
        for imported in imports_of(path):
            root = imported.split(".")[0]
            known = root in sys.stdlib_module_names or root in ("torch", "numpy") or imported.startswith(allowed)
            assert known, f"{module_name(path)} imports {imported}"
    assert (PACKAGE / "bridge" / "__init__.py").read_text(encoding="utf-8").count("import ") == 0, "it runs there too"
