"""Environments of other libraries, as a user names them; loaded by workers of an interpreter that has the libraries."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megatron_dapo.environments.adapters import (
    gem_environment,
    gymnasium_environment,
    mcp_environment,
    openenv_environment,
    skyrl_environment,
    textarena_game,
)

Game2048 = textarena_game("2048-v0")
GuessTheNumber = textarena_game("GuessTheNumber-v0")
FrozenLake = gymnasium_environment("FrozenLake-v1", "Cross the lake.", is_slippery=True)
Mastermind = gem_environment("game:Mastermind-v0-easy")
Sums = skyrl_environment("gsm8k_multi_turn", max_turns=3)
Countdown = openenv_environment(
    os.environ.get("OPENENV_URL", ""), show=lambda seen: f"{seen['left']} left", action=lambda text: {"take": int(text)}
)
if "MCP_SERVER" in os.environ:  # it is started to ask for its tools
    _SERVER = [sys.executable, "-S", str(Path(__file__).with_name("mcp_server.py"))]

    class Counter(mcp_environment(_SERVER, {"PYTHONPATH": os.environ["PYTHONPATH"]})):
        def finish(self, turn):
            return float(json.loads(turn.text))
