"""Preset `remote`: a service of your own scores batches of responses over HTTP.

POST reward.remote.url  {"samples": [{"messages", "response", "answer", "data_source", "extra_info", "finish_reason",
                         "group_index", "token_ids" (null unless reward.token_ids)}, ...]}
reply, status 200       {"results": [one a sample, in order: a number, true or false,
                         or {"score", "parts", "extracted", "is_correct"}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.rewards.result import RewardSample
from megatron_dapo.rewards.verifiers.service import Service, ServiceError
from megatron_dapo.rewards.verifiers.verifier import Verifier

REVISION = "1"


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Return the verifier. ValueError without a URL."""
    if not own["url"]:
        raise ValueError("verifier 'remote': set reward.remote.url to the service that scores responses")
    service = Service(own, pool["timeout_s"])

    async def ask(samples: Sequence[RewardSample]) -> Any:
        reply = await service.post({"samples": [message_of(sample) for sample in samples]})
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or len(results) != len(samples):
            found = len(results) if isinstance(results, list) else "none"
            raise ServiceError(f"{own['url']}: {len(samples)} samples need as many results; the reply has {found}")
        return results

    async def score_later(samples: Sequence[RewardSample]) -> Any:
        return await service.within_deadline(ask(samples), len(samples))

    version = f"remote-{REVISION}:{own['url']}"
    return Verifier("remote", version, lambda samples: None, lambda answer: None, True, score_later, is_batched=True)


def message_of(sample: RewardSample) -> dict[str, Any]:
    """Return a sample as the service gets it."""
    fields = dict(vars(sample))
    fields["token_ids"] = fields.pop("requested_token_ids")
    return fields
