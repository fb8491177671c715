from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.units import count, ms, number, percent, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (0.84, "840 µs"),
        (0.9996, "1 ms"),
        (12.34, "12.3 ms"),
        (123.4, "123 ms"),
        (999.6, "1 s"),
        (4560, "4.56 s"),
        (123_456, "123 s"),
        (7_200_000, "7,200 s"),
        (-0.5, "-500 µs"),
        (math.nan, "–"),
    ],
)
def test_ms(value: float, text: str) -> None:
    assert ms(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1010, "0.986 KiB"),
        (1536, "1.5 KiB"),
        (1020 * 2**20, "0.996 GiB"),
        (999 * 2**20, "999 MiB"),
        (3.2 * 2**30, "3.2 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text


@given(st.floats(-1e15, 1e15))
def test_nobody_has_to_read_an_exponent(value: float) -> None:
    for text in (size(value), ms(value), count(value)):
        number, *unit = text.replace(",", "").split(" ")
        assert re.fullmatch(r"-?\d+(\.\d+)?", number), text
        assert len(unit) <= 1


def test_count_and_percent() -> None:
    assert [count(v) for v in (950, 12_031, 144_793_823)] == ["950", "12,031", "145 M"]
    assert percent(1, 8) == "12.5 %"
    assert percent(1, 0) == "–"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.61254, "0.6125"),
        (288.16, "288.2"),
        (9999.4, "9,999"),
        (9999.6, "10,000"),
        (31_042.0, "31,042"),
    ],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert number(value) == text
