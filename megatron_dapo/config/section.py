"""What every section of the configuration is: immutable, documented, without silent conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

Offload = Literal["none", "optimizer", "all"]  # what of a model leaves the device while the model rests


class RelativeToRecipe:
    """Marks a path that, when relative, is taken from the folder of the recipe file that states it."""


InputPath = Annotated[Path, RelativeToRecipe()]


class Section(BaseModel):
    """Immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
