"""Tools that environments can use: `tools = (calculate,)`. Only the standard library."""

from megatron_dapo.environments.tools.calculator import calculate as calculate
from megatron_dapo.environments.tools.python import python as python
