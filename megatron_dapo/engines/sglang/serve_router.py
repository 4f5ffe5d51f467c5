"""SGLang's router as a process of its own, in the engine's environment. `router.py` starts it.

    python -m megatron_dapo.engines.sglang.serve_router --api-key-file FILE --host H --port P --metrics-port M URL ...

Its key comes from a file, and it ends when its standard input closes: the process that started it holds the other end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.processes import end_with_starter, leave_signals_to_starter

# Seconds between two looks at a worker. One failure takes it out, one success brings it back.
_HEALTH_INTERVAL_S = 1
_HEALTH_TIMEOUT_S = 30
_REQUEST_TIMEOUT_S = 24 * 3600  # the client has the deadline


def serve(arguments: Sequence[str]) -> None:
    """Route until standard input closes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--api-key-file", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("workers", nargs="+")
    ours = parser.parse_args(arguments)
    leave_signals_to_starter()
    end_with_starter()

    # Not sglang_router.launch_router: that imports sglang itself, for its toy balancer.
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    settings = RouterArgs(
        host=ours.host,
        port=ours.port,
        worker_urls=ours.workers,
        api_key=read_key(ours.api_key_file),
        # Of two workers drawn at random the one with fewer tokens in flight: the router's nearest to least loaded.
        policy="power_of_two",
        # The HTTP process alone: /health generates, which a paused worker does not, and would cost it its place.
        health_check_endpoint="/model_info",
        health_check_interval_secs=_HEALTH_INTERVAL_S,
        health_check_timeout_secs=_HEALTH_TIMEOUT_S,
        health_failure_threshold=1,
        health_success_threshold=1,
        # A request that was lost is ours to send again, once, under another name.
        disable_retries=True,
        disable_circuit_breaker=True,
        max_concurrent_requests=-1,
        request_timeout_secs=_REQUEST_TIMEOUT_S,
        worker_startup_timeout_secs=60,
        worker_startup_check_interval=1,
        # It serves metrics without a key: on loopback, whatever the router's own host.
        prometheus_host="127.0.0.1",
        prometheus_port=ours.metrics_port,
        history_backend="none",
        log_level="warn",
    )
    Router.from_args(settings).start()


if __name__ == "__main__":
    serve(sys.argv[1:])
