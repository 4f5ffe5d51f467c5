"""The corpora of servers that draft: renewed from the history in threads, while they generate."""

from __future__ import annotations

import logging
import threading

import numpy as np

from megatron_dapo.device_thread import device_thread
from megatron_dapo.engines.sglang.client import EngineError, SglangClient
from megatron_dapo.engines.sglang.drafting import DraftHistory, documents_of

logger = logging.getLogger(__name__)


class Drafts:
    """The history, and the threads that load it into servers. Drafts only save time: a failure to load them is a warning."""

    def __init__(self, num_servers: int, max_tokens: int, max_age: int, name: str) -> None:
        """`name`: tells corpora of this engine from those that a kept server has of the last attempt."""
        self.history = DraftHistory(num_servers, max_tokens, max_age)
        self._name = name
        self._threads: dict[int, threading.Thread] = {}  # server -> thread

    def renew(self, server: int, client: SglangClient, version: int) -> None:
        """Begin to load a server's next corpus if it is due. A server that still loads one is skipped."""
        if server in self._threads and self._threads[server].is_alive():
            return
        documents = self.history.take(server, version)
        if documents is not None:
            load = device_thread(self._load, client, f"{self._name}.{version}", documents, name="draft-corpus")
            self._threads[server] = load
            load.start()

    def wait(self, seconds: float) -> None:
        """Wait until what is being loaded is there."""
        for thread in self._threads.values():
            thread.join(seconds)

    def _load(self, client: SglangClient, corpus_id: str, documents: list[np.ndarray]) -> None:
        try:
            client.replace_corpus(corpus_id, documents_of(documents))
        except EngineError as error:
            logger.warning("%s drafts without a new corpus: %s", client.name, error)
