"""A stock SGLang server as a teacher: its log-probs of given tokens are the model's, after the prompt that it reads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.data.teacher_prompts import TeacherPrompts
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.engines.sglang.ports import reserve_port
from megatron_dapo.trainer.batch_header import sequences_of
from megatron_dapo.trainer.teacher_servers import TeacherServers
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange

pytestmark = pytest.mark.long  # tests/e2e/test_distillation.py trains on the answers of a stand-in
MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "base_model"
START_S = 400.0
SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none", "--max-total-tokens", "8192"),
    *("--mem-fraction-static", "0.3", "--skip-server-warmup", "--sleep-on-idle"),
)


@pytest.fixture(scope="module")
def url(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    reserved, log = reserve_port("127.0.0.1"), tmp_path_factory.mktemp("teacher") / "log"
    port = reserved.hand_over()
    place = ("--model-path", str(MODEL), "--host", "127.0.0.1", "--port", str(port))
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(engine_python), str(Path(__file__).with_name("stock_server.py")), *place, *SERVER]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield _when_healthy(process, f"http://127.0.0.1:{port}", log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reserved.release()


def _when_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return url
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    raise AssertionError(f"no health in {START_S} s: {log.read_text()[-3000:]}")


def make_group(number: int, prompt: Prompt, tokens: list[int]) -> Group:
    completion = Completion("r", tokens, [-0.5] * len(tokens), "stop", (VersionRange(0, len(tokens), 0),))
    sample = ScoredSample(f"{number}/0", completion, "", Score(1.0, 1.0, "correct"), {"verifier": 1.0})
    return Group(str(number), prompt, (sample,), 0, 0)


def test_log_probs_are_those_of_the_model_after_each_prompt(url: str) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    teachers = ({"name": "plain", "url": url}, {"name": "told", "url": url, "weight": 0.5, "prompt": "{prompt} It is {answer}."})
    section, template = DistillationConfig.model_validate({"teachers": teachers}), PromptTemplate(tokenizer)
    servers = TeacherServers(section, TeacherPrompts(section, template))
    servers.check_tokens(tokenizer)
    generator, groups, right = np.random.default_rng(0), [], []
    for number in range(40):  # more than are asked at a time
        text = f"Tom has {number} stamps and sells 2."
        asked, told = ({"role": "user", "content": each} for each in (text, f"{text} It is {number - 2}."))
        prompt = Prompt(str(number), (asked,), template.render([asked]), str(number - 2))
        tokens = generator.integers(0, len(tokenizer), int(generator.integers(1, 60))).tolist()
        groups.append(make_group(number, prompt, tokens))
        plain, after_answer = (_logprobs(model, template.render([turn]), tokens) for turn in (asked, told))
        right.append((plain + 0.5) + 0.5 * (after_answer + 0.5))
    gains = servers.gains(sequences_of(groups))
    for number, wanted in enumerate(right):
        np.testing.assert_allclose(gains[number], wanted, atol=1e-4, rtol=1e-4)
    assert servers.taught["plain"][1] == sum(len(one) for one in right) == servers.taught["told"][1]


def _logprobs(model: torch.nn.Module, prompt: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def test_another_tokenizer_is_refused(url: str) -> None:
    class Shifted:
        def __len__(self) -> int:
            return 451

        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    section = DistillationConfig.model_validate({"teachers": ({"name": "other", "url": url},)})
    servers = TeacherServers(section, TeacherPrompts(section, PromptTemplate(Shifted(), "plain")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"other at {url} has another tokenizer than the policy: 64 of 64 ids"):
        servers.check_tokens(Shifted())
