"""Long and dirty traffic of real servers (truth.py): what kvtune says of it, beside what the client knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtune.answers.explain.explanation import bench_of
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.file_flags import on_the_list
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.server import section
from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.document import document
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.metrics import Scrape
from kvtune.servers.watch.record import Recording, run_of
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.watched import Watched
from tests.choice import first_of
from tests.servers.watch.joined import join
from tests.servers.watch.played import Unconnected
from tests.servers.watch.truth import MODELS, Life, Traffic, known, traffic
from tests.simulator import SHARED

LATE_S = 0.05
"""After this time an event has reached a reader."""
CAUSED_BY_EVENTS = ("evicted", "not_retained", "reset")


@dataclass
class Played(Unconnected):
    """A server and a reader of its events, both played from recordings: each scrape is the next sample."""

    lives: list[Life]

    def __post_init__(self) -> None:
        super().__init__()
        self._scrapes = iter([(life, one) for life in self.lives for one in life.scrapes()])
        self._waiting: list[Received] = []
        self._life: Life | None = None
        self._at = 0.0

    def scrape(self) -> Scrape:
        life, scrape = next(self._scrapes)
        if life is not self._life:
            fresh = self._life is not None
            self._waiting += [
                Received(0, one.batch, fresh and number == 0) for number, one in enumerate(life.received())
            ]
            self._life = life
        self._at = scrape.at
        return scrape

    def take(self) -> list[Received]:
        came = [one for one in self._waiting if one.batch.ts <= self._at + LATE_S]
        self._waiting = [one for one in self._waiting if one.batch.ts > self._at + LATE_S]
        return came


def watched(lives: list[Life]) -> Iterator[Watched]:
    """Yield a `Watched` after each look."""
    played = Played(lives)
    watching = Watched(played)  # type: ignore[arg-type]
    watching.reader = played  # type: ignore[assignment]
    while True:
        try:
            watching.look()
        except KvtuneError as error:
            assert isinstance(error.__cause__, StopIteration)
            return
        yield watching


def last(lives: list[Life]) -> Watched:
    *_, watching = watched(lives)
    return watching


def of_life(run: Traffic, life: int) -> Counter[str]:
    """The causes of a life's logged requests, as events alone tell them: the texts that are shared are not known."""
    causes: Counter[str] = Counter()
    for one in join(run.lives[life].received(), run.asked(life), Account()):
        causes.update(one.tally.misses)
    causes["cold"] += causes.pop("diverged", 0)
    return causes


@pytest.mark.parametrize("model", first_of(MODELS))
def test_each_request_hits_what_usage_says_and_was_seen_as_the_trie_says(model: str) -> None:
    run = traffic(model)
    truths = {f"{number}": one for number, one in zip(_answered(run), known(run.sent), strict=True)}
    for life in range(2):
        answered = join(run.lives[life].received(), run.asked(life), Account())
        assert len(answered) == len(run.asked(life))
        for one in answered:
            truth = truths[one.asked.name.split()[0]]
            assert one.estimate == one.asked.hit == one.tally.hit_tokens, one.asked.name
            assert sum(one.tally.misses.values()) == one.tally.missed
            seen = max(truth.perhaps, truth.before_reset)
            assert truth.surely <= one.agrees <= seen, one.asked.name
            new = one.tally.misses.get("cold", 0) + one.tally.misses.get("diverged", 0)
            assert len(one.asked.prompt) - max(seen, truth.elsewhere) <= new
            assert new <= len(one.asked.prompt) - truth.surely
            assert not (one.tally.misses.get("reset") and not truth.before_reset)
            assert not (one.tally.misses.get("other_salt") and not truth.elsewhere)


def _answered(run: Traffic) -> list[int]:
    return [number for number, one in enumerate(run.sent) if one.hit >= 0]


def block_of(watching: Watched) -> int:
    return max(group.block_size for group in watching.account.blocks[0].groups.values())


@pytest.mark.parametrize("model", MODELS)
def test_all_rows_of_a_life_add_up_to_what_the_client_sent(model: str) -> None:
    run = traffic(model)
    watching = last([run.lives[0]])
    shot = watching.snapshot()
    period = shot.periods["since start"]
    sent = [one for one in run.sent if one.life == 0]
    answered = [one for one in sent if one.hit >= 0]
    assert period.hit_tokens == sum(one.hit for one in answered)
    asked = sum(len(one.prompt) for one in answered)
    assert asked <= period.query_tokens <= sum(len(one.prompt) for one in sent)
    assert period.misses is not None
    assert sum(period.misses.values()) == period.query_tokens - period.hit_tokens
    log = of_life(run, 0)
    for cause in CAUSED_BY_EVENTS:
        assert period.misses.get(cause, 0) == log[cause], cause
    parts = log["other_salt"] - period.misses.get("other_salt", 0)  # events tell no part of a block
    assert 0 <= parts < sum(bool(one.salt) for one in answered) * block_of(watching)
    assert not period.misses.get("unknown") and not period.misses.get("computing") and not period.recomputed
    size = block_of(watching)
    single = watching.account.tokens["answers"]
    assert period.misses.get("tails", 0) <= len(sent) * (size - 1) + single
    assert period.misses.get("aborted", 0) <= period.query_tokens - asked


