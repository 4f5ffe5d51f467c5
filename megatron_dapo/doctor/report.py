"""The report of all checks, in the order in which a person would look: interpreter, packages, devices, then the recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.checkpoints.disk_space import checkpoint_space, existing_parent, free_bytes
from megatron_dapo.config import Config, ConfigError, layout_overrides, load_config
from megatron_dapo.config.inputs import check_inputs
from megatron_dapo.config.process_limits import process_limits
from megatron_dapo.doctor import gather, inputs, machine, recipe
from megatron_dapo.doctor.gather import ProbeFailure
from megatron_dapo.doctor.machine import Finding, conflict, first_conflict
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.check import validate_and_check
from megatron_dapo.plan.cluster import Cluster, cluster_for
from megatron_dapo.plan.memory import ITEM_SIZES, num_parameters
from megatron_dapo.rounding import GIB

PACKAGE = "package "
_NUM_PROBES = 4


@dataclass
class DoctorReport:
    """Findings, the table of implementations, and the facts behind them."""

    findings: list[Finding] = field(default_factory=list)
    implementations: list[dict[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return first_conflict(self.findings) is None


def examine(recipe_file: Path | None = None, overrides: Sequence[str] = (), layout: str | None = None) -> DoctorReport:
    """Run all checks, with a recipe also those of its needs. Nothing is written or left running.

    A recipe that cannot be read is the only finding: nothing else is examined.
    """
    report, config = DoctorReport(), None
    if recipe_file is not None:
        try:
            config = load_config(recipe_file, [*overrides, *(layout_overrides(layout) if layout else [])]).config
        except ConfigError as error:
            report.findings += recipe.violation_findings(error.violations)
            return report
    installed = gather.installed_versions()
    with ThreadPoolExecutor(_NUM_PROBES) as executor:  # each probe is a process that imports torch
        torch_probe = executor.submit(gather.torch_facts)
        engine_probe = executor.submit(gather.transformer_engine_facts, installed)
        products_probe = None if config is None else executor.submit(gather.precision_answer, config)
        rows_probe = executor.submit(gather.implementation_rows, config)
        torch = torch_probe.result()
        report.facts["torch"] = asdict(torch)
        report.findings += _machine(torch, engine_probe.result(), installed, report)
        if config is not None:
            report.findings += _rules(config, torch)
        # An error together with a version is about the devices: torch itself can be imported.
        if torch.error and not torch.version:
            return report  # every other probe has failed by the same error
        if config is not None and products_probe is not None:
            report.findings.append(_linear_products(config, products_probe.result(), report))
        report.findings += _implementations(rows_probe, report)
    if config is not None:
        report.findings += _recipe(config, torch, report)
    return report


def _machine(
    torch: machine.TorchFacts,
    engine: machine.TransformerEngineFacts,
    installed: dict[str, str],
    report: DoctorReport,
) -> Iterator[Finding]:
    version = sys.version_info[:3]
    device = "cuda" if torch.cuda is not None or (torch.driver is not None and not torch.version) else "cpu"
    lock = machine.choose_lock(gather.locks(), device, version[:2])
    locked = lock.pins.get(gather.TRANSFORMER_ENGINE) if lock else None
    apex = gather.apex_facts(installed)
    report.facts.update(
        lock=lock.name if lock else None, transformer_engine=asdict(engine), apex=asdict(apex), python=list(version)
    )
    has_gpu, limits = bool(torch.devices), process_limits()
    report.facts["limits"] = asdict(limits)
    yield machine.python_finding(version, lock)
    yield machine.torch_finding(torch)
    yield from machine.package_findings(lock, installed, gather.required_packages())
    yield machine.psutil_finding(installed.get("psutil"))
    yield machine.cores_finding(limits)
    yield machine.memory_finding(limits)
    yield machine.gpu_finding(torch)
    yield machine.nccl_finding(torch)
    yield from machine.transformer_engine_findings(engine, has_gpu, locked)
    yield machine.apex_finding(apex, has_gpu)
    yield machine.triton_finding(installed.get("triton"), has_gpu)


def _rules(config: Config, torch: machine.TorchFacts) -> list[Finding]:
    """Return the rules that a recipe violates on this machine."""
    architecture, problems = check_inputs(config)
    devices = torch.devices
    cluster = (
        cluster_for(config, None, len(devices), devices[0].memory / GIB, process_limits().usable_memory / GIB)
        if devices
        else Cluster(1, gpus_per_node=0)
    )
    problems += validate_and_check(config, cluster, architecture)
    return recipe.violation_findings(problems)


def _linear_products(config: Config, answer: dict[str, str], report: DoctorReport) -> Finding:
    asked = config.precision
    report.facts["precision"] = answer
    return machine.linear_products_finding(answer, asked.num_layers_at_start_in_bf16 + asked.num_layers_at_end_in_bf16)


def _implementations(rows: Future[list[dict[str, str]]], report: DoctorReport) -> Iterator[Finding]:
    try:
        report.implementations = rows.result()
    except ProbeFailure as failure:
        fix = "resolve the conflicts above, then run doctor again"
        yield conflict("implementations", f"the actor cannot be built: {failure}", fix)


def _recipe(config: Config, torch: machine.TorchFacts, report: DoctorReport) -> Iterator[Finding]:
    yield recipe.processes_finding(config.num_processes, len(torch.devices))
    yield machine.bfloat16_finding(torch.devices, config.model.dtype)
    with ThreadPoolExecutor(_NUM_PROBES) as executor:
        engine_probe = executor.submit(lambda: list(inputs.engine_findings(config, torch))) if _starts_servers(config) else None
        attention_probe = executor.submit(lambda: list(_attention(config, report)))
        problems = [*inputs.machine_problems(config, is_here=True), *inputs.model_problems(config)]
        yield from recipe.violation_findings(problems, "input", "directories, weights and addresses can be used")
        has_model = config.model.path.is_dir() and not any(problem.path == "model.path" for problem in problems)
        architecture = read_architecture(config.model.path) if has_model else None
        if engine_probe is not None:
            yield from engine_probe.result()
            yield from _shared_memory(config, torch, architecture)
        if architecture is None:
            return  # No attention could be tried without its shape.
        if not any(finding.name.startswith("recipe parallel") for finding in report.findings):
            yield from _storage(config, architecture)  # bytes of a layout that exists
        yield from attention_probe.result()


def _starts_servers(config: Config) -> bool:
    return config.rollout.engine == "sglang" and not config.sglang.urls


def _shared_memory(
    config: Config, torch: machine.TorchFacts, architecture: ModelArchitecture | None
) -> Iterator[Finding]:
    sglang = config.sglang
    if sglang.weight_sync_transport == "shared_memory" and not torch.devices:
        # Imported here: a report about a broken torch must not import it.
        from megatron_dapo.bridge.transports.shared_memory import default_directory

        directory, ranks = default_directory(), sglang.servers_per_node * sglang.tp_size
        num_bytes = None if architecture is None else architecture.num_parameters * ITEM_SIZES[config.model.dtype]
        free = free_bytes(directory)
        yield recipe.shared_memory_storage(directory, free, ranks, sglang.weight_sync_bucket_mb, num_bytes)


def _storage(config: Config, architecture: ModelArchitecture) -> Iterator[Finding]:
    space, run = checkpoint_space(config, architecture), config.run.output_dir
    yield recipe.checkpoint_storage(space)
    if config.checkpoint.export_huggingface:
        devices = [existing_parent(path).stat().st_dev for path in (space.directory, run)]
        of_checkpoints = space.needed if devices[0] == devices[1] else 0
        heads = (False, True) if config.has_critic else (False,)
        total = sum(num_parameters(architecture, has_value_head) for has_value_head in heads)
        yield recipe.export_storage(run, free_bytes(run), total, ITEM_SIZES[config.model.dtype], of_checkpoints)


def _attention(config: Config, report: DoctorReport) -> Iterator[Finding]:
    shape = gather.attention_shape(config)
    rows = [row["name"] for row in report.implementations if row["op"] == "attention"]
    by_engine = any("Transformer Engine" in name for name in rows)
    results = gather.attention_results(shape, config.model.dtype, by_engine)
    report.facts["attention"] = [asdict(result) for result in results]
    head_dim, heads, groups = shape
    words = f"head_dim {head_dim}, {heads} query and {groups} key-value heads, {config.model.dtype}, packed"
    yield from recipe.attention_findings(results, config.model.dtype, words)


def to_json(report: DoctorReport) -> dict[str, Any]:
    """Return the report as one JSON object."""
    first = first_conflict(report.findings)
    return {
        "ok": report.is_ok,
        "first_conflict": asdict(first) if first else None,
        "findings": [asdict(finding) for finding in report.findings],
        "implementations": report.implementations,
        "facts": report.facts,
    }


def describe(report: DoctorReport) -> list[str]:
    """Return the report as lines, packages without a finding counted only; the last line is the first conflict."""
    shown = [f for f in report.findings if not f.name.startswith(PACKAGE) or f.verdict != "ok"]
    num_fine = len(report.findings) - len(shown)
    lines = [line for finding in shown for line in _lines(finding)]
    lines.append(f"{'ok':<9} packages: {num_fine} more as they should be")
    if report.implementations:
        lines += ["", "implementation of each operation:"]
        lines += [f"  {row['op']:<15} {row['name']}  ({row['reason']})" for row in report.implementations]
    return [*lines, "", verdict_line(report.findings)]


def _lines(finding: Finding) -> list[str]:
    lines = [f"{finding.verdict:<9} {finding.name}: {finding.detail}"]
    return lines + ([f"{'':<9} fix: {finding.fix}"] if finding.fix else [])


def verdict_line(findings: Sequence[Finding]) -> str:
    """Return the first conflict with its fix, or the number of warnings."""
    first = first_conflict(findings)
    if first is not None:
        return f"first conflict: {first.name}: {first.detail}. Fix: {first.fix}"
    num_warnings = sum(finding.verdict == "warning" for finding in findings)
    return f"no conflict, {num_warnings} warning{'' if num_warnings == 1 else 's'}"
