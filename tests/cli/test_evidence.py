"""`make evidence`: its claims and cases as data, and its page, with a stand-in for the commands. No engine starts."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import evidence, gpu_ladder
from bench.evidence import LOADS, SIDES, Ratio, ratio_of, verdict
from kvtune.cli.settings import core_settings

CASES = [(scale, case) for scale, loads in LOADS.items() for case in loads if case != "real"]
ENDED = Path(__file__).parents[1] / "golden" / "schema1-real.kvrun"
HOSTILE = "<script>alert(1)</script>"


@pytest.mark.parametrize(("scale", "case"), CASES)
def test_every_case_can_run(scale: str, case: str) -> None:
    model, dash_w, load, *flags = LOADS[scale][case].split()
    assert dash_w == "-w"
    gpu_ladder.check(case, model, load, flags[1:])
    for side in SIDES[case].values():
        core_settings([word for word in side if word.startswith("core.")])


def test_a_ratio_has_the_interval_of_the_difference() -> None:
    measured = ratio_of([100.0, 102.0, 98.0], [201.0, 199.0, 200.0])
    assert measured is not None and measured.ratio == pytest.approx(2.0) and measured.runs == 3
    assert 1.9 < measured.low < 2.0 < measured.high < 2.1
    assert ratio_of([4.0], [1.0]) == Ratio(0.25, 0.25, 0.25, 1)
    assert ratio_of([], [1.0]) is None and ratio_of([0.0, 0.0], [1.0, 2.0]) is None


@pytest.mark.parametrize(
    ("low", "middle", "high", "direction", "published", "said"),
    [
        (1.2, 1.3, 1.4, "higher", 1.3, "holds"),
        (1.02, 1.05, 1.08, "higher", 1.3, "smaller here"),
        (0.9, 1.05, 1.2, "higher", 1.3, "no difference shown"),
        (0.8, 0.85, 0.9, "higher", 1.3, "does not hold here"),
        (0.2, 0.25, 0.3, "lower", 0.22, "holds"),
        (0.8, 0.85, 0.9, "lower", 0.22, "smaller here"),
        (0.8, 0.85, 0.9, "lower", None, "holds"),
        (0.95, 1.0, 1.05, "equal", 1.0, "holds"),
        (0.8, 1.0, 1.25, "equal", 1.0, "no difference shown"),
        (1.12, 1.2, 1.3, "equal", 1.0, "does not hold here"),
    ],
)
def test_verdicts(
    low: float, middle: float, high: float, direction: str, published: float | None, said: str
) -> None:
    assert verdict(Ratio(middle, low, high, 3), direction, published) == said
    assert verdict(None, direction, published) == "not measured"


class Commands:
    """Answers `profile` with a new run file, and `compare` with runs that are twice as fast on each later side."""

    def __init__(self) -> None:
        self.number = count()
        self.asked: list[tuple[str, ...]] = []
        self.speed: dict[str, float] = {}

    def __call__(self, *words: str) -> dict[str, Any]:
        self.asked.append(words)
        if words[0] == "compare":
            return {"runs": [self.run(self.speed[file]) for file in words[1:-1]]}
        number = next(self.number)
        path = Path(words[words.index("-o") + 1]) / f"{number}.kvrun"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ENDED, path)
        file = str(path)
        self.speed[file] = 1.0 if "stock" in words else 2.0 + number / 100
        return {"run_file": file}

    def run(self, speed: float) -> dict[str, Any]:
        rounds = [{"ttft_ms_mean": 100 / speed, "hit_tokens": 8}] * 3
        engine = {"vllm": "1", "device": "cpu", "device_name": ""}
        return {
            "throughput_tok_s": speed,
            "rounds": rounds,
            "engine": engine,
            "host": {"cpu": HOSTILE, "cores": 2},
            "python": "3",
            "kvtune": "0",
        }


def test_runs_are_made_in_turns_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands()
    monkeypatch.setattr(evidence, "kvtune", commands)
    asked = ["--only", "pinning", "--scale", "cpu", "-o", str(tmp_path)]
    assert evidence.main(asked) == 0
    page = (tmp_path / "evidence.html").read_text()
    assert HOSTILE not in page and "tokens/s: first over stock" in page and "4 of 5 holds" in page
    made = [words for words in commands.asked if words[0] == "profile"]
    assert len(made) == 4 * 3 + 2 * 3
    files = sorted(
        (tmp_path / "evidence-runs" / "cpu-prefixes-stock").iterdir(), key=lambda path: int(path.stem)
    )
    assert [path.stem for path in files] == ["0", "7", "11"], "every second time in reverse order"
    assert evidence.main(asked) == 0
    assert [words for words in commands.asked if words[0] == "profile"] == made
