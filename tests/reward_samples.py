"""A sample of the quickstart for tests of rewards that ask a model or a service."""

from __future__ import annotations

FIELDS = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "",
    "extra_info": {},
    "finish_reason": "stop",
    "group_index": 0,
}
