"""Models drawn at random within their families: what the arithmetic plans, vLLM answers on a forced H100."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tools.draws import answers, drawn, verdict

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(900)]


def test_what_is_planned_is_what_vllm_answers(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    draw = random.Random(3)
    draws = [drawn(draw) for _ in range(24)]
    verdicts = [verdict(answer) for answer in answers(draws, "h100", tmp_path)]
    wrong = [each for each, what in zip(draws, verdicts, strict=True) if what == "WRONG"]
    assert wrong == []
    assert verdicts.count("equal") >= 6
