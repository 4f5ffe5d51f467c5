"""One process of a training run: builds the parts, runs the loop, exports the models and writes the summary."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.bridge.protocol.nccl_settings import take_defaults_of_sglang
from megatron_dapo.checkpoints.atomic_directory import replace_directory
from megatron_dapo.checkpoints.disk_space import checkpoint_space
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.memory_copies import MemoryCopies
from megatron_dapo.config.loader import LoadedConfig, write_resolved
from megatron_dapo.config.one_base import require_one_base
from megatron_dapo.config.process_limits import process_limits
from megatron_dapo.config.schema import Config
from megatron_dapo.files.durable import Files
from megatron_dapo.files.process import FileProcess
from megatron_dapo.hooks import Callbacks
from megatron_dapo.megatron.parallel_state import connect_groups, initialize_process_group
from megatron_dapo.megatron.platform import use_deterministic_kernels
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.nodes.sampler import SamplerSettings, start_sampler
from megatron_dapo.nodes.watch import DIRECTORY, NodeWatch, WatchSettings
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.plan.check import require_runnable
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.comparison import PlannedRun
from megatron_dapo.rounding import GIB
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.prometheus import prometheus_endpoint
from megatron_dapo.telemetry.summary import RunSummary, write_summary
from megatron_dapo.trainer.build import build_actor, build_learner, critic_start
from megatron_dapo.trainer.build_rollout import build_collector, build_evaluator, build_rollout_data
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress, RunState, join_keepers, save_training_state
from megatron_dapo.trainer.connect_engines import connect_engines
from megatron_dapo.trainer.context import RunContext, RunProcess
from megatron_dapo.trainer.loop import Parts, TrainingLoop
from megatron_dapo.trainer.memory_check import MemoryCheck
from megatron_dapo.trainer.parity import build_parity
from megatron_dapo.trainer.recorder import Phases, Recorder, RunPaths
from megatron_dapo.trainer.rollout import Rollout
from megatron_dapo.trainer.sft import ExampleBatches, SftLoop
from megatron_dapo.trainer.start_engines import start_engines
from megatron_dapo.trainer.topology import RunTopology, run_topology
from megatron_dapo.trainer.turns import RunTurn, SharedBase, take_turns
from megatron_dapo.watch.attempts import STOPPED_BY_SIGNAL, record_end, require_new_run
from megatron_dapo.watch.heartbeat import Heartbeat
from megatron_dapo.watch.signals import StopRequest
from megatron_dapo.watch.verdict import CONNECT

logger = logging.getLogger(__name__)


def run_training(loaded: LoadedConfig, process: RunProcess, others: Sequence[LoadedConfig] = ()) -> str:
    """Run a configuration through to the exported model; return why the run ended. Every process of the run calls this.

    `others`: runs that share the base weights, see `trainer.turns`. The reason is that of a stop if a signal stopped any.
    """
    start = time.perf_counter()
    with prepared_runs([loaded, *others], process) as runs:
        reasons, first = set[str](), ""
        for run, reason in take_turns(runs):
            with run.context.phases.watch("export"):
                run.context.files.require_held()
                exports = run.export(reason)
            reasons.add(reason)
            if run is runs[0]:
                first, exports_of_first = reason, exports
            else:
                run.summarize(reason, exports, time.perf_counter() - start)
        # Last: its directory records the attempt, which has not ended before all runs have.
        runs[0].summarize(first, exports_of_first, time.perf_counter() - start)
    return STOPPED_BY_SIGNAL if STOPPED_BY_SIGNAL in reasons else first


@dataclass
class PreparedRun:
    """A run that is ready to start."""

    context: RunContext
    loop: TrainingLoop
    parts: Parts
    progress: RunProgress
    turn: AbstractContextManager[None] = field(default_factory=nullcontext)  # entered for each turn

    def export(self, reason: str) -> dict[str, Path]:
        """Export the trained models as Hugging Face directories unless a signal ended the run; return them by name.

        An earlier run's directories are replaced once the new ones are complete. Collective.
        """
        config, actor = self.context.config, self.parts.learner.local_actor
        has_source = any(config.model.path.glob("*.safetensors"))  # exports copy the format of the source's files
        if not config.checkpoint.export_huggingface or reason == STOPPED_BY_SIGNAL or not has_source:
            return {}
        target = RunPaths(config.run.output_dir).huggingface
        if actor is not None:
            group = self.context.topology.policy.group
            with replace_directory(target, group) as directory:
                export_to_huggingface(directory, config.model.path, actor.tensors, actor.served_parameters(), group)
        others = {"critic": self.export_critic()} if config.has_critic else {}
        if config.model.lora.rank:
            others["adapter"] = target.with_name("adapter")
            if actor is not None:
                with replace_directory(others["adapter"], self.context.topology.policy.group) as directory:
                    actor.export_adapters(directory)
        return {"huggingface": target, **others}

    def export_critic(self) -> Path:
        """Export the critic as a Hugging Face directory together with its optimizer state. Collective."""
        config, critic = self.context.config, self.parts.learner.local_critic
        target = RunPaths(config.run.output_dir).critic
        if critic is not None:
            with replace_directory(target, critic.part.group) as directory:
                critic.export(directory, critic_start(config))
                save_training_state(directory, critic.saved_state)
        self.context.topology.coordination.barrier("the export of the critic")
        return target

    def summarize(
        self, reason: str, exports: Mapping[str, Path], total_seconds: float, extra: Mapping[str, object] | None = None
    ) -> None:
        """Write summary.json and record the end of this attempt, on rank 0."""
        if self.context.topology.rank != 0:
            return
        config, progress, recorder = self.context.config, self.progress, self.parts.recorder
        paths = RunPaths(config.run.output_dir)
        accuracy = {int(step): metrics["eval/avg_at_k"] for step, metrics in progress.evaluations.items()}
        seconds = max(progress.train_seconds, 1e-9)
        written = {"report": paths.report} if config.telemetry.report else {}
        written |= {"tensorboard": paths.tensorboard, "samples": paths.samples, "metrics": paths.metrics}
        summary = RunSummary(
            name=config.run.name,
            layout=self.context.topology.policy_layout.describe(),
            stopped=reason,
            train_steps=progress.train_step,
            optimizer_steps=self.parts.learner.counters.optimizer_steps,
            accuracy_before=accuracy.get(0),
            # A run without a train step has only the accuracy before training.
            accuracy_after=accuracy.get(progress.train_step) if progress.train_step else None,
            train_seconds=progress.train_seconds,
            total_seconds=total_seconds,
            samples_per_s=progress.num_samples / seconds,
            generated_tokens_per_s=progress.num_generated_tokens / seconds,
            directories={name: str(path) for name, path in {**written, **exports}.items()},
            extra={
                "lost_records": recorder.num_lost if recorder else 0,
                "evaluations": progress.evaluations,
                **(extra or {}),
            },
        )
        write_summary(paths.summary, summary, self.context.files)
        # Recorded before any rank exits: a launcher may end all the others once the first one has exited.
        self.context.files.run(record_end, config.run.output_dir, reason)
        if recorder is not None:
            recorder.last_report()  # covers the whole run, including its end


def cluster_here(num_nodes: int, world_size: int) -> Cluster:
    """Return the cluster of a run on `num_nodes` nodes like this one."""
    if not torch.cuda.is_available():
        return Cluster(num_nodes, gpus_per_node=0)
    # A launcher may let a process see only its own GPU.
    num_gpus = max(torch.cuda.device_count(), -(-world_size // num_nodes))
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    nvls = "0" not in (os.environ.get("NCCL_NVLS_ENABLE"), os.environ.get("NCCL_CUMEM_ENABLE"))
    return Cluster(num_nodes, num_gpus, gpu_gib, process_limits().usable_memory / GIB, nvls=nvls)


@contextmanager
def prepared_run(
    loaded: LoadedConfig, process: RunProcess, stop_rule: StopRule | None = None
) -> Iterator[PreparedRun]:
    """Build a run, resume it if there is a checkpoint, and close everything at the end.

    With `stop_rule`, only the critic learns (value pretraining). ValueError if the configuration is invalid.
    """
    with prepared_runs([loaded], process, stop_rule) as [run]:
        yield run


@contextmanager
def prepared_runs(
    every: Sequence[LoadedConfig], process: RunProcess, stop_rule: StopRule | None = None
) -> Iterator[list[PreparedRun]]:
    """Build runs that share the base weights, or one run; see `prepared_run`. The first one's settings hold for the process.

    ValueError if they cannot share the process.
    """
    config, rank = every[0].config, process.rank
    require_one_base([loaded.config for loaded in every])
    architecture = read_architecture(config.model.path)
    cluster = cluster_here(process.num_nodes, process.world_size)
    for loaded in every:
        require_runnable(loaded.config, cluster, architecture, process.world_size)
        if rank == 0:
            checkpoint_space(loaded.config, architecture).require()
    if config.run.deterministic:
        use_deterministic_kernels()
    if config.rollout.engine == "sglang" and config.sglang.weight_sync_transport == "p2p":
        take_defaults_of_sglang(os.environ)  # SGLang's ranks share communicators with this one
    # Create the default group first: topology, coordination and every other group depend on it.
    initialize_process_group(collective_timeout(config.run.wait_timeout_seconds))
    with ExitStack() as stack:
        for loaded in every if rank == 0 else ():
            own = loaded.config
            write_resolved(loaded, own.run.output_dir / "config.json")
            where = own.telemetry.prometheus_host, own.telemetry.prometheus_port
            stack.enter_context(prometheus_endpoint(*where, own.run.output_dir, own.run.name))
        stop = stack.enter_context(StopRequest(process.end_time, config.run.stop_notice_seconds))
        stop.share(dist.distributed_c10d._get_default_store())
        topology = run_topology(config, process.rendezvous_host, process.supervision)
        heartbeat = process.heartbeat or Heartbeat(rank)
        files = _start_files(heartbeat, stack)
        files.hold(*(each for loaded in every for each in _directories_of(loaded.config)))
        watch = _watch(config, topology, heartbeat)
        node_watch = _start_node_watch(config, heartbeat, stack)
        runs: list[PreparedRun] = []
        base = SharedBase() if len(every) > 1 else None
        with watch("build"):
            copies = join_keepers(config, topology)
            if copies is not None:
                stack.callback(copies.close)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
            for own in (loaded.config for loaded in every):
                context = RunContext(own, topology, Phases(watch=watch), files, stop, stack)
                planned = PlannedRun.of(own, process.world_size, cluster, device)
                with RunTurn(own.run.name) if base else nullcontext():
                    runs.append(_build(context, planned, stop_rule, None if runs else node_watch, copies, base))
        heartbeat.train_step = lambda: sum(run.progress.train_step for run in runs)
        yield runs
        if copies is not None and not stop.requested:
            copies.end()
    # Leave together: a rank that exits early tears down connections that others still use.
    dist.barrier()
    dist.destroy_process_group()


def _build(
    context: RunContext,
    planned: PlannedRun | None,
    stop_rule: StopRule | None,
    node_watch: NodeWatch | None,
    copies: MemoryCopies | None,
    base: SharedBase | None = None,
) -> PreparedRun:
    config, topology, phases = context.config, context.topology, context.phases
    # Start servers first: they come up while the actor is built or, on the trainer's GPUs, before it takes memory.
    commands = Rank0Commands(topology.coordination)
    servers = start_engines(config, topology, commands, context.stack)
    actor = build_actor(config, topology, base.actor if base else None)
    engines = connect_engines(config, topology.policy, commands, servers, actor, (base, phases) if base else None)
    if base is not None:
        base.actor = base.actor or actor
    # Only rank 0 reads data and starts verifiers; the other ranks get samples by broadcast.
    data = build_rollout_data(context, engines) if topology.rank == 0 else None
    topology.coordination.barrier("rank 0 to read the data")
    learner = build_learner(config, actor, topology, phases, stop_rule)
    if engines.servers is not None:
        engines.servers.offload_models = learner.models.offload_all
    collector = build_collector(context, data, engines) if data else None
    examples = data.examples if data else None
    progress = RunProgress()
    state = RunState.of(topology, learner, progress, collector or examples)
    checkpoints = Checkpoints.of(config, state, topology.coordination, context.files)
    checkpoints.keep_in_memory(copies)
    saved_step = checkpoints.resume(config.checkpoint.resume)
    with phases.watch(CONNECT):
        num_bytes = connect_groups(read_architecture(config.model.path).num_experts > 0)
    if num_bytes:
        logger.info("process groups are connected and take %.2f GiB of device memory", num_bytes / GIB)
    if saved_step < 0 and config.checkpoint.resume == "auto" and topology.rank == 0:
        require_new_run(config.run.output_dir, config.checkpoint_dir, config.checkpoint.interval)
    recorder = None
    if data is not None:
        evaluated = max(map(int, progress.evaluations), default=-1)
        machine, tokenizer = _machine(config, topology), data.inputs.tokenizer
        operations = actor.operations if actor is not None else ""
        turns = data.proof.describe() if data.proof else None
        recorder = Recorder(
            *(config, progress.train_step, evaluated, context.files, tokenizer, machine, planned, operations, turns),
            is_alone=base is None,
        )
        context.stack.callback(recorder.close)
        phases.display = recorder.progress
    parts = Parts(
        rollout=Rollout(
            engines,
            collector,
            topology.coordination,
            filter_overlong=config.reward.overlong_filter,
            rewards_turns=config.reward.verifier == "environment",
            teachers=data.teachers if data else None,
            teacher_prompts=data.teacher_prompts if data else None,
        ),
        learner=learner,
        publisher=engines.publisher,
        parity=build_parity(context, engines, data.prompts if data else None, learner),
        evaluator=build_evaluator(context, engines, data, collector),
        checkpoints=checkpoints,
        recorder=recorder,
        collector=collector,
        data=data,
        node_watch=node_watch,
        callbacks=Callbacks(config.run.callbacks) if recorder else None,
        memory_check=MemoryCheck(context, planned.memory if planned else None),
    )
    loop = TrainingLoop(context, parts, progress)
    if config.algorithm.name == "sft":
        loop = SftLoop(context, parts, progress, ExampleBatches(examples, topology.coordination))
    loop.saved_step = saved_step  # a run that resumes at its end need not save again
    return PreparedRun(context, loop, parts, progress, RunTurn(config.run.name) if base else nullcontext())


def _machine(config: Config, topology: RunTopology) -> str:
    """Describe a run's layout, device type and server kernels."""
    devices = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    kernels = f"; {config.sglang.kernels}" if config.rollout.engine == "sglang" and torch.cuda.is_available() else ""
    return f"{topology.policy_layout.describe()} on {topology.size} processes, {devices}{kernels}"


