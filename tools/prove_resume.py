"""Show that a killed run resumes exactly: python tools/prove_resume.py --layout tp2 --points 20 --seed 0 --json

Trains the quickstart's base model on a few of its problems: several optimizer steps a rollout batch, a checkpoint every
step, epochs that wrap round, evaluations in between. --algorithm chooses what a checkpoint has besides the models:

tail      prompts that were put off for a long round; killed in rounds of both kinds
stream    mini-batches that are trained while their batch is collected; killed in a part, the step is repeated
distillation  two teachers: the policy as it started, and a snapshot of every second step that reads the answer
top_p     what tokens were drawn from, in unfinished responses and groups for later steps
dapo      an oversampled buffer with groups for later steps
budget    group sizes by pass rate, and prompts drawn ahead with theirs
priority  the scores of each prompt, by which the next ones are chosen
filter    the history of each prompt, and which prompts wait
vapo      a critic on another layout, with its optimizer
sao       the same with one response a prompt and frozen attention; responses are carried over to later steps
tppo      the same, and unfinished windows; each window must be trained exactly once
windows   the same with windows that servers generate while those before are trained
episodes  unfinished conversations with an environment, held in any turn, and their workers' processes
tools     the same with a tool, which the base model calls

--to-layout tp1 lets each killed run go on in another layout, which has the same state but another order of sums: its tensors,
counters and collector, saved again by that layout, are compared bit by bit.
--engine-python .venv-sglang/bin/python lets SGLang servers generate the windows or episodes. Their answers come at any time, so each
killed run is compared with itself: each window and each episode trained once, and no token sampled again that its checkpoint has.
--set critic.parallel.num_processes=1 gives the critic a separate process; --set 'model.offload="all"' and the like
offload models to host memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.resume_proof.compare_runs import require_windows_once  # noqa: E402
from tools.resume_proof.kill_points import ResumeProofSettings, prove_resume  # noqa: E402
from tools.resume_proof.server_runs import prove_with_servers, server_overrides  # noqa: E402

QUICKSTART = ROOT / "examples" / "quickstart"
NUM_TRAIN, NUM_HELD_OUT = 16, 4

RECIPE = """
[run]
name = "prove_resume"
total_steps = 5

[model]
path = "{model}"

[data]
train_paths = ["train.jsonl"]
eval_paths = ["heldout.jsonl"]
max_prompt_tokens = 128

[rollout]
prompts_per_step = {prompts}
group_size = {group_size}
max_response_tokens = 96
slots_per_rank = 32
{rollout}

[training]
mini_batch_prompts = 2
micro_batch_tokens = 1024
{algorithm}

[optimizer]
learning_rate = 1e-3
warmup_steps = 2
schedule = "cosine"

[checkpoint]
interval = 1

[evaluation]
interval = 2
num_samples = 2
top_p = 1.0

[telemetry]
samples_per_step = 1000
progress = false
report = false
"""


CRITIC = """
[algorithm]
name = "{name}"
positive_example_coefficient = 0.1

[advantage_estimation]
lambda_rule = "{rule}"

[critic]
epochs = 2
freeze = {freeze}

[critic.parallel]
tp_size = 1

[critic.optimizer]
learning_rate = 1e-3
warmup_steps = 2
"""

WINDOWS = CRITIC.format(name="tppo", rule="window", freeze="[]") + "[window]\ntokens = 32\nignored_tail_tokens = 2"

# Episodes of up to five turns, of which a batch leaves many unfinished.
EPISODES = """
[environment]
path = "{games}:{name}"
processes = 1
max_turns = 5
max_turn_tokens = {max_turn_tokens}
max_context_tokens = 512

[turns]
parser = "line"
on_cut = "observe"

[reward]
verifier = "environment"

[algorithm.off_policy]
correction = "tis"
"""
GAMES = (ROOT / "tools" / "resume_proof" / "games.py").as_posix()
CARRIED = "oversample = 2.0\nmax_staleness = 1\npartial_rollout = true"

STREAM = 'stream = "mini_batches"\nshuffle = false\n\n[algorithm.off_policy]\ncorrection = "tis"'
DISTILLATION = """
[distillation]
divergence = "js"
offload = "all"
teachers = [
    { name = "start" },
    { name = "snapshot", refresh_steps = 2, rl = true, prompt = "{prompt} It is {answer}." },
]

