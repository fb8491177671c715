"""The share of draft tokens that a server accepts: said as it is, and an alarm only where it collapses as hits rise."""

from __future__ import annotations

import json

import pytest

from kvtune.servers.watch.drafts import Drafts, drafts
from kvtune.servers.watch.metrics import Between, read
from tests.servers.watch.played import Answers, http
from tests.servers.watch.test_regime import text
from tests.simulator import run


def metrics(proposed: int, accepted: int, queries: int, hits: int, loaded: int = 0) -> str:
    """Return the /metrics of a server with drafts, by its counters."""
    counts = {
        "spec_decode_num_drafts": proposed // 3,
        "spec_decode_num_draft_tokens": proposed,
        "spec_decode_num_accepted_tokens": accepted,
        "external_prefix_cache_hits": loaded,
    }
    lines = [f'vllm:{name}_total{{engine="0"}} {number}.0' for name, number in counts.items()]
    position = 'per_pos_total{engine="0",position="0"}'
    positions = [f"vllm:spec_decode_num_{what}_tokens_{position} 9e9" for what in ("draft", "accepted")]
    return text(queries=queries, hits=hits) + "\n".join([*lines, *positions]) + "\n"


def judged(before: tuple[int, ...], now: tuple[int, ...]) -> Drafts:
    """Counts until 300 s ago, and those of the last 300 s."""
    both = [a + b for a, b in zip(before, now, strict=True)]
    made = drafts(Between(read(metrics(*before), 0.0), read(metrics(*both), 300.0)))
    assert made is not None
    return made


HEALTHY = (10_000, 6_340, 50_000, 5_000, 0)


@pytest.mark.parametrize(
    ("now", "accepted", "collapsed"),
    [
        ((20_000, 40, 50_000, 10_000, 20_000), 0.002, True),  # LMCache #4247: 63.4 -> 0.2 %
        ((20_000, 40, 50_000, 4_000, 20_000), 0.002, True),  # all that rose came from a connector
        (
            (20_000, 40, 50_000, 5_000, 0),
            0.002,
            False,
        ),  # hits did not rise: another load may be hard to guess
        ((20_000, 4_000, 50_000, 40_000, 0), 0.2, False),  # other texts
        ((999, 0, 50_000, 40_000, 0), None, False),  # too few to say
    ],
)
def test_a_collapse_is_an_alarm_only_where_hits_rose(
    now: tuple[int, ...], accepted: float | None, collapsed: bool
) -> None:
    made = judged(HEALTHY, now)
    assert (made.accepted, made.before, made.collapsed) == (accepted, 0.634, collapsed)
    assert ("collapsed" in made.sentence) == collapsed


def test_the_sentence_has_both_shares_and_what_rose() -> None:
    says = "0.2 % accepted, 63.4 % before the last 300 s: collapsed, and hits rose from 10.0 % to 60.0 %"
    assert judged(HEALTHY, (20_000, 40, 50_000, 10_000, 20_000)).sentence == says
    assert judged((0, 0, 0, 0, 0), (18, 4, 0, 0, 0)).sentence == "fewer than 1,000 tokens: no share is said"
    assert judged((0, 0, 0, 0, 0), HEALTHY).sentence == "63.4 % accepted, – before the last 300 s"


def test_watch_says_nothing_of_a_server_that_does_not_draft(capsys: pytest.CaptureFixture[str]) -> None:
    for drafting in (True, False):
        page = metrics(*HEALTHY) if drafting else text(queries=50_000, hits=5_000)
        with http(Answers(page)) as base:
            assert run(("watch", base, "--once", "--seconds", "0.2", "--json")) == 0
            shot = json.loads(capsys.readouterr().out)
            assert (shot["drafts"] is not None) == drafting
            assert run(("watch", base, "--once", "--seconds", "0.2")) == 0
        assert ("63.4 % before the last " in capsys.readouterr().out) == drafting