def _directories_of(config: Config) -> list[Path]:
    """Return the directories that the run writes to; they exist afterwards."""
    output, checkpoints = config.run.output_dir, config.checkpoint_dir
    if checkpoints.absolute().is_relative_to(output.absolute()):
        return [output]
    checkpoints.mkdir(parents=True, exist_ok=True)
    return [output, checkpoints]


def _start_files(heartbeat: Heartbeat, stack: ExitStack) -> Files:
    """Return this rank's files, written by a separate process if the system supports that."""
    files = FileProcess() if FileProcess.IS_POSSIBLE else Files()
    stack.callback(files.close)
    if isinstance(files, FileProcess):
        heartbeat.file_process = files
    return files


def _start_node_watch(config: Config, heartbeat: Heartbeat, stack: ExitStack) -> NodeWatch | None:
    """Sample this node and, on rank 0, watch all nodes. A single node has no peers to compare with."""
    nodes, place = config.nodes, heartbeat.place
    if not (nodes.stragglers or nodes.detector) or place is None or place.num_nodes < 2:
        return None
    output = config.run.output_dir.absolute()
    address = f"megatron-dapo-nodes-{os.getuid()}-{place.run_id}-{place.node_rank}"
    heartbeat.show_to_sampler(address)
    if place.local_rank == 0:
        is_critic = place.rank >= place.world_size - config.num_critic_processes
        role, name = "critic" if is_critic else "policy", socket.gethostname()
        settings = SamplerSettings(str(output / DIRECTORY), place.node_rank, name, role, address, nodes.period_seconds)
        stack.callback(start_sampler(settings).kill)
    if place.rank > 0:
        return None
    found = NodeWatch(
        WatchSettings(
            str(output),
            heartbeat.attempt,
            place.num_nodes,
            nodes.period_seconds,
            nodes.continuity_seconds,
            nodes.similarity_threshold,
            nodes.action,
            tuple(PHASES) if nodes.stragglers else (),
            nodes.detector,
        )
    )
    stack.callback(found.close)
    return found


def _watch(
    config: Config, topology: RunTopology, heartbeat: Heartbeat
) -> Callable[[str], AbstractContextManager[None]]:
    progress, limit_s = topology.coordination.progress, config.run.wait_timeout_seconds
    # Groups connect quickly, so a short limit reveals a wrong network interface without the long wait.
    connect_s = min(limit_s, config.run.hang_timeout_seconds)
    return lambda name: heartbeat.phase(name, progress, connect_s if name == CONNECT else limit_s)
