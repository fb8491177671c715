"""A soak of one model: epochs of servers, rounds of trouble, what must hold after each -> Report.

An epoch is one pair of servers. The first records onto a disk that is full, the second speculates, the last, by far
the longest, is the one whose growth is looked at. Each ends with SIGTERM while requests are under way.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from bench.soak import judge, recorded
from bench.soak.judge import Census, Finding, Slope
from bench.soak.models import MODELS
from bench.soak.play import LAST_ROUND_S, Answers, Players, http
from bench.soak.servers import PROCESSES, SIDES, Kind, Server, servers
from bench.soak.trouble import SAMPLED, Ask, Round, trouble
from tests.lab.engine.serving import tokenizer_in

MOST_PARTED = 0.15
"""Share of greedy answers that may part for rounding. Two stock servers with tiny-qwen3next parted in 36 of 692."""
IDLE_S = 30.0
REMEMBERED = 2
"""Rounds before one that fails, which may be what it needs."""
FULL_DISK = "8k"
FATAL = re.compile(r"\((EngineCore|Worker)\b.*ERROR.*\b\w*Error: ")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Epoch:
    """`share`: of the soak's time."""

    share: float
    speculate: bool = False
    full_disk: bool = False


EPOCHS = (Epoch(0.1, full_disk=True), Epoch(0.2, speculate=True), Epoch(0.7))


class Failed(Exception):
    """Something does not hold. `kind`, `rounds`: the servers and the last rounds they went through; [] if all count.

    `report`: of the soak until then, where it was one.
    """

    report: Report | None = None

    def __init__(
        self, findings: Sequence[Finding], kind: Kind, rounds: Sequence[Round], servers: Sequence[Server]
    ) -> None:
        super().__init__("\n".join(f"{each.kind}: {each.text}" for each in findings))
        self.findings, self.kind, self.rounds, self.servers = (
            list(findings),
            kind,
            list(rounds),
            list(servers),
        )
        trace = kind.trace
        self.trace = trace.read_bytes() if trace is not None and trace.exists() else b""  # its disk may go


@dataclass(slots=True)
class Report:
    """What a soak went through. `slopes`: of the last epoch, by side and process and measure."""

    model: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    slopes: dict[str, Slope | None] = field(default_factory=dict)
    p99: dict[str, tuple[float, float, float] | None] = field(default_factory=dict)


async def soak(model: str, seed: int, minutes: float, folder: Path, say: Say, plant: str = "") -> Report:
    """Raises Failed at the first thing that does not hold."""
    report = Report(model, seed)
    try:
        await _epochs(report, minutes, folder, say, plant)
    except Failed as failed:
        failed.report = report
        raise
    return report


async def _epochs(report: Report, minutes: float, folder: Path, say: Say, plant: str) -> None:
    model, seed = report.model, report.seed
    tokenizer = tokenizer_in(folder / "tokenizer")
    number = 0
    for index, epoch in enumerate(EPOCHS):
        place = folder / f"epoch{index}"
        place.mkdir()
        with ExitStack() as stack:
            disk = stack.enter_context(full_disk()) if epoch.full_disk else None
            trace = (disk or place) / "trace.jsonl"
            speculate = epoch.speculate and MODELS[model].speculates
            kind = Kind(model, tokenizer, speculate, trace, plant)
            pair = stack.enter_context(servers(kind, place))
            say(f"epoch {index}: {'speculating, ' if speculate else ''}servers are up")
            async with http() as session:
                one = _Epoch(kind, pair, Players(session, seed), report, say)
                number = await one.run(number, monotonic() + 60.0 * minutes * epoch.share)
                await one.recording(on_full_disk=disk is not None)
                await one.end(number)
            number += 1
            if index == len(EPOCHS) - 1:
                one.growth()


async def replay(kind: Kind, seed: int, troubles: Sequence[Round], folder: Path) -> list[Finding]:
    """What a few rounds on fresh servers show; [] if nothing."""
    with servers(kind, folder) as pair:
        async with http() as session:
            one = _Epoch(kind, pair, Players(session, seed), Report(kind.model, seed), lambda line: None)
            try:
                await one.flush(-1)
                for each in troubles:
                    await one.round(each)
            except Failed as failed:
                return failed.findings
    return []


@contextmanager
def full_disk() -> Iterator[Path | None]:
    """A file system of FULL_DISK; None where this process may not mount one."""
    with tempfile.TemporaryDirectory(prefix="soak-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK}", "tmpfs", folder]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@dataclass(slots=True)
