"""kvtune's few statistics give scipy's values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from kvtune.base.statistics import bootstrap, fisher, fit_not_negative, line, share_interval, t_quantile


@given(st.floats(0.6, 0.999), st.floats(1.0, 5000.0))
def test_quantiles_of_students_t(share: float, freedom: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-7)


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_exact_intervals_of_a_share(hits: int, others: int) -> None:
    if hits + others == 0:
        return
    found = share_interval(hits, hits + others, 0.95)
    wanted = stats.binomtest(hits, hits + others).proportion_ci(0.95)
    assert found == pytest.approx((wanted.low, wanted.high), rel=1e-7, abs=1e-12)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4))
def test_fishers_exact_test(table: list[int]) -> None:
    both, marked, chosen, neither = table
    wanted = stats.fisher_exact([[both, marked], [chosen, neither]], "greater").pvalue
    of = sum(table)
    assert fisher(both + marked, both + chosen, both, of) == pytest.approx(wanted, rel=1e-7)


@given(st.integers(3, 200), st.integers(0, 2**32 - 1))
def test_a_line_and_its_error(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = np.sort(random.random(count)) * 1e3, random.random(count) * 1e6
    wanted = stats.linregress(x, y)
    assert line(x, y) == pytest.approx((wanted.slope, wanted.stderr), rel=1e-6)


@pytest.mark.parametrize("sizes", [(40,), (30, 70)])
@pytest.mark.parametrize("batch", [1000, 170])
def test_bootstrap_intervals_are_scipys_for_the_same_seed(sizes: Sequence[int], batch: int) -> None:
    values = np.random.default_rng(1).random(200)
    samples = tuple(np.arange(size) for size in sizes)

    def statistic(*rows: np.ndarray, axis: int = -1) -> np.ndarray:
        return sum(np.mean(values[drawn] * (i + 1), axis=axis) for i, drawn in enumerate(rows))

    found = bootstrap(samples, statistic, resamples=1000, batch=batch, confidence=0.95, seed=7)
    wanted = stats.bootstrap(
        samples,
        statistic,
        n_resamples=1000,
        batch=batch,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(7),
    ).confidence_interval
    assert found == pytest.approx((wanted.low, wanted.high), rel=1e-12)


@given(st.integers(2, 60), st.integers(1, 6), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_least_squares_without_negative_weights(
    rows: int, columns: int, seed: int, sparse: bool, exact: bool
) -> None:
    random = np.random.default_rng(seed)
    work = random.random((rows, columns)) * (random.random((rows, columns)) < (0.4 if sparse else 1.0))
    if exact:  # weights at 0 are then 0 up to rounding, on either side
        wanted = work @ (random.random(columns) * (random.random(columns) < 0.5))
    else:
        wanted = random.normal(size=rows) + work @ random.random(columns) * 3
    weights = fit_not_negative(work, wanted)
    _, rest = optimize.nnls(work, wanted)
    assert (weights >= 0).all()
    # Where columns depend on each other several weights are as good, so the rest is compared.
    assert float(np.linalg.norm(work @ weights - wanted)) == pytest.approx(rest, rel=1e-7, abs=1e-9)
