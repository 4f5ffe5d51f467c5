"""A simulated twin of asynchronous training: published steps against simulated ones, then the product's own schedules.

    python benchmarks/asynchrony.py [--json] [--tiny]

Engines are queues (`twin/simulation.py`): a decoding step lasts max(bytes / bandwidth, operations / peak) + fixed + per
response, with the data sheet of an H20 and the shares of it that plans use. `twin/theirs.py` has verl's schedules as its
documentation and scripts describe them, `twin/published.py` its rows.

Three numbers are fitted, to five rows: median and spread of the response lengths, and the fixed seconds of a decoding
step. `published_max_error` is the largest |simulated / published - 1| of the steps of these rows, and
`published_max_generation_error` that of their generation (the trainer's wait if the engines are apart).
`others_within_aim` counts the rows that were not fitted and are within 15 %; `failed` names the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import options
from twin.published import FIT, FITTED, OTHERS, Row, compare, settings_of

AIM_OTHERS = 0.15


def published_rows(rows: Sequence[Row], num_steps: int, divide: int) -> list[dict[str, Any]]:
    """Simulate published steps."""
    found = []
    for row in rows:
        compared = compare(row, settings_of(row, num_steps=num_steps, divide=divide))
        found.append(
            {
                "row": row.name,
                "is_fitted": row.is_fitted,
                "published": row.step,
                "simulated": round(compared.step, 1),
                "error": round(compared.error, 3),
                "published_generation": row.generation,
                "simulated_generation": round(compared.generation, 1),
                "generation_error": round(compared.generation_error, 3),
            }
        )
    return found


def run(is_tiny: bool) -> dict[str, Any]:
    """Return all figures."""
    begin = time.process_time()
    num_steps, divide = (4, 16) if is_tiny else (10, 1)
    fitted = published_rows(FITTED, num_steps, divide)
    others = published_rows(OTHERS[:2] if is_tiny else OTHERS, num_steps, divide)
    failed = [row["row"] for row in others if abs(row["error"]) > AIM_OTHERS]
    return {
        "benchmark": "asynchrony",
        "published_max_error": max(abs(row["error"]) for row in fitted),
        "published_max_generation_error": max(abs(row["generation_error"]) for row in fitted),
        "others_within_aim": len(others) - len(failed),
        "failed": failed,
        "fit": vars(FIT),
        "published": [*fitted, *others],
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


def main() -> None:
    arguments = options.parser(__doc__, "a sixteenth of the batch, a few steps").parse_args()
    options.show(run(arguments.tiny), arguments)


if __name__ == "__main__":
    main()
