"""Where the bytes go, and what will be refused: arithmetic against what vLLM says of the same flags on a forced GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtune.answers.doctor.asked import asked_of
from kvtune.answers.doctor.boot import compared, read_log
from kvtune.answers.doctor.diagnosis import examine
from kvtune.answers.doctor.facts import Facts, Refusal, gib
from kvtune.answers.doctor.model import ask_vllm
from kvtune.answers.doctor.planned import read_config, with_origins
from kvtune.answers.doctor.rules import settings_findings
from kvtune.answers.doctor.spent import freed, judged, request_blocks
from kvtune.base.errors import UsageError
from kvtune.data.flags import with_flag
from kvtune.data.platforms import device
from kvtune.lab.setup.setup import Setup

MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']
FP8 = ["--kv-cache-dtype", "fp8"]


def arithmetic(model: str, like: str, flags: Sequence[str]) -> Facts:
    platform = device(like)
    return judged(with_origins(read_config(model, flags, platform), platform, flags))


def vllms(model: str, like: str, flags: Sequence[str]) -> Facts:
    return ask_vllm(Setup(model=model, engine_args=list(flags), platform=device(like)))


def pool(facts: Facts) -> tuple[object, ...]:
    said = facts.refusal.said if facts.refusal else ""
    held = [group.request_blocks for group in facts.groups]
    return sorted(held), facts.bytes_of_block, facts.pool_blocks, facts.tokens_fit, said


CASES = {
    "a refusal": (
        "llama-3.1-8b",
        "h100",
        ["--max-model-len", "32768", "--kv-cache-memory-bytes", "3000000000"],
    ),
    "windows in flight": (
        "gpt-oss-20b",
        "5090",
        ["--max-model-len", "131072", "--kv-cache-memory-bytes", "4000000000"],
    ),
    "states and drafts": (
        "qwen3.5-27b",
        "3090",
        ["--max-model-len", "262144", "--kv-cache-memory-bytes", "9910000000", *FP8, *MTP],
    ),
    "states of Mamba-2": (
        "nemotron-3-nano",
        "a100",
        ["--max-model-len", "131072", "--num-gpu-blocks-override", "40"],
    ),
}


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n != "a refusal" else n for n in CASES]
)
def test_what_is_refused_without_vllm_is_what_vllm_refuses(name: str) -> None:
    model, like, flags = CASES[name]
    asked = vllms(model, like, flags)
    assert pool(arithmetic(model, like, flags)) == pool(asked)
    assert request_blocks(asked) == sum(group.request_blocks for group in asked.groups)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "like"), [("gemma-4-31b", "h100"), ("qwen3.5-27b", "3090"), ("nemotron-3-nano", "h200")]
)
def test_what_a_flag_frees_is_what_vllm_then_reserves_less(model: str, like: str) -> None:
    flags = ["--max-model-len", "32768", "--kv-cache-memory-bytes", str(64 << 30)]
    now = vllms(model, like, flags)
    changes = list(freed(now))
    assert changes
    for change in changes:
        then = vllms(model, like, [*flags, *change.change.split()])
        less = request_blocks(now) * now.bytes_of_block - request_blocks(then) * then.bytes_of_block
        assert change.bytes == less, change.change
        assert ("block becomes" in change.cost) == (then.block_tokens > now.block_tokens)


@pytest.mark.vllm
@pytest.mark.full
def test_a_pool_that_starts_and_never_ends_a_longest_request_is_found() -> None:
    flags = ["--max-model-len", "32768", *FP8, *MTP, "--kv-cache-memory-bytes", "2097152000"]
    stuck = vllms("qwen3.5-27b", "h100", flags)
    assert stuck.refusal is None and stuck.tokens_fit > 32_768 > stuck.longest_run
    messages = [each.text for each in settings_findings(stuck) if each.topic == "start"]
    assert len(messages) == 1 and "a request of 32,768 tokens never ends" in messages[0]
    shorter, larger = ("max-model-len", stuck.longest_run), ("kv-cache-memory-bytes", 2_400_000_000)
    for name, value in (shorter, larger):
        assert vllms("qwen3.5-27b", "h100", with_flag(flags, name, value)).longest_run == 0


def test_a_refusal_is_told_in_vllms_figures() -> None:
    facts = arithmetic(*CASES["a refusal"])
    (said,) = (each for each in settings_findings(facts) if each.topic == "start")
    assert (
        said.text
        == "vLLM will refuse: a request of 32,768 tokens needs 4.0 GiB of 2.79; the longest that fits is 22,864 tokens"
    )
    assert said.level == "error" and said.hint.startswith("--max-model-len 22864")
    assert Refusal(needed_bytes=1, pool_bytes=0, longest=0).said == "needs 0.0 GiB of 0.0"
    assert gib(9_971_302_400) == "9.29"


LOG = """(APIServer pid=1) INFO [utils.py:299] version 0.29.0
INFO non-default args: {'model_tag': 'Qwen/Qwen3.8-27B-FP8', 'max_model_len': 131072, 'quantization_config': Q(a=['x']),
 'kv_cache_dtype': 'fp8', 'tensor_parallel_size': 2, 'compilation_config': {'mode': None, 'backend': 'inductor'}}
