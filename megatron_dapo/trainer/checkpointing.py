"""Checkpoints of a run: everything needed to resume bit for bit as if it had never stopped.

policy_00000.safetensors, ...          each rank's policy parameters, fp32 main params, moments and steps; no replicas
policy.json                            index of the slices of all tensors (`checkpoints.formats.saved_model`); any layout loads it
critic_00000.safetensors, critic.json  the same for the critic, if there is one, numbered by the critic's ranks
teacher_NAME_00000.safetensors, ...    parameters of each teacher with distillation.teachers.refresh_steps
run.json                               counters and the measurements so far
collector.json, collector.safetensors  prompt stream, replay buffer and unfinished responses; their tokens as tensors

docs/checkpoints.md says what is exact after a resume. collection/step_000123/ has only the last two files, written if
a collection was interrupted after that checkpoint.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dapo.checkpoints.disk_space import keep_policy
from megatron_dapo.checkpoints.formats.saved_model import OtherModelError, index_file, rank_file
from megatron_dapo.checkpoints.memory_copies import (
    NODE,
    PEER,
    STORAGE,
    KeeperSettings,
    MemoryCopies,
    peers_of,
)
from megatron_dapo.checkpoints.save import BackgroundSaves, Saved
from megatron_dapo.checkpoints.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CheckpointWriter,
    find_resume,
    newest_valid,
    save_checkpoint,
)
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.files.checksums import PieceChecksums
from megatron_dapo.files.durable import HERE, Files
from megatron_dapo.files.process import FileProcess
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.rollout.serialization import join_state, split_state

if TYPE_CHECKING:
    import torch

    from megatron_dapo.trainer.learner import Learner
    from megatron_dapo.trainer.topology import RunTopology

logger = logging.getLogger(__name__)

POLICY, CRITIC = "policy", "critic"  # names of the models in a checkpoint
TRAINING_STATE = "training_state"
RESUMED = "resuming from %s"  # the proof of resume finds the checkpoint by this log line
LOADED_FROM = (
    "files of tensors were read: %d (%.1f MB) in memory of their node, %d (%.1f MB) in memory of a peer, "
    "%d (%.1f MB) in storage"
)
COPIES_KEY = "copies.key"  # a file in the run directory; authenticates the run's keepers to each other


class Stateful(Protocol):
    """One rank's part of a policy's or critic's state; implemented by `megatron.model_state.ModelState`."""

    @property
    def rank(self) -> int: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def index(self, name: str) -> dict[str, Any] | None: ...

    def load(
        self,
        directory: Path,
        name: str,
        checksums: Mapping[str, PieceChecksums] | None = None,
        find_copy: Callable[[str], Path | None] = lambda name: None,
    ) -> None: ...


class StatefulData(Protocol):
    """The place in the data and what was collected: `AsyncCollector`, or fine-tuning's `ExampleStream`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class RunProgress:
    """Counters and measurements of a run; part of every checkpoint."""

    train_step: int = 0  # rollout batches trained; the learning-rate schedule and TensorBoard count these
    train_seconds: float = 0.0  # spent in steps, over all attempts
    num_samples: int = 0  # responses trained on
    generation_step: int = 0  # generation rounds begun
    num_generated_tokens: int = 0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # train step -> headline metrics
    mismatch_trend: dict[str, Any] = field(default_factory=dict)  # state of the alarm; empty before the first step


@dataclass
class RunState:
    """Everything that is saved. `collector` exists on rank 0 only."""

    progress: RunProgress
    collector: StatefulData | None
    models: Mapping[str, Stateful]  # this rank's, by their names in a checkpoint
    counters: dict[str, Any]  # dataclasses, by their names in run.json
    layouts: dict[str, Any]  # keyed by their names in a checkpoint's metadata

    @classmethod
    def of(
        cls, topology: RunTopology, learner: Learner, progress: RunProgress, collector: StatefulData | None
    ) -> RunState:
        """Return this rank's part of what a checkpoint holds."""
        local = {POLICY: learner.local_actor, CRITIC: learner.local_critic}
        local |= {f"teacher_{name}": model for name, model in learner.snapshots.items()}
        models = {name: model.saved_state for name, model in local.items() if model is not None}
        state = cls(progress, collector, models, {"progress": progress, "learner": learner.counters}, {})
        state.layouts["layout"] = asdict(topology.policy_layout)
        if learner.critic is not None:
            state.counters["critic"] = learner.critic.counters
            state.layouts["critic_layout"] = asdict(topology.critic_layout)
        return state


