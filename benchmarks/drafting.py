"""How many tokens does a decoding step give a response, if drafts come from the policy's own past?

    python benchmarks/drafting.py [--recipes quickstart smollm2] [--steps 9] [--json] [--tiny] [--save]

Each recipe is trained as shipped, but for its size, and its trained batches are recorded: once with new prompts in every
step, once with few prompts that come again. The responses of a step are then replayed against a reference of SGLang's
automaton (`drafts/automaton.py`) that holds what `DraftHistory`, the product's own, kept of the steps before. A draft never
changes what is sampled, and a sampled token that was drafted is accepted, so the recorded tokens say how many are.

    accepted   tokens a decoding step, of all replayed responses; 1 without drafts
    tail       the same, of each step's longest quarter of responses
    first      the same, of the first replayed step; last: of the last one

Not counted are drafts from responses that run at the same time, which SGLang adds from a trie: half of a step's drafts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import options
from drafts.automaton import SuffixAutomaton, decoding_steps

from megatron_dapo.engines.sglang.drafting import DraftHistory
from megatron_dapo.telemetry.batch_dump import load_batch

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "drafting_cpu.json"
RECIPES = {"smollm2": "examples/smollm2/smollm2.toml", "quickstart": "examples/quickstart/quickstart.toml"}
SIZES = {"quickstart": (8, 8), "smollm2": (2, 4)}  # prompts of a step, responses to each
EPOCH = 3  # steps after which the same prompts come again, if they do
DRAFT_NODES = (4, 7, 15)  # tokens of a step that are drafted
CORPUS_TOKENS = {"whole": 1_000_000, "small": 4_000}
SETTINGS = (
    "parallel.tp_size=1",
    "parallel.num_processes=1",
    "rollout.max_num_gen_batches=0",
    "rollout.filter_groups=false",  # groups without contrast are generated as well
    "telemetry.dump_batches=1",
    "telemetry.tensorboard=false",
    "checkpoint.interval=0",
    "checkpoint.export_huggingface=false",
    *options.NO_EVALUATION,
)
Response = tuple[tuple[int, ...], list[int]]  # prompt, response


def record(recipe: str, size: tuple[int, int], steps: int, repeats: bool, directory: Path) -> list[list[Response]]:
    """Train a recipe and return the responses of each step."""
    prompts, group = size
    sizes = (f"rollout.prompts_per_step={prompts}", f"training.mini_batch_prompts={prompts}", f"rollout.group_size={group}")
    settings = [*SETTINGS, *sizes, f"run.total_steps={steps}", f"run.output_dir={directory / 'run'}"]
    if repeats:
        rows = directory / "rows.jsonl"
        source = next((ROOT / RECIPES[recipe]).parent.glob("*train.jsonl"))
        rows.write_text("".join(source.read_text().splitlines(keepends=True)[: EPOCH * prompts]))
        settings += [f"data.train_paths=['{rows}']", "data.max_epochs=1000"]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(ROOT / RECIPES[recipe])]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{recipe} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    batches = sorted((directory / "run" / "batches").iterdir(), key=lambda path: load_batch(path).metadata["train_step"])
    return [
        [(tuple(one.tokens[: one.prompt_length].tolist()), one.tokens[one.prompt_length :].tolist()) for one in load_batch(path).samples]
        for path in batches
    ]


def replay(recorded: Sequence[Sequence[Response]], nodes: Sequence[int], corpus_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield (tokens, decoding steps) of each response, by the nodes of a draft, of every step but the first, which has no past."""
    history = DraftHistory(1, corpus_tokens, max_age=len(recorded))
    automaton = SuffixAutomaton([])
    for version, responses in enumerate(recorded):
        if version:
            documents = history.take(0, version)
            if documents is not None:
                automaton = SuffixAutomaton([document.tolist() for document in documents])
            counts = {
                number: [(len(r) - 1, decoding_steps(automaton, p, r, number)) for p, r in responses if len(r) > 1]
                for number in nodes
            }
            yield {"counts": counts, "corpus": history.num_tokens}
        for prompt, response in responses:
            history.note(prompt, np.array(response, np.int32), 0, version)


def ratio(counts: Iterable[tuple[int, int]]) -> float:
    """Return tokens a step."""
    pairs = list(counts)
    return round(sum(tokens for tokens, _ in pairs) / max(1, sum(steps for _, steps in pairs)), 3)


def longest(counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of the longest quarter of responses."""
    return sorted(counts, reverse=True)[: max(1, len(counts) // 4)]


def measure(recipe: str, size: tuple[int, int], steps: int, repeats: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        recorded = record(recipe, size, steps, repeats, Path(scratch))
    for corpus, corpus_tokens in CORPUS_TOKENS.items():
        found = list(replay(recorded, DRAFT_NODES, corpus_tokens))
        for nodes in DRAFT_NODES:
            counts = [step["counts"][nodes] for step in found]
            yield {
                "recipe": recipe,
                "prompts": "repeated" if repeats else "new",
                "corpus": corpus,
                "draft_nodes": nodes,
                "accepted": ratio(chain.from_iterable(counts)),
                "tail": ratio(chain.from_iterable(map(longest, counts))),
                "first": ratio(counts[0]),
                "last": ratio(counts[-1]),
                "corpus_tokens": found[-1]["corpus"],
                "response_tokens": sum(tokens for tokens, _ in chain.from_iterable(counts)),
            }


def main() -> None:
    parser = options.parser(__doc__, "four steps of four responses of the quickstart")
    parser.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=["quickstart", "smollm2"])
    parser.add_argument("--steps", type=int, default=9, help="train steps of each run")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    recipes, steps, sizes = arguments.recipes, arguments.steps, SIZES
    if arguments.tiny:
        recipes, steps, sizes = ["quickstart"], 4, {"quickstart": (2, 2)}
    rows = [row for recipe in recipes for repeats in (False, True) for row in measure(recipe, sizes[recipe], steps, repeats)]
    result = {"steps": steps, "rows": rows}
    if arguments.save:
        RESULT.write_text(json.dumps({"runs": [result]}, indent=1) + "\n")
    options.show(result, arguments)


if __name__ == "__main__":
    main()