class _Epoch:
    """Rounds on one pair of servers: `servers` are SIDES."""

    kind: Kind
    servers: Sequence[Server]
    players: Players
    report: Report
    say: Say
    first: list[Sequence[Census]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    censuses: list[Sequence[Sequence[Census]]] = field(default_factory=list)
    gaps: list[list[list[float]]] = field(default_factory=list)
    answered: list[recorded.Lengths] = field(default_factory=list)
    stopped: list[recorded.Lengths] = field(default_factory=list)
    left: int = 0
    sent: int = 0
    played: list[Round] = field(default_factory=list)

    async def run(self, number: int, until: float) -> int:
        """Rounds from `number` on, at least two; the number of the next one."""
        await self.flush(-1)
        first = number
        while monotonic() < until or number < first + 2:
            await self.round(self.trouble(number))
            number += 1
        for side, each in zip(SIDES, self.servers, strict=True):
            preempted = await each.metric(self.players.session, "vllm:num_preemptions_total")
            self.report.counts[f"preemptions, {side}"] += int(preempted)
            hits = await each.metric(self.players.session, "vllm:prefix_cache_hits_total")
            self.report.counts[f"cached tokens, {side}"] += int(hits)
        return number

    def trouble(self, number: int) -> Round:
        """The seed's; none are sampled where vLLM speculates: on a CPU, 0.32's answers beside them are wrong."""
        made = trouble(self.report.seed, number)
        if not self.kind.speculate:
            return made
        asks = [ask if ask.special not in SAMPLED else replace(ask, special="") for ask in made.asks]
        return play_of(asks, made)

    async def round(self, round_: Round) -> None:
        began = monotonic()
        answers = await self.players.play(self.servers, round_)
        findings = self._alive() or await self._judged(round_, answers)
        if not findings:
            findings = await self.flush(round_.number)
        if findings:
            raise Failed(findings, self.kind, [*self.played, round_], self.servers)
        self.played = [*self.played, round_][-REMEMBERED:]
        self._count(round_, answers)
        ended = Counter(answer.ended for answer in answers[0].values())
        words = ", ".join(f"{count} {how}" for how, count in sorted(ended.items()))
        faults = " ".join(fault.kind for fault in round_.faults)
        self.say(
            f"round {round_.number} {round_.theme}: {words}; {faults or '-'}; {monotonic() - began:.1f} s"
        )

    async def flush(self, number: int) -> list[Finding]:
        """A request alone, which makes EngineCore let go of the ones before; then a census of all processes."""
        ask = Ask(9_999 if number < 0 else 10_000 * number + 9_999, 0.0, 0, 0, 8, 2)
        alone = Round(number, "mixed", (ask,))
        for answers in await self.players.play(self.servers, alone):
            if found := judge.complete(ask, answers[ask.number]):
                return found
        self.answered.append((8, 2))
        self.sent += 1
        end = monotonic() + IDLE_S
        while True:
            censuses: list[Sequence[Census]] = [
                await each.census(self.players.session) for each in self.servers
            ]
            left = judge.left_behind(*censuses[0])
            if not left or monotonic() > end:
                break
            await asyncio.sleep(0.5)
        if len(self.first) < len(censuses) or len(self.requests) < 2:
            self.first = censuses  # the first rounds still fill pools, caches and threads
        self.requests.append(self.sent)
        self.censuses.append(censuses)
        for process, first, now in zip(PROCESSES, self.first[0], censuses[0], strict=True):
            left += judge.more_than_at_first(process, first, now)
        return left

    def _alive(self) -> list[Finding]:
        """One finding where a server has gone, with the first error of the process that ended it."""
        for each in self.servers:
            if not each.up:
                log = each.log.read_text(errors="replace").splitlines()
                why = next((line for line in log if FATAL.search(line)), "\n".join(log[-20:]))
                return [Finding("died", f"the server with {each.core} has ended: {why}")]
        return []

    async def _judged(self, round_: Round, answers: Sequence[Answers]) -> list[Finding]:
        core, stock = answers
        findings: list[Finding] = []
        for ask in round_.asks:
            mine, other = core[ask.number], stock[ask.number]
            findings += judge.complete(ask, mine) + judge.differs(ask, mine, other)
            if ask.greedy and (parted := judge.parted(ask, mine, other)) is not None:
                margin = await self.players.margin(self.servers[1], ask, parted)
                if margin > MODELS[self.kind.model].tie:
                    text = f"token {len(parted.common)} is {parted.core}, stock's {parted.stock}, by {margin:.3g} nats"
                    findings.append(Finding("wrong token", f"request {ask.number}: {text}", (ask.number,)))
                self.report.counts["ties"] += 1
        if any(
            answer.status == 500 or answer.ended == "broken" for side in answers for answer in side.values()
        ):
            await asyncio.sleep(3.0)  # if EngineCore has died, the API server is about to
            findings = self._alive() + findings
        return findings

    def _count(self, round_: Round, answers: Sequence[Answers]) -> None:
        counts = self.report.counts
        for ask in round_.asks:
            answer = answers[0][ask.number]
            counts["requests"] += 1
            counts["greedy"] += ask.greedy
            counts[answer.ended] += 1
            counts["tokens"] += sum(map(len, answer.tokens))
            if answer.ended == "answered":
                to = self.stopped if ask.special == "stop" else self.answered
                to += [(ask.prompt_tokens, len(each)) for each in answer.tokens]
            elif answer.ended == "left":
                self.left += 3 if ask.special == "choices" else 1
        counts["rounds"] += 1
        for fault in round_.faults:
            counts[f"fault {fault.kind}"] += 1
        self.sent += len(round_.asks)
        if not any(fault.kind == "pause" for fault in round_.faults):
            self.gaps.append([[gap for each in side.values() for gap in each.gaps] for side in answers])

    async def recording(self, on_full_disk: bool) -> None:
        """Compare the trace of an idle server with what its clients saw."""
        trace = self.kind.trace
        assert trace is not None
        try:
            lines = recorded.read(trace)
        except (ValueError, KeyError, TypeError) as error:
            lines, text = [], f"the trace cannot be read: {error}"
        else:
            text = "" if on_full_disk else recorded.wrong(lines, self.answered, self.stopped, self.left)
        session, core = self.players.session, self.servers[0]
        dropped = await core.metric(session, "kvtune_trace_dropped_total")
        written = await core.metric(session, "kvtune_trace_written_total")
        self.report.counts["recorded"] += len(lines)
        self.report.counts["not recorded: the disk was full"] += int(dropped)
        if not text and int(written) != len(lines):
            text = f"/metrics says {written:.0f} requests were written, {len(lines)} are in the file"
        if not text and (dropped > 0) != on_full_disk:
            text = f"{dropped:.0f} requests were not recorded"
        if text:
            raise Failed([Finding("recording", text)], self.kind, [], self.servers)

    async def end(self, number: int) -> None:
        """SIGTERM in the middle of a round."""
        last = self.trouble(number)
        last = Round(number, last.theme, last.asks)
        self.players.patience_s = LAST_ROUND_S
        playing = asyncio.create_task(self.players.play(self.servers, last))
        await asyncio.sleep(2.0)
        wrong = await asyncio.gather(*(asyncio.to_thread(each.stop) for each in self.servers))
        core = (await playing)[0]
        findings = [Finding("stop", text) for text in wrong if text.startswith("kvtune")]
        whole = [ask for ask in last.asks if core[ask.number].ended == "answered"]
        findings += [each for ask in whole for each in judge.complete(ask, core[ask.number], stopped=True)]
        try:
            recorded.read(self.kind.trace or Path())
        except (ValueError, KeyError, TypeError) as error:
            findings.append(Finding("recording", f"after SIGTERM the trace cannot be read: {error}"))
        if findings:
            raise Failed(findings, self.kind, [*self.played, last], self.servers)
        self.report.counts["requests"] += len(last.asks)
        self.report.counts["fault SIGTERM"] += 1
        self.report.counts["cut off by SIGTERM"] += len(last.asks) - len(whole)

    def growth(self) -> None:
        """Slopes, and the gaps between tokens at the end beside those at the start."""
        findings = []
        for side, name in enumerate(SIDES):
            for at, process in enumerate(PROCESSES):
                began, ended = (self.censuses[i][side][at]["resident"] >> 20 for i in (0, -1))
                self.report.counts[f"own MiB at the end, {name}, {process}"] = ended
                self.report.counts[f"own MiB at first, {name}, {process}"] = began
                for measure, size in (("resident", 1), ("allocations", 64)):
                    values = [size * each[side][at][measure] for each in self.censuses]
                    found = judge.slope(self.requests, values)
                    self.report.slopes[f"{name}, {process}, {measure}"] = found
                    if name == "kvtune" and found is not None and found.grows:
                        text = f"{process}: {measure} grow by {found.value:.0f} bytes a request"
                        findings.append(Finding("growth", f"{text} ({found.low:.0f} to {found.high:.0f})"))
            self.report.p99[name] = judge.p99_ratio([each[side] for each in self.gaps])
        parted, greedy = self.report.counts["ties"], self.report.counts["greedy"]
        if parted > MOST_PARTED * greedy:
            findings.append(Finding("wrong token", f"{parted} of {greedy} greedy answers part from stock's"))
        ours, theirs = self.report.p99["kvtune"], self.report.p99["stock"]
        if ours and theirs and ours[1] > max(1.0, theirs[2]):
            text = (
                f"p99 between tokens {ours[0]:.2f} times as long at the end ({ours[1]:.2f} to {ours[2]:.2f})"
            )
            findings.append(Finding("slower", f"{text}, stock's {theirs[0]:.2f} times"))
        if findings:
            raise Failed(findings, self.kind, [], self.servers)


def play_of(asks: Sequence[Ask], of: Round) -> Round:
    """The round with only these requests."""
    return Round(of.number, of.theme, tuple(asks), of.faults)