class Checkpoints:
    """Saves and restores a RunState. Methods are collective unless they say otherwise."""

    def __init__(self, store: CheckpointStore, state: RunState) -> None:
        self._store = store
        self._state = state
        self.loaded_bytes = dict.fromkeys((NODE, PEER, STORAGE), 0)  # source -> bytes that the resume read
        self.saves = BackgroundSaves(store)

    @property
    def _collection(self) -> CheckpointStore:
        """The store for an interrupted collection, which only rank 0 writes."""
        return CheckpointStore(self._store.directory / "collection", keep=1, files=self._store.files)

    def keep_collection(self) -> Path | None:
        """Write the collector's state next to the checkpoint of the current train step, which must exist. Rank 0 only.

        A resume from that checkpoint then continues the interrupted collection. Not collective.
        """
        collector, step = self._state.collector, self._state.progress.train_step
        if collector is None:
            return None
        return save_checkpoint(self._collection, step, lambda writer: _write_collector(writer, collector))

    @classmethod
    def of(cls, config: Config, state: RunState, coordination: Coordination, files: Files = HERE) -> Checkpoints:
        """Return the checkpoints in the run's checkpoint directory, as agreed on by all ranks; rank 0 makes its parents."""
        if coordination.rank == 0:
            files.make_directory(config.checkpoint_dir.parent)
        return cls(CheckpointStore(config.checkpoint_dir, keep_policy(config), coordination, files), state)

    def keep_in_memory(self, copies: MemoryCopies | None) -> None:
        """Copy saves to `copies`, and load from them what they hold. Call on all ranks or on none."""
        self._store.copies = copies

    def resume(self, resume: str) -> int:
        """Restore the checkpoint that checkpoint.resume names and return its train step; -1 without one."""
        checkpoint = find_resume(resume, self._store, self.restore)
        if checkpoint is None:
            return -1
        logger.info(RESUMED, checkpoint.directory)
        if self._store.copies is not None:
            self._report_sources(self._store.copies)
        return checkpoint.step

    def _report_sources(self, copies: MemoryCopies) -> None:
        """Log where the tensor files came from, over all ranks. Each opened file counts with its full size."""
        sources = (NODE, PEER, STORAGE)
        own = [[len(files := copies.loaded.get(source, {})), sum(files.values())] for source in sources]
        total = self._store.sum(own)
        for source, (_, num_bytes) in zip(sources, total):
            self.loaded_bytes[source] = num_bytes
        logger.info(LOADED_FROM, *(part for count, num_bytes in total for part in (count, num_bytes / 1e6)))

    def restore_step(self, step: int) -> None:
        """Restore models, optimizers and counters from the checkpoint of `step`, but not the data.

        ValueError if that checkpoint is not kept.
        """
        if step not in self._store.steps():
            raise ValueError(
                f"the batch of train step {step + 1} needs the checkpoint of step {step}, but {self._store.directory} holds "
                f"{self._store.steps()}; dump with checkpoint.interval = 1 and a larger checkpoint.keep, or replay another "
                "batch"
            )
        self.restore_policy(self._store.open(step))

    def start_save(self) -> None:
        """Start writing a checkpoint of the current train step; see `BackgroundSaves.start`."""
        state = self._state
        step = state.progress.train_step
        metadata = {"train_step": step, "evaluations": state.progress.evaluations, **state.layouts}
        self.saves.start(step, self._write, metadata)

    def finish_save(self) -> Saved:
        """Wait for the save in flight; see `BackgroundSaves.finish`."""
        saved = self.saves.finish()
        if self._state.collector is not None:
            self._collection.ask("remove")  # it continued an older checkpoint
        return saved

    def _write(self, writer: CheckpointWriter) -> None:
        state = self._state
        for name, model in state.models.items():
            writer.save_tensors(rank_file(name, model.rank), model.tensors())
            index = model.index(name)
            if index is not None:
                writer.save_json(index_file(name), index)
        # Only rank 0 has the collector; it also writes what all ranks share.
        if state.collector is not None:
            writer.save_json("run.json", {name: asdict(counters) for name, counters in state.counters.items()})
            _write_collector(writer, state.collector)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a full checkpoint, saved under any layout. ValueError if it belongs to other models."""
        self.restore_policy(checkpoint)
        if self._state.collector is not None:
            self._state.collector.load_state_dict(collector_state(self._newest_collection(checkpoint)))

    def _newest_collection(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint or interrupted collection with the collector's newest state at this step."""
        try:
            kept = newest_valid(self._collection)
        except CheckpointError as error:
            logger.warning("%s", error)
            kept = None
        if kept is None or kept.step != checkpoint.step:
            return checkpoint
        logger.info("continuing the collection kept in %s", kept.directory)
        return kept

    def restore_policy(self, checkpoint: Checkpoint) -> None:
        """Restore models, optimizers and counters, but not the data."""
        state = self._state
        for name, model in state.models.items():
            model.load(checkpoint.directory, name, checkpoint.checksums, checkpoint.find_copy)
        document = checkpoint.load_json("run.json")
        for name, counters in state.counters.items():
            _restore_dataclass(counters, document[name])