@pytest.mark.parametrize("model", MODELS)
def test_a_difference_counts_the_whole_prompts_that_have_it(model: str) -> None:
    """Time stamps at token 19, and long prompts of several chunks that share 19 other first words."""
    run = traffic(model)
    account = Account()
    for one in run.lives[0].received():
        account.add(one)
    account.settle()
    size = max(group.block_size for group in account.blocks[0].groups.values())
    rows = sorted(
        (row.times, row.new_tokens) for row in account.lists.divergences.values() if row.position == 19
    )
    long = [one for one in run.sent if one.kind == "long"]
    stamped = [one for one in run.sent if one.kind == "stamped" and one.life == 0]
    assert [times for times, _ in rows] == [len(long) - 1, len(stamped)]
    for (times, tokens), prompts in zip(rows, (long[1:], stamped), strict=True):
        whole = sum(len(one.prompt) // size * size for one in prompts)
        assert whole - times * size <= tokens <= whole


def sent_in(run: Traffic, life: int) -> tuple[int, int]:
    """Prompt tokens that a life answered, and those of them that hit."""
    answered = [one for one in run.sent if one.life == life and one.hit >= 0]
    return sum(len(one.prompt) for one in answered), sum(one.hit for one in answered)


@pytest.mark.parametrize("model", MODELS)
def test_after_a_restart_everything_shown_is_of_the_server_that_runs(model: str) -> None:
    run = traffic(model)
    watching = last(list(run.lives))
    shot = watching.snapshot()
    tokens, hits = sent_in(run, 1)
    period = shot.periods["since start"]
    assert (period.query_tokens, period.hit_tokens) == (tokens, hits)
    assert shot.restarts == 1 and len(watching.ended) == 1
    assert sum(row.hit_tokens for row in shot.prefixes) <= hits
    assert sum(row.visits for row in shot.prefixes) <= sum(one.life == 1 for one in run.sent)
    before = watching.ended[0].period
    assert before.hit_tokens == sent_in(run, 0)[1]
    assert sum((before.misses or {}).values()) == before.query_tokens - before.hit_tokens
    assert "all below is since then" in document(shot).headline


@pytest.mark.parametrize("model", MODELS)
def test_a_recording_over_a_restart_has_two_accounts(model: str, tmp_path: Path) -> None:
    run, sent = recorded_over_a_restart(model)
    server = sent.header.extra.server
    assert server is not None and server.restarts == 1 and server.resets == 1
    assert [part.hit_tokens for part in server.parts] == [sent_in(run, life)[1] for life in range(2)]
    assert server.hit_tokens == sum(part.hit_tokens for part in server.parts)
    assert server.query_tokens == sum(part.query_tokens for part in server.parts)
    assert sum(server.misses.values()) == server.query_tokens - server.hit_tokens
    assert server.parts[0].end_s <= server.parts[1].begin_s < server.parts[1].end_s
    assert (server.logged, server.agree) == (len(_answered(run)), len(_answered(run)))
    drawn = section(RunAnalysis(sent))
    assert drawn is not None and "restarted 1 time" in drawn.lead
    titles = " ".join(str(table) for table in drawn.tables)
    assert "before the restart" in titles and "after the restart" in titles
    # The first life's prompts say nothing of the second's: its causes are as if it had been recorded alone.
    alone = of_life(run, 0) + of_life(run, 1)
    causes = Counter(sent.header.extra.misses)
    causes["cold"] += causes.pop("diverged", 0)
    assert +causes == +alone
    path = tmp_path / "two.kvrun"
    write_run(sent, path)
    with (
        pytest.raises(UsageError, match="restarted") as refused,
        bench_of(read_run(path), trace=tmp_path / "log.jsonl", lab=SHARED),
    ):
        pass
    assert "since=" in refused.value.hint


def recorded_over_a_restart(model: str) -> tuple[Traffic, Run]:
    run = traffic(model)
    played = Played(list(run.lives))
    only = Watched(played, keep=[])  # type: ignore[arg-type]
    only.reader = played  # type: ignore[assignment]
    servers = Servers(Addresses([played.base]), lambda *_: only, False)
    servers._follow()
    servers.only.listens = True
    recording = Recording(servers, begun=run.lives[0].scrapes()[0].at)
    while not recording.lost:
        recording.look()
    recording.only.fresh = True
    rows = [
        Logged(
            f"{number}",
            one.prompt,
            one.answer,
            one.t0,
            one.t1,
            one.hit,
            one.salt,
            output_tokens=len(one.answer),
            line=number,
        )
        for number, one in enumerate(run.sent)
        if one.hit >= 0
    ]
    return run, run_of(recording, Path("log.jsonl"), rows, ["kvtune", "record"], on_the_list)