[algorithm.off_policy]
correction = "tis"
"""
# Algorithm -> (further keys of [rollout], further keys of [training] and sections).
ALGORITHMS = {
    "stream": (CARRIED, STREAM),
    "tail": ("oversample = 1.5\ntail_rounds = true\nfilter_groups = false", ""),
    "episodes": (CARRIED, EPISODES.format(games=GAMES, name="Letters", max_turn_tokens=12)),
    "tools": (CARRIED, EPISODES.format(games=GAMES, name="Answers", max_turn_tokens=0)),
    "budget": ("budget = { enabled = true, min_size = 2, max_size = 12 }", ""),
    "priority": ('prompt_order = "priority"', ""),
    "filter": ('prompt_filter = { name = "bounds", margin = 0.3, audit_share = 0.2 }', ""),
    "dapo": ("oversample = 2.5\nmax_staleness = 1", '[algorithm.off_policy]\ncorrection = "tis"'),
    "top_p": (f"{CARRIED}\ntop_p = 0.9\ntop_k = 30", '[algorithm.off_policy]\ncorrection = "tis"'),
    "distillation": (CARRIED, DISTILLATION),
    "vapo": ("filter_groups = false", CRITIC.format(name="vapo", rule="length_adaptive", freeze="[]")),
    "sao": (
        f'filter_groups = false\norder = "guarded"\n{CARRIED}',
        CRITIC.format(name="vapo", rule="length_adaptive", freeze='["attention"]') + '[algorithm.loss]\nname = "dis"',
    ),
    "tppo": ("filter_groups = false", WINDOWS),
    "windows": (
        "filter_groups = false\nmax_staleness = 1",
        WINDOWS + '\n[sglang]\nplacement = "disaggregated"\n[algorithm.off_policy]\ncorrection = "tis"',
    ),
}
SERVED = ("windows", "episodes", "tools")


def write_recipe(directory: Path, algorithm: str = "dapo") -> Path:
    """Write the configuration of the proof and its data to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.jsonl", NUM_TRAIN), ("heldout.jsonl", NUM_HELD_OUT)):
        lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (directory / name).write_text("".join(lines[:count]), encoding="utf-8")
    recipe = directory / "recipe.toml"
    rollout, sections = ALGORITHMS[algorithm]
    model = (QUICKSTART / "base_model").as_posix()
    sizes = {"prompts": 24, "group_size": 1} if algorithm == "sao" else {"prompts": 6, "group_size": 4}
    recipe.write_text(RECIPE.format(model=model, rollout=rollout, algorithm=sections, **sizes), encoding="utf-8")
    return recipe


def with_servers(settings: ResumeProofSettings, python: Path, as_json: bool) -> int:
    """Run the proof with servers and print its report; return the exit code."""
    settings = replace(settings, overrides=(*server_overrides(python), *settings.overrides), run_timeout_s=1800.0)
    report = prove_with_servers(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(report.to_json()) if as_json else f"{report.exact} of {report.points} points exact; {report}")
    return 0 if report.exact == report.points else 1


def main(arguments: list[str]) -> int:
    """Exit code 0: every point equals the uninterrupted run; 1: one does not."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2", help="parallel layout, e.g. tp2, dp2, pp2, tp2dp2")
    parser.add_argument(
        "--to-layout",
        default="",
        help="go on in this layout; the state that it loads, records up to the kill and later steps' counts are compared",
    )
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="dapo")
    parser.add_argument("--points", type=int, default=20, help="kills at random moments")
    parser.add_argument("--aimed", type=int, default=0, help="kills during checkpoint writes, in addition")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=value", help="change the recipe"
    )
    parser.add_argument("--engine-python", type=Path, help=f"interpreter with SGLang, for the algorithms {', '.join(SERVED)}")
    parser.add_argument("--output-dir", type=Path, help="keep the runs here; default: a temporary directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    if parsed.engine_python is not None and parsed.algorithm not in SERVED:
        parser.error(f"--engine-python proves --algorithm {', '.join(SERVED)}")
    if parsed.engine_python is None and parsed.algorithm == "windows":
        parser.error("--algorithm windows needs --engine-python: only servers generate while a run trains")
    with tempfile.TemporaryDirectory(prefix="prove-resume-") as temporary:
        directory = parsed.output_dir or Path(temporary)
        settings = ResumeProofSettings(
            recipe=write_recipe(directory, parsed.algorithm),
            layout=parsed.layout,
            directory=directory,
            overrides=tuple(parsed.overrides),
            num_points=parsed.points,
            num_aimed=parsed.aimed,
            seed=parsed.seed,
            to_layout=parsed.to_layout,
        )
        if parsed.engine_python is not None:
            return with_servers(settings, parsed.engine_python, parsed.json)
        report = prove_resume(settings, lambda line: print(line, file=sys.stderr, flush=True))
        num_windows = require_windows_once(directory / "reference" / "samples.jsonl")
        print(f"{num_windows} windows, each trained once", file=sys.stderr)
    if parsed.json:
        print(json.dumps(report.to_json()))
    else:
        print(f"{report.layout}: {report.equal} of {report.points} points equal the uninterrupted run")
        print(f"kills hit: {', '.join(f'{phase} {count}' for phase, count in report.phases.items())}")
        if report.first_difference:
            print(f"first difference: {report.first_difference}")
    return 0 if report.equal == report.points else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
