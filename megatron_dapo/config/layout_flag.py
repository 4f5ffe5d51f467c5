"""The --layout flag: "tp2pp1" and its like as overrides of the parallel section."""

from __future__ import annotations

import re

_AXES = {
    "tp": "tp_size",
    "pp": "pp_size",
    "vpp": "vpp_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "etp": "etp_size",
    "dp": "data",
}
_TOKEN = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)(\d+)|(sp)")


def layout_overrides(text: str) -> list[str]:
    """Overrides that make the layout what `text` says: sizes of tp, pp, vpp, cp, ep, etp, dp in any order, and sp; the
    rest is 1 / off, etp as tp.

    "tp2pp1" starts 2 processes, "tp2dp2sp" 4. Raises ValueError for anything else.
    """
    compact = re.sub(r"[\s,_x-]+", "", text.lower())
    tokens = list(_TOKEN.finditer(compact))
    if not tokens or "".join(token.group(0) for token in tokens) != compact:
        raise ValueError(f"layout {text!r}: write sizes like tp2pp1 or tp2dp2sp, from {', '.join(_AXES)} and sp")
    names = [token.group(1) or token.group(3) for token in tokens]
    if len(set(names)) != len(names):
        raise ValueError(f"layout {text!r}: an axis stands in it twice; write each once")
    sizes = {**dict.fromkeys(_AXES.values(), 1), "etp_size": 0}
    sizes.update({_AXES[token.group(1)]: int(token.group(2)) for token in tokens if token.group(1)})
    data = sizes.pop("data")
    num_processes = sizes["tp_size"] * sizes["pp_size"] * sizes["cp_size"] * data
    overrides = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    return [
        *overrides,
        f"parallel.sequence_parallel={str('sp' in names).lower()}",
        f"parallel.num_processes={num_processes}",
    ]
