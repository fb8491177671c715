"""A server that is slower than the nominal speed, of which only its requests' times are known."""

from __future__ import annotations

import json
import random
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtune.answers.explain.speed import Times, like_the_server, speed_words
from kvtune.data.run.extras import Extras, ServerAccount
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run, empty_table
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.setup.setup import Load, Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload
from tests.choice import first_of
from tests.simulator import on
from tests.simulator import run as kvtune

pytestmark = pytest.mark.vllm
FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "400", "--max-model-len", "2048"]
SLOW = StepCost(step_us=21_000.0, prefill_token_us=110.0, decode_us=400.0, kv_token_us=0.001)
"""Another relation of prefill and decode than the nominal cost's, too."""


def sent(stamped: int = 0, seconds: float = 14.0) -> list[dict[str, Any]]:
    """Conversations and documents at their own times: the pool holds a few. `stamped` conversations: a stamp on top."""
    draw = random.Random(3)
    words = lambda count: [draw.randrange(10, 4000) for _ in range(count)]  # noqa: E731
    system, documents = words(400), [words(300) for _ in range(6)]
    rows: list[dict[str, Any]] = []
    for session in range(8):
        at, text = draw.uniform(0, seconds / 2), list[int]()
        for turn in range(4):
            text = [*text, *words(220)]
            prompt = [*(words(6) if session < stamped else []), *system, *text]
            rows.append({"name": f"s{session}.{turn}", "prompt": prompt, "max_tokens": 12, "t0": at})
            at += seconds / 9
    for number in range(30):
        chosen = sorted(draw.sample(range(6), 3))
        prompt = [*system[:64], *(token for n in chosen for token in documents[n]), *words(20)]
        rows.append({"name": f"d{number}", "prompt": prompt, "max_tokens": 8, "t0": draw.uniform(0, seconds)})
    return sorted(rows, key=lambda row: float(row["t0"]))


class Served:
    """The requests of `sent`, as an engine with this cost answered them."""

    def __init__(
        self,
        simulators: Simulators,
        folder: Path,
        *,
        blocks: int = 400,
        stamped: int = 0,
        cost: StepCost = SLOW,
    ) -> None:
        self.simulators = simulators
        self.rows = [row | {"t0": 1e9 + row["t0"]} for row in sent(stamped)]
        self.work: Workload = build(f"requests:path={self.log(folder, times=False, hits=False)}")
        self.setup = Setup(
            model="tiny-gemma3",
            load=Load.of(self.work),
            core="stock",
            engine_args=[*FLAGS[:3], str(blocks), *FLAGS[4:]],
        ).sized()
        self.run = self.replay(self.setup.replayed(cost=cost))

    def log(self, folder: Path, *, times: bool = True, hits: bool = True) -> Path:
        """Write the log, with the times and hits of the answers or without."""
        rows = self.rows
        if times:
            table = self.run.table("requests")
            rows = [
                row | {"t1": rows[0]["t0"] + end}
                for row, end in zip(rows, table["finished_s"].tolist(), strict=True)
            ]
        if hits:
            rows = [
                row | {"hit": hit}
                for row, hit in zip(rows, self.run.table("requests")["hit_tokens"].tolist(), strict=True)
            ]
        file = folder / "log.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def replay(self, setup: Setup) -> Run:
        ((_, run),) = self.simulators.run(on(self.work, [setup]))
        assert isinstance(run, Run)
        return run

    @cached_property
    def nominal(self) -> Run:
        return self.replay(self.setup)


