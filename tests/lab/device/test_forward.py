"""Step costs from `vllm bench forward`: a file that vLLM 0.33's own writer made, and files that are wrong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.cli.capacity import _times
from kvtune.lab.device.forward import forward_cost

WRITTEN = Path(__file__).parents[2] / "recordings" / "bench_forward.json"
"""tests/recordings/README.md has its cost."""
Cases = list[dict[str, Any]]


def written(folder: Path, change: Callable[[Cases], Any] = lambda cases: None) -> Path:
    """Write the cases with a change of theirs."""
    cases = copy.deepcopy(json.loads(WRITTEN.read_text()))
    change(cases)
    file = folder / "forward.json"
    file.write_text(json.dumps(cases))
    return file


def test_the_cost_of_vllms_own_file_is_recovered() -> None:
    found = forward_cost(WRITTEN)
    cost = found.cost
    assert cost.step_us == pytest.approx(9000, rel=0.02)
    assert cost.prefill_token_us == pytest.approx(55, rel=0.02)
    assert cost.decode_us == pytest.approx(40, rel=0.25)
    assert cost.prefill_kv_us == pytest.approx(0.0002, rel=0.25)
    assert cost.steps == 8 and cost.error_share < 0.01 and cost.held_out_share < 0.05
    assert found.worst[1] >= cost.error_share and 0 < found.spread < 0.01
    assert "8 cases" in found.said and f"case {found.worst[0]}" in found.said


def test_it_is_not_trusted_to_a_session() -> None:
    """The model's forward is timed alone, and the file does not name the model."""
    cost, by, said = _times(f"forward={WRITTEN}")
    assert by == "forward" and cost is not None and not cost.trusted and "on average" in said


def test_four_plain_cases_give_the_three_first_parts(tmp_path: Path) -> None:
    kept = {"decode1", "decode24", "prefill", "prefill2k"}
    file = written(
        tmp_path, lambda cases: cases.__setitem__(slice(None), [c for c in cases if c["case"] in kept])
    )
    cost = forward_cost(file).cost
    assert cost.prefill_token_us > 0 and cost.decode_us > 0 and cost.step_us > 0
    assert cost.kv_token_us == cost.prefill_kv_us == cost.prefill_step_us == 0


WRONG: dict[str, tuple[Callable[[Cases], Any], str]] = {
    "unknown field": (
        lambda cases: cases[1].update(speed=1),
        r"case 1 \('decode8'\): .*unknown field `speed`",
    ),
    "missing time": (lambda cases: cases[2].pop("median_us"), "case 2 .*missing required field `median_us`"),
    "time that is no number": (lambda cases: cases[3].update(median_us=math.nan), r"case 3 .*median_us"),
    "other median": (lambda cases: cases[3].update(median_us=1.0), "case 3 .*median_us=1, and"),
    "other tokens": (lambda cases: cases[3]["requests"][0].update(query_len=7), "case 3 .*num_tokens=512"),
    "short kv": (lambda cases: cases[3]["requests"][0].update(kv_len=1), r"case 3 .*requests\[0\].kv_len=1"),
    "drafts": (
        lambda cases: cases[0]["requests"][0].update(num_draft_tokens=3),
        "case 0 .*num_draft_tokens=3",
    ),
    "pipeline": (
        lambda cases: cases[0]["ranks"][0]["latency_us"].update(
            timer="pipeline_correlated_gpu_events_rank_max"
        ),
        "case 0 .*timer",
    ),
    "too few": (lambda cases: cases.__delitem__(slice(3, None)), "has 3 cases, a step cost needs 4"),
    "no prompts": (
        lambda cases: cases.__setitem__(slice(None), cases[:3] + cases[1:2]),
        "do not tell the time of a prompt token",
    ),
}


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused_by_case_and_field(
    tmp_path: Path, change: Callable[[Cases], Any], said: str
) -> None:
    file = written(tmp_path, change)
    with pytest.raises(UsageError, match=rf"^{file}.*{said}") as raised:
        forward_cost(file)
    assert raised.value.hint
