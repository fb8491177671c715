"""The closed form of what hits: the one that all replayed lengths obey, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.data.layout.forms import Form, form_of, lengths


@given(
    st.sampled_from([(16, 16), (32, 544), (80, 400), (544, 544), (16, 2096)]),
    st.integers(0, 1),
    st.integers(0, 1),
    st.booleans(),
)
def test_each_form_is_found_by_the_lengths_that_are_replayed(
    sizes: tuple[int, int], dropped: int, spared: int, of_block: bool
) -> None:
    unit, block = sizes
    tried = lengths(block, unit, 1 << 20)
    truth = Form(unit=block if of_block else unit, dropped=dropped, spared=spared, lengths=len(tried))
    assert form_of([(tokens, truth.hits(tokens)) for tokens in tried], sizes) == truth


def test_what_obeys_no_form_or_two_is_unknown() -> None:
    obeys = [(tokens, tokens // 544 * 544) for tokens in lengths(544, 544, 1 << 20)]
    assert form_of(obeys, [544]) is not None
    assert form_of([*obeys, (5000, 4351)], [544]) is None
    assert form_of([(1100, 544), (1200, 1088)], [544]) is None
    assert form_of([(600, 544), (700, 544)], [544]) is None, "one token spared, or none: both hold"
    assert form_of([(100, 0), (200, 0)], [544]) is None, "nothing hits: nothing is known"


def test_lengths_are_those_that_a_request_may_have() -> None:
    assert max(lengths(8304, 8304, 20_000)) <= 20_000 and lengths(544, 32, 100) == []
    assert lengths(544, 32, 5000) == lengths(544, 32, 5000)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            Form(unit=1600, dropped=1, spared=0, lengths=9),
            "max(0, floor(N / 1,600) - 1) x 1,600; below 3,200",
        ),
        (Form(unit=544, dropped=0, spared=1, lengths=9), "floor((N - 1) / 544) x 544; below 545"),
    ],
)
def test_a_form_says_from_where_on_something_hits(form: Form, text: str) -> None:
    assert text in form.text("N")
    assert form.hits(form.least) > 0 and form.hits(form.least - 1) == 0
