"""Throughput of a judge that answers after a second: a user's `async def` in the verifier processes, against waiting alone.

    python benchmarks/rewards.py [--json] [--tiny] [--concurrency 256] [--answers 2048] [--seconds 1.0] [--workers 1]

`judge_concurrency_efficiency`: answers per second, over concurrency / seconds, the most that so many waits at a time allow.
`function_per_s`: answers of a function that compares two texts, for what the pool itself costs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_dapo.rewards.pool import VerifierPool

FUNCTIONS = """
import asyncio, os

async def judge(sample):
    await asyncio.sleep(float(os.environ["JUDGE_SECONDS"]))
    return sample.response == sample.answer

def compare(sample):
    return sample.response == sample.answer
"""
FIELDS = {
    "messages": [{"role": "user", "content": "How many?"}],
    "data_source": "",
    "extra_info": {"tests": "assert f(1) == 2\n" * 8},
    "finish_reason": "stop",
    "group_index": 0,
}


def measure(concurrency: int, answers: int, seconds: float, workers: int) -> dict[str, Any]:
    """Return the figures of `answers` responses of 20,000 characters; half of them are right."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "functions.py"
        path.write_text(FUNCTIONS)
        judged = _answers_per_second(f"{path}:judge", concurrency, answers, workers)
        compared = _answers_per_second(f"{path}:compare", concurrency, answers, workers)
    return {
        "judge_per_s": judged,
        "judge_concurrency_efficiency": judged * seconds / (concurrency * workers),
        "function_per_s": compared,
        "concurrency": concurrency,
        "answers": answers,
        "seconds": seconds,
        "workers": workers,
    }


def _answers_per_second(verifier: str, concurrency: int, answers: int, workers: int) -> float:
    texts = ["word " * 4000 + str(number % 2) for number in range(answers)]
    items = [(number, text, texts[0], False, FIELDS) for number, text in enumerate(texts)]
    with VerifierPool(verifier, workers, 60.0, concurrency=concurrency, more_environment=["JUDGE_SECONDS"]) as pool:
        pool.score_many(items[:1])  # every process has begun
        start = time.perf_counter()
        scores = pool.score_many(items)
        taken = time.perf_counter() - start
    assert sum(score.accuracy for score in scores.values()) == -(-answers // 2), "each second response is right"
    return answers / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--answers", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each verdict takes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a few seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.concurrency, arguments.answers, arguments.seconds = 16, 64, 0.25
    os.environ["JUDGE_SECONDS"] = str(arguments.seconds)
    found = measure(arguments.concurrency, arguments.answers, arguments.seconds, arguments.workers)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:30} {value:.4g}")


if __name__ == "__main__":
    main()