@pytest.fixture(scope="module")
def served(simulators: Simulators, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(simulators, tmp_path_factory.mktemp("served"))


def hits(run: Run) -> int:
    return int(run.table("requests")["hit_tokens"].sum())


@pytest.mark.parametrize("known", first_of(["answers", "first tokens", "the server's sums"]))
def test_a_replay_takes_as_long_as_the_server_and_hits_as_much(served: Served, known: str) -> None:
    table = dict(served.run.table("requests"))
    first_s, whole_s = (table[end] - table["sent_s"] for end in ("first_token_s", "finished_s"))
    server = None
    if known != "first tokens":
        table["first_token_s"] = np.full(len(first_s), np.nan)
    if known == "the server's sums":
        sums = {"first_token_s": first_s.sum(), "gap_s": (whole_s - first_s).sum()}
        server = {
            "t_s": np.array([0.0, 20.0]),
            **{name: np.array([5.0, 5.0 + end]) for name, end in sums.items()},
        }
    times = Times.of(table, server)
    settings = like_the_server(served.setup, times, served.replay, "")
    assert settings.simulated.cost.fitted and settings.simulated.cost.clock == "requests"
    assert settings.simulated.cost.unexplained_share < 0.05
    ran, nominal, fitted = (hits(run) for run in (served.run, served.nominal, served.replay(settings)))
    whole = int(table["prompt_tokens"].sum())
    assert abs(nominal - ran) > 0.02 * whole  # a nominal step of 8 ms is another server
    assert abs(fitted - ran) < min(0.015 * whole, abs(nominal - ran) / 2)
    if known != "answers":
        assert settings.simulated.cost.step_us / settings.simulated.cost.prefill_token_us == pytest.approx(
            SLOW.step_us / SLOW.prefill_token_us, rel=0.5
        )


def test_requests_without_times_keep_the_nominal_cost(served: Served) -> None:
    table = served.run.table("requests")
    times = Times.of({**table, "finished_s": np.full(len(table["id"]), np.nan)})
    settings = like_the_server(served.setup, times, served.replay, "")
    assert settings.simulated.cost == NOMINAL
    assert "at the nominal speed of a large accelerator, 8 ms a step" in speed_words(
        settings.simulated.cost, times
    )


WORDS = ["--model", "tiny-gemma3", "--core", "stock", "--tries", "3"]


@pytest.mark.full
def test_the_gap_to_the_logs_own_hits_comes_first_and_no_gain_below_it_is_listed(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = str(served.log(tmp_path)), tmp_path / "r.kvrun"
    assert kvtune(["explain-log", log, *WORDS[:-1], "1", "-o", str(out), "--", *FLAGS]) == 0
    said = capsys.readouterr().out
    whole = served.work.prompt_tokens
    assert f"Hits: log {100 * hits(served.run) / whole:.1f} %, its replay " in said
    assert "at the server's speed, fitted to the times of 62 requests" in " ".join(said.split())
    assert "each replayed" in said or "What was replayed" in said
    stored = read_run(out).header
    assert stored.extra.step_cost["fitted"] is True and "a server's requests" in stored.valid.why
    # The same log, with flags that the server did not have: the gap is larger than what pools of 1.5x bring.
    other = ["--block-size", "32", "--num-gpu-blocks-override", "1600", "--max-model-len", "2048"]
    log = str(served.log(tmp_path, times=False))
    assert kvtune(["explain-log", log, *WORDS, "--", *other]) == 0
    said = capsys.readouterr().out
    gap = re.search(r"log [\d.]+ %, its replay [\d.]+ %: gap ([\d.]+) points", said)
    differ = re.search(r"The replay differs from the log in (\d+) ", said)
    assert gap is not None and float(gap[1]) > 5
    assert differ is not None and int(differ[1]) > 10
    assert all(float(points) > 5 for points in re.findall(r"([\d.]+) points of hits", said))


@pytest.mark.full
def test_a_log_without_hits_is_not_called_checked(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(served.log(tmp_path, times=False, hits=False))
    assert kvtune(["explain-log", log, *WORDS[:4], "--tries", "0", "--", *FLAGS]) == 0
    said = capsys.readouterr().out
    assert "The log has no hits of each request, so the replay could not be checked against it" in said
    assert "Checked: " not in said


@pytest.mark.full
def test_a_replay_of_the_other_core_is_not_compared_with_the_log(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny-gemma3", "--tries", "0"]
    assert kvtune(["explain-log", str(served.log(tmp_path, times=False)), *words, "--", *FLAGS]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "not compared with the hits that the log's server reported" in said
        and "could not be checked" not in said
    )
    assert "add --core stock" in said and "gap" not in said


@pytest.mark.full
def test_of_a_recorded_server_the_gap_is_told_and_the_text_is_a_remedy(
    simulators: Simulators, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its times are not known: no speed is fitted to them."""
    served, file = (
        Served(simulators, tmp_path, blocks=1600, stamped=5, cost=NOMINAL),
        tmp_path / "server.kvrun",
    )
    header = msgspec.structs.replace(served.run.header, source="server", extra=Extras(server=ServerAccount()))
    table = served.run.table("requests")
    table["hit_tokens"][:3] = (
        0  # the server hit nothing in requests that hit nothing, and once less than the replay
    )
    table["first_token_s"][:] = table["finished_s"][:] = np.nan
    write_run(Run(header, {"requests": table, "server": empty_table("server")}), file)
    words = ["--trace", str(served.log(tmp_path, times=False)), "--model", "tiny-gemma3", "--tries", "2"]
    assert kvtune(["explain", str(file), *words, "--save"]) == 0
    said = capsys.readouterr().out
    whole = served.work.prompt_tokens
    assert f"Hits: run {100 * int(table['hit_tokens'].sum()) / whole:.1f} %, its replay " in said
    assert "mend the prompts, other text" in said
    stored = read_run(file).header.extra
    assert stored.texts is not None and stored.texts.mended_query_tokens == whole
    assert stored.misses["diverged"] > 0.05 * whole and stored.replayed is not None
