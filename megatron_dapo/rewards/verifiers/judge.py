"""Preset `judge`: a language model behind an OpenAI-compatible endpoint grades the response.

The verdict's score is the last match of `score_pattern`, or the value of `score_key` in the reply's last JSON object,
divided by `max_score`. Words count as numbers: yes, true, correct and pass are 1; no, false, incorrect, wrong and fail
are 0. The judge's replies are cached on disk by model, messages and sampling, so a new pattern needs no new request.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.verifiers.service import Service, ServiceError
from megatron_dapo.rewards.verifiers.verifier import Verifier

REVISION = "1"
DEFAULT_TEMPLATE = """Grade a response to a question.

[Question]
{prompt}

[Reference answer, which may be empty]
{answer}

[Response]
{response}

Say briefly what is right and wrong in the response. Then end with a line "Score: " and a number from 0 (useless) to 10 (perfect)."""
DEFAULT_PATTERN = r"(?i)score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)"
_WORDS = {
    **dict.fromkeys(("yes", "true", "correct", "right", "pass"), 1.0),
    **dict.fromkeys(("no", "false", "incorrect", "wrong", "fail"), 0.0),
}
_PLACEHOLDER = re.compile(r"\{(prompt|messages|response|answer|data_source)\}")
MAX_EXTRACTED_CHARACTERS = 512


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Return the verifier. ValueError without a URL, or with a pattern that has no group."""
    if not own["url"]:
        raise ValueError(
            "verifier 'judge': set reward.judge.url to an OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1"
        )
    template, pattern = own["template"] or DEFAULT_TEMPLATE, re.compile(own["score_pattern"] or DEFAULT_PATTERN)
    if pattern.groups < 1:
        raise ValueError(f"verifier 'judge': reward.judge.score_pattern {pattern.pattern!r} has no group for the score")
    service = Service(own, pool["timeout_s"], "/chat/completions")
    cache = Path(own["cache_dir"]) if own["cache_dir"] else None
    max_score, threshold = own["max_score"], own["threshold"]

    async def ask(sample: RewardSample) -> VerifierResult:
        body = request_of(sample, own, template)
        path = _cache_path(cache, body) if cache else None
        verdict = _cached(path)
        is_new = verdict is None
        if verdict is None:
            verdict = verdict_of(await service.post(body))
        found = score_of(verdict, pattern, own["score_key"])
        if found is None:
            raise ServiceError(f"the judge's reply has no score: {verdict[-200:]!r}")
        if path and is_new:
            _keep(path, verdict)
        score = found / max_score
        outcome = "correct" if score >= threshold else "wrong"
        return VerifierResult(outcome, verdict[-MAX_EXTRACTED_CHARACTERS:], score)

    async def score_later(sample: RewardSample) -> VerifierResult:
        found = await service.within_deadline(ask(sample))
        return found[0] if isinstance(found, list) else found

    facts = [own["model"], template, pattern.pattern, own["score_key"], max_score, threshold]
    facts += [own["extra_body"]] if own["extra_body"] else []
    version = f"judge-{REVISION}:{own.get('model', '')}@{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"
    return Verifier("judge", version, lambda sample: None, lambda answer: None, True, score_later)


def request_of(sample: RewardSample, own: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return the body of the request. Text of the sample that looks like a placeholder stays what it is."""
    values = {
        "prompt": sample.messages[-1]["content"] if sample.messages else "",
        "messages": "\n\n".join(f"{message['role']}: {message['content']}" for message in sample.messages),
        "response": sample.response,
        "answer": sample.answer,
        "data_source": sample.data_source,
    }
    content = _PLACEHOLDER.sub(lambda match: values[match[1]], template)
    system = [{"role": "system", "content": own["system_prompt"]}] if own["system_prompt"] else []
    return {
        "model": own["model"] or "default",
        "messages": [*system, {"role": "user", "content": content}],
        "temperature": own["temperature"],
        "max_tokens": own["max_tokens"],
        **own["extra_body"],
    }


def verdict_of(reply: Any) -> str:
    """Return the text of a chat completion. Raises ServiceError for a reply of another form."""
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ServiceError(f"the judge's reply is no chat completion: {str(reply)[:200]!r}") from error
    return content if isinstance(content, str) else ""


def score_of(verdict: str, pattern: re.Pattern[str], key: str) -> float | None:
    """Return the score that a verdict gives; None without one."""
    if key:
        value = _last_object(verdict).get(key)
        if isinstance(value, bool):
            return float(value)
        text = "" if value is None else str(value)
    else:
        matches = list(pattern.finditer(verdict))
        text = next((group for group in matches[-1].groups() if group is not None), "") if matches else ""
    text = text.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e9 else None  # inf and nan, too


def _last_object(text: str) -> Mapping[str, Any]:
    """Return the last JSON object in a text that may have words and a fence around it; an empty one without any."""
    decoder = json.JSONDecoder()
    for start in reversed([match.start() for match in re.finditer(r"\{", text)][-64:]):
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _cache_path(directory: Path, body: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return directory / name[:2] / f"{name}.json"


def _cached(path: Path | None) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["verdict"]) if path else None
    except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off by a full disk
        return None


def _keep(path: Path, verdict: str) -> None:
    """Write a verdict atomically, because other processes read the same directory."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"verdict": verdict}), encoding="utf-8")
        os.replace(partial, path)
    except OSError:  # a full disk costs another request, not the score
        partial.unlink(missing_ok=True)