INFO Setting attention block size to 1568 tokens to ensure that attention page size is >= mamba page size.
INFO Available KV cache memory: 4.99 GiB
INFO GPU KV cache size: 302,921 tokens
INFO Maximum concurrency for 131,072 tokens per request: 2.31x
""".replace("]),\n", "]),")


def test_a_servers_log_is_held_against_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG, encoding="utf-8")
    boot = read_log(path)
    assert (boot.line.model, boot.version, boot.figures["tokens"]) == (
        "Qwen/Qwen3.8-27B-FP8",
        "0.29.0",
        302_921,
    )
    facts = arithmetic("qwen3.5-27b", "3090", asked_of(None, [], path, device("3090")).flags)
    assert [(each.topic, each.level) for each in compared(boot, facts)] == [("block", "ok"), ("pool", "ok")]
    path.write_text(LOG.replace("1568", "1664").replace("302,921", "290,000"), encoding="utf-8")
    block, tokens = compared(read_log(path), facts)
    assert block.level == tokens.level == "warning"
    assert "1,664 tokens is 0.29.0's, " in block.text and "gives 1,568 tokens" in block.text
    assert "the log's 290,000 tokens differ from the prediction: 302,921 tokens" in tokens.text


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("nothing\n" * 10, encoding="utf-8")
    with pytest.raises(UsageError, match="vLLM's lines about its start are not in it"):
        read_log(path)


def test_a_logs_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    odd = {"4.99 GiB": "1.2.3 GiB", "302,921 tokens": ", tokens", "131,072 tokens": f"{'9' * 5000} tokens"}
    text = LOG.replace("131072", "9" * 5000)
    for written, number in odd.items():
        text = text.replace(written, number)
    path.write_text(text, encoding="utf-8")
    assert read_log(path).figures == {"block": 1568}


def test_a_launch_line_is_answered_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.answers.doctor.environment.installed", lambda name: "")
    flags = "--kv-cache-dtype fp8 --max-model-len 262144 --kv-cache-memory-bytes 8000000000"
    line = f"vllm serve Qwen/Qwen3.8-27B-FP8 {flags}"
    diagnosis = examine(asked_of(None, [line], None, device("5090")), tmp_path)
    assert diagnosis.model is not None and diagnosis.model.source == "config"
    said = {each.topic: each.text for each in diagnosis.settings}
    assert said["start"].startswith("vLLM will refuse: a request of 262,144 tokens needs ")
    assert said["layout"].startswith("layout of qwen3.5-27b, assumed for Qwen/Qwen3.8-27B-FP8")
