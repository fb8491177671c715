"""Where a curve of hits over memory bends."""

from __future__ import annotations

from kvtune.analysis.offload import knee


def test_the_knee_is_where_the_curve_leaves_its_line_furthest() -> None:
    assert knee([(0, 0.05), (1, 0.06), (2, 0.13), (4, 0.19), (8, 0.20), (16, 0.26)]) == 4


def test_a_line_and_a_curve_that_only_gets_steeper_have_none() -> None:
    assert knee([(0, 0.0), (1, 0.1), (2, 0.2)]) is None
    assert knee([(0, 0.0), (1, 0.01), (2, 0.2)]) is None


def test_two_points_and_a_curve_without_gain_have_none() -> None:
    assert knee([(0, 0.1), (4, 0.3)]) is None
    assert knee([(0, 0.3), (2, 0.35), (4, 0.3)]) is None