def _write_collector(writer: CheckpointWriter, collector: StatefulData) -> None:
    document, tensors = split_state(collector.state_dict())
    writer.save_json("collector.json", document)
    writer.save_tensors("collector.safetensors", tensors)


def collector_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the saved prompt stream, buffer and unfinished responses."""
    return join_state(checkpoint.load_json("collector.json"), checkpoint.load_tensors("collector.safetensors"))


def _restore_dataclass(target: Any, values: Mapping[str, Any]) -> None:
    """Set the saved fields on `target`. ValueError if its fields differ."""
    if set(values) != set(asdict(target)):
        raise ValueError(
            f"checkpoint: {type(target).__name__} has the fields {sorted(asdict(target))}, the checkpoint {sorted(values)}: it was "
            "written by another version of megatron_dapo; resume with that version, or start a new run from its Hugging Face export"
        )
    for name, value in values.items():
        setattr(target, name, value)


# ---- copies in memory


def join_keepers(config: Config, topology: RunTopology) -> MemoryCopies | None:
    """Connect to the process that keeps copies of checkpoints in this node's memory, starting it if needed.

    Returns None if the run keeps no copies. Collective.
    """
    mode, run_directory = config.checkpoint.memory_copies, config.run.output_dir
    if mode == "none" or not FileProcess.IS_POSSIBLE:
        return None
    coordination, name = topology.coordination, socket.gethostname()
    key = run_directory / COPIES_KEY
    if topology.rank == 0 and not key.exists():  # keepers of an earlier attempt still use the old key
        create_key(run_directory, COPIES_KEY)
    own = {name: {"rank": topology.rank, "address": "", "replicas": [replica_of(topology)]}}
    nodes = coordination.merge(own, merged_nodes, "the key of the keepers of checkpoints")
    settings = KeeperSettings.of(config.checkpoint, config.checkpoint_dir, len(nodes), topology.rendezvous_host)
    copies = MemoryCopies(settings, read_key(key))
    own[name]["address"] = copies.address
    nodes = coordination.merge(own, merged_nodes, "the keepers of checkpoints")
    order = sorted(nodes, key=lambda each: nodes[each]["rank"])
    peer = order[peers_of([frozenset(nodes[each]["replicas"]) for each in order])[order.index(name)]]
    has_peer = mode == "peer" and peer != name
    copies.use_peer(nodes[peer]["address"] if has_peer else "")
    where = f"node {peer}" if has_peer else "no other node"
    logger.info("checkpoints are copied to memory of each node; of %s to %s as well", name, where)
    return copies


def replica_of(topology: RunTopology) -> str:
    """Return the data-parallel replica to which this rank belongs."""
    policy = topology.policy.num_ranks
    if topology.rank < policy:
        return f"policy {topology.policy_layout.coordinates(topology.rank).data}"
    return f"critic {topology.critic_layout.coordinates(topology.rank - policy).data}"


def merged_nodes(parts: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the ranks' reports on their nodes: the first rank, the keeper's address, the replicas of all ranks."""
    nodes: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, node in part.items():
            known = nodes.setdefault(name, node)
            known["rank"] = min(known["rank"], node["rank"])
            known["address"] = known["address"] or node["address"]
            known["replicas"] = sorted({*known["replicas"], *node["replicas"]})
    return nodes


# ---- optimizer state of an exported critic


def save_training_state(directory: Path, state: Stateful) -> None:
    """Write this rank's part of a critic's state into <directory>/training_state, next to the Hugging Face files.

    The first use of the state is collective among the critic's ranks.
    """
    target = directory / TRAINING_STATE
    target.mkdir(parents=True, exist_ok=True)
    HERE.write_tensors(target / rank_file(CRITIC, state.rank), state.tensors())
    index = state.index(CRITIC)
    if index is not None:
        HERE.write_json(target / index_file(CRITIC), index)


def load_training_state(directory: Path, state: Stateful) -> bool:
    """Load the optimizer state stored with a critic, so that training continues from pretraining's end, in any layout.

    Returns False if there is none. State of another model or number type is not loaded: the critic starts from the
    directory's weights with zero moments, and a log line says so. ValueError for another format. Collective among the
    critic's ranks.
    """
    source = directory / TRAINING_STATE
    if not source.is_dir():
        return False
    if not (source / index_file(CRITIC)).is_file():
        raise ValueError(
            f"{source} has no {index_file(CRITIC)}: another version wrote it; remove the directory to start with moments of 0"
        )
    try:
        state.load(source, CRITIC)
    except OtherModelError as error:
        logger.warning("%s: the critic's optimizer starts with moments of 0, from the weights of its directory", error)
        return False
    return True
