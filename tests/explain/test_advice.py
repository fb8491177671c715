"""What `profile` advises of a run it replayed on that run, and its command does what was promised."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest

from kvtune.analysis.replayed import helping, preempts, wins
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.verdict import OF_THE_CACHE
from kvtune.run.file import read_run
from tests.choice import drawn as drawn_at_random
from tests.simulator import run as kvtune

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def drawn(seed: int) -> list[str]:
    """A `kvtune profile` line: a small model with a pool of a few prompts, and a load that comes back to some."""
    draw = random.Random(seed)
    prefix, prefixes = draw.choice((320, 640)), draw.randint(3, 8)
    load = draw.choice(
        (
            f"rounds:prefixes={prefixes},prefix={prefix},suffix={draw.choice((0, 16, 48))},output=4,rounds=3",
            f"rounds:prefixes={prefixes},prefix={prefix},suffix=20,output=40,rounds=3,concurrency=4",
            f"zipf:requests=24,prefixes={prefixes},prefix={prefix},suffix=16,output=4",
            f"chat:sessions={prefixes},turns=4,system={prefix // 2},user=40,output=24",
        )
    )
    model, longest, block = draw.choice(("tiny-llama", "tiny-gemma3")), prefix + 320, draw.choice((32, 64))
    tokens = longest + int(draw.choice((0.2, 0.5, 0.8)) * prefix * prefixes)
    groups = 4 if model == "tiny-gemma3" else 1
    return [
        *("profile", model, "--on", "sim", "-w", load, "--seed", str(seed)),
        *("--core", draw.choice(("stock", "stock", "kvtune")), "--"),
        *("--block-size", str(block), "--num-gpu-blocks-override", str(groups * tokens // block)),
        *("--max-model-len", str(longest), "--max-num-batched-tokens", draw.choice(("256", "1024"))),
        *("--max-num-seqs", draw.choice(("2", "8"))),
    ]


def profiled(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, object]:
    at = argv.index("--")
    assert kvtune([*argv[:at], *more, "--json", "--quiet", "-o", str(folder), *argv[at:]]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def keeps_its_promise(seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The settings that were advised for a drawn run, each tried by its own command."""
    argv = drawn(seed)
    told = profiled(argv, folder, capsys)
    run = read_run(Path(str(told["run_file"])))
    replayed = run.header.extra.replayed
    assert replayed is not None and not replayed.why and replayed.other is not None, shlex.join(argv)
    assert replayed.hit_tokens == told["prefix_cache"]["hit_tokens"]  # type: ignore[index]
    verdict = RunAnalysis(run).verdict
    best = helping(replayed)
    if verdict.kind in OF_THE_CACHE:
        assert shlex.split(verdict.command)[1] == ("profile" if best else "bounds")
    for remedy, line in zip(best, commands(told), strict=True):
        again = profiled(shlex.split(line)[1:], folder, capsys, "--tries", "0")
        promised = remedy.hit_tokens / replayed.query_tokens
        assert again["prefix_cache"]["hit_rate"] == pytest.approx(promised, abs=0.001), line  # type: ignore[index]
        assert again["preemptions"] == remedy.preemptions, line
        assert wins(remedy, replayed) or not preempts(remedy.preemptions, replayed.requests), line
    return len(best)


def commands(told: dict[str, object]) -> list[str]:
    replayed = told["replayed"]
    assert isinstance(replayed, dict)
    return [str(one["command"]) for one in replayed["remedies"]]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "runs"),
    [(7, 2), *(pytest.param(10 + 10 * at, 10, marks=pytest.mark.full) for at in range(drawn_at_random(4)))],
)
def test_advised_settings_bring_what_was_promised_in_drawn_runs(
    seed: int, runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(keeps_its_promise(one, tmp_path, capsys) for one in range(seed, seed + runs)) > 0
