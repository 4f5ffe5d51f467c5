"""Heavy imports: nothing is collected within them, and nothing that they made is traversed after them."""

from __future__ import annotations

import gc

import pytest

from megatron_dapo.imports import heavy_imports


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_rests_and_is_as_before_whatever_happens(is_enabled: bool) -> None:
    num_frozen = gc.get_freeze_count()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), heavy_imports():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
            raise ImportError("no such package")
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() >= num_frozen + len(made)
        assert not any(found is made for found in gc.get_objects())
    finally:
        gc.enable()
