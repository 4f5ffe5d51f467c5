"""Starts a worker in any interpreter: `PYTHON .../remote/start.py`, without this package being installed there."""

import importlib.util
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def _make_importable() -> None:
    """Let `import megatron_dapo` find this file's package, and no other package next to it."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.util.spec_from_file_location(
        "megatron_dapo", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules["megatron_dapo"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _make_importable()
    from megatron_dapo.environments.remote.worker import main

    main()
