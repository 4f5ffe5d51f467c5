"""Gathers every rank's memory after a run's first step on rank 0, stores it and compares it with the plan."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.nodes.nvml import Gpus
from megatron_dapo.plan.measured_memory import MEASURED_MEMORY, RankMemory, exceeded, memory_document
from megatron_dapo.plan.memory import RunMemory
from megatron_dapo.trainer.context import RunContext

logger = logging.getLogger(__name__)


def measure(rank: int, gpus: Gpus | None = None) -> RankMemory:
    """Return what this process and its GPU hold now; on a CPU, the resident memory."""
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return RankMemory(rank, resident)
    free, total = torch.cuda.mem_get_info()
    processes = dict((gpus or Gpus()).processes(_bus_id()))
    own = processes.pop(os.getpid(), None)
    return RankMemory(
        rank,
        resident,
        total,
        free,
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_reserved(),
        own,
        # In a container the driver may report other ids for processes, including this one.
        sum(processes.values()) if own is not None else None,
    )


def _bus_id() -> str:
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch declares no PCI address
    return f"{device.pci_domain_id:08x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


class MemoryCheck:
    """Checks memory once, after the first step of an attempt. Collective.

    `planned`: None if the plan does not know the device.
    """

    def __init__(self, context: RunContext, planned: RunMemory | None) -> None:
        self._topology, self._files, self._planned = context.topology, context.files, planned
        self._file = context.config.run.output_dir / MEASURED_MEMORY
        self._is_due = True

    def after_step(self, train_step: int) -> None:
        """Measure and gather after the first step; rank 0 stores the result and names what is larger than planned."""
        if not self._is_due:
            return
        self._is_due = False
        rank, coordination = self._topology.rank, self._topology.coordination
        ranks = [RankMemory(*values) for values in coordination.gather(list(vars(measure(rank)).values()))]
        if rank:
            return
        for one in exceeded(self._planned, ranks) if self._planned else ():
            logger.warning("memory above the plan after train step %d: %s", train_step, one)
        try:
            self._files.replace(self._file, json.dumps(memory_document(train_step, self._planned, ranks)) + "\n")
        except OSError as error:  # no comparison is worth a training run
            logger.warning("%s was not written: %r", self._file.name, error)
