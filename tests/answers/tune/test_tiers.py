"""A sweep over the size of host memory: one table, one chart, and the size that brings most of it."""

from __future__ import annotations

from kvtune.answers.tune.document import document
from kvtune.answers.tune.result import Outcome, StudyResult, StudyView, Trial
from kvtune.answers.tune.tiers import tier_section
from kvtune.lab.setup.setup import Setup


def study(computed: dict[float, int], **more: str) -> StudyView:
    """Trials of 100,000 prompt tokens, by GiB; every token that the pool does not hit is computed or loaded."""
    trials = [
        Trial(
            number=number,
            settings={"kv_offloading_size": gib, **more},
            on="sim",
            summary={
                "prefix_cache": {
                    "query_tokens": 100_000,
                    "hit_tokens": 100_000 - left,
                    "hit_rate": 1 - left / 100_000,
                },
                "offload": {"tier_hit_tokens": 60_000 - left} if gib else None,
            },
        )
        for number, (gib, left) in enumerate(computed.items())
    ]
    result = StudyResult(
        kind="sweep",
        objective="hit-rate",
        objectives=("hit-rate",),
        trials=tuple(trials),
        best=trials[-1],
        baseline=None,
        finalists=(),
        pareto=(),
        verdict=Outcome(objective="hit-rate", on="sim"),
        recipe=None,
        notes=(),
    )
    return StudyView(
        setup=Setup(model="tiny-llama"), result=result, drawn_on="sim", axes=("ttft", "throughput")
    )


def test_the_first_line_says_which_size_brings_two_thirds_of_what_the_largest_would() -> None:
    found = study({0: 60_000, 500: 30_000, 10: 55_000, 40: 40_000})
    section = tier_section(found)
    assert section is not None
    said = "40 GiB bring 66.7 % of what 500 GiB would: 20,000 prompt tokens less to compute than with 0 GiB."
    assert section.lead == said and document(found).headline.endswith(said)
    rows = [[cell.text for cell in row] for row in section.tables[0].rows]
    assert rows[0] == ["0", "40.0 %", "0", "60,000", "0"]
    assert rows[2] == ["40", "60.0 %", "20,000", "40,000", "20,000"]
    assert [row[0] for row in rows] == ["0", "10", "40", "500"]
    assert section.draw is not None
    (chart,) = section.draw()
    assert chart.data["tiers"] == {"gib": [0, 10, 40, 500], "hits": [40, 45, 60, 70]}


def test_a_tier_that_brings_nothing_is_said_to() -> None:
    section = tier_section(study({0: 60_000, 100: 60_000}))
    assert section is not None and section.lead == "100 GiB bring nothing that 0 GiB do not."


def test_a_study_of_another_knob_too_has_no_such_table() -> None:
    assert tier_section(study({0: 60_000, 100: 30_000}, eviction_policy="arc")) is None
    assert tier_section(study({100: 30_000})) is None
