"""`kvtune watch --prometheus URL --job NAME`: the last hour of a job's instances, from a fake Prometheus.

It answers `query_range` in Prometheus' format, with what vLLM's series would have been: no Prometheus runs here.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtune.servers.watch.client import Client
from kvtune.servers.watch.prometheus import Hour, instance_of, live, read_hour
from kvtune.servers.watch.regime import Limits
from tests.servers.watch.played import Answers, http
from tests.servers.watch.test_regime import text
from tests.simulator import run

Told = Callable[[float], str]
"""An instance's /metrics at a number of seconds since the hour began; empty: it does not answer."""


def seats(at: float) -> str:
    return text(running=8, waiting=2, steps=int(20 * at), answered=int(at), ended_s=at, queries=int(100 * at))


def idle_and_then_pool(at: float) -> str:
    if at < 1800:
        return text(queries=5)
    work = at - 1800
    return text(
        running=4,
        waiting=2,
        use=0.99,
        preempted=int(work),
        steps=int(work),
        answered=int(work),
        ended_s=work,
        queries=1000,
        hits=400,
    )


def down_then_started_anew(at: float) -> str:
    since = int(at if at <= 600 else at - 1200)
    return "" if 600 < at < 1200 else text(steps=since, queries=since)


class Prometheus(dict[str, Any]):
    """What the fake answers: in place of `Answers.paths`, which knows whole paths only."""

    def __init__(self, job: str, instances: Mapping[str, Told]) -> None:
        super().__init__()
        self.job, self.instances = job, instances
        self.queries: list[str] = []

    def get(self, path: str, default: Any = None) -> Any:
        parts = urlsplit(path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path != "/api/v1/query_range" or not {"query", "start", "end", "step"} <= set(asked):
            return default
        query, start, end, step = asked["query"], *(float(asked[k]) for k in ("start", "end", "step"))
        self.queries.append(query)
        if f"job={json.dumps(self.job)}" not in query:
            return 200, matrix([])
        if query.startswith("group by (instance)"):
            alive = ({"metric": {"instance": name}, "values": [[end, "1"]]} for name in self.instances)
            return 200, matrix(list(alive))
        (name,) = re.findall(r'instance="([^"]*)"', query)
        wanted = re.compile(re.findall(r'__name__=~"([^"]*)"', query)[0].replace("\\\\", "\\"))
        series: dict[str, dict[str, Any]] = {}
        for number in range(round((end - start) / step) + 1):
            for family in text_string_to_metric_families(self.instances[name](number * step)):
                for sample in family.samples:
                    if wanted.fullmatch(sample.name):
                        labels = {"__name__": sample.name, "job": self.job, "instance": name, **sample.labels}
                        of = series.setdefault(json.dumps(labels), {"metric": labels, "values": []})
                        of["values"].append([start + number * step, str(sample.value)])
        return 200, matrix(list(series.values()))


def matrix(series: list[dict[str, Any]]) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}})


def asked(capsys: pytest.CaptureFixture[str], prometheus: Prometheus, *words: str) -> tuple[int, str, str]:
    answers = Answers("")
    answers.paths = prometheus
    with http(answers) as base:
        code = run(["watch", "--prometheus", base, *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_each_instance_of_a_job_has_its_hour(capsys: pytest.CaptureFixture[str]) -> None:
    prometheus = Prometheus("vllm", {"a:8000": seats, "b:8000": idle_and_then_pool})
    given = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512")
    code, out, err = asked(capsys, prometheus, "--json", *given)
    assert code == 0, err
    first, second = json.loads(out)["instances"]
    assert (first["instance"], set(first["seconds"])) == ("a:8000", {"seat-bound"})
    assert first["longest"]["regime"] == "seat-bound" and first["longest"]["looks"] == 20
    assert first["query_tokens"] == 360_000
    assert set(second["seconds"]) == {"idle", "pool-bound"}
    assert (second["preemptions"], second["hit_tokens"]) == (1800, 400)
    assert [part["regime"] for part in second["slices"]] == ["idle"] * 6 + ["pool-bound"] * 6
    assert len(prometheus.queries) == 3
    code, out, err = asked(capsys, prometheus, *given)
    words = " ".join(out.split())
    assert code == 0 and "job vllm, the last hour, 2 instances" in words and "57.0 min" in words
    assert "a:8000: what bounded it, by 20 looks in 285.0 s" in words and all(
        len(s) <= 120 for s in out.split("\n")
    )
    assert out.splitlines().count("  kvtune watch http://a:8000 http://b:8000") == 1


def test_only_addresses_are_named_in_the_command_that_watches_them() -> None:
    def of(*names: str) -> tuple[str, ...]:
        instances = [instance_of(name, [], 0.0, Limits(0, 0)) for name in names]
        return live(Hour("http://prometheus:9090", "vllm", 0.0, instances))

    assert of("a:8000", "[fd00::1]:8000") == ("kvtune watch http://a:8000 'http://[fd00::1]:8000'",)
    assert of("a:8000", "pod/b") == of("--header=x") == of("a:8000; rm -r x") == ()
    assert of(*(f"a{i}:8000" for i in range(17))) == ()


def test_a_gap_and_a_restart_are_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = asked(capsys, Prometheus("vllm", {"a:1": down_then_started_anew}), "--json")
    assert code == 0, err
    (only,) = json.loads(out)["instances"]
    regimes = [part["regime"] for part in only["slices"]]
    assert (
        regimes[2:4] == [None, None]
        and regimes[0] == regimes[-1] == "cannot tell"
        and only["query_tokens"] == 3000
    )


def test_a_job_of_any_name_is_asked_for_and_an_unknown_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = 'my "job"\\'
    assert asked(capsys, Prometheus(odd, {"a:1": seats}), "--json", "--job", odd)[0] == 0
    code, _, err = asked(capsys, Prometheus("other", {"a:1": seats}))
    assert code == 1 and "no vllm:num_requests_running of job 'vllm'" in err and "--job NAME" in err


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (400, '{"status": "error", "error": "parse error"}', "answers 400"),
        (200, "[]", "JSON of another kind"),
        (200, "<html>", "no JSON"),
        (200, "[" * 100_000, "JSON"),
        (200, '{"data": {"result": [{"metric": {"instance": "x"}, "values": [[1, 2, 3]]}]}}', "another kind"),
        (
            200,
            '{"data": {"result": [{"metric": {"__name__": "vllm:x", "instance": "x"}, "values": [[1, "NaN"]]}]}}',
            "vllm:x is nan",
        ),
        (
            200,
            '{"data": {"result": [{"metric": {"__name__": "vllm:x", "instance": "x"}, "values": [[1, "?"]]}]}}',
            "no number",
        ),
        (
            200,
            '{"data": {"result": [{"metric": {"__name__": "vllm:x_bucket", "instance": "x"}, "values": [[1, "1"]]}]}}',
            "le",
        ),
    ],
)
def test_a_bad_answer_is_one_line(
    status: int, body: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bad(Prometheus):
        def get(self, path: str, default: Any = None) -> Any:
            return status, body

    code, out, err = asked(capsys, Bad("vllm", {}))
    assert (code, out) == (1, "") and says in err and len(err.splitlines()) == 2


@pytest.mark.parametrize("words", [["--once"], ["--seconds", "5", "--json"], ["--events", "tcp://h:1"]])
def test_what_belongs_to_a_running_server_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["watch", "--prometheus", "http://127.0.0.1:9", *words]) == 2
    assert words[0] in capsys.readouterr().err
    assert run(["watch", "http://127.0.0.1:9", "--job", "x"]) == 2


def test_the_hour_is_asked_for_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.time()
    answers = json.loads(asked(capsys, Prometheus("vllm", {"a:1": seats}), "--json")[1])
    assert begun - 1 <= answers["at"] <= time.time() and len(answers["instances"][0]["slices"]) == 12


def test_instances_are_asked_at_once_and_one_that_is_wrong_is_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second question waits for the first's answer to be asked, too: one after another they would never end."""
    asked_at_once = threading.Barrier(2, timeout=20.0)

    def waits(at: float) -> str:
        if at == 0:
            asked_at_once.wait()
        return seats(at)

    told = {"a:1": waits, "b:1": waits, "c:1": lambda at: seats(at) + "vllm:num_preemptions_total NaN\n"}
    code, out, err = asked(capsys, Prometheus("vllm", told), "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert [each["instance"] for each in answer["instances"]][:2] == ["a:1", "b:1"]
    (note,) = answer["notes"]
    assert "the first, c:1: " in note and "no server has" in note


class Silent(httpx.AsyncBaseTransport):
    """A Prometheus that answers for one instance at once, and for twenty never."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.url.query.decode())["query"][0]
        names = ["a:1", *(f"s{n}:1" for n in range(20))] if query.startswith("group") else ["a:1"]
        if 'instance="s' in query:
            await asyncio.sleep(1e6)
        rows = [
            {"metric": {"__name__": "vllm:num_requests_running", "instance": name}, "values": []}
            for name in names
        ]
        return httpx.Response(200, stream=httpx.ByteStream(matrix(rows).encode()))


def test_all_questions_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.prometheus.WHOLE_S", 1.0)
    with closing(Client("http://p:9090", transport=Silent())) as client:
        hour = read_hour(client, "vllm", time.time(), Limits(0, 0))
    assert [each.instance for each in hour.instances] == ["a:1"]
    assert any("of 20 instances nothing is known; the first, s0:1" in note for note in hour.notes)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[float(n), "1"] for n in range(501)], "JSON of another kind"),
        ([[1.0, "1" * 101]], "JSON of another kind"),
    ],
)
def test_more_samples_than_an_hour_has_are_not_read(
    capsys: pytest.CaptureFixture[str], values: list[Any], says: str
) -> None:
    class Long(Prometheus):
        def get(self, path: str, default: Any = None) -> Any:
            answer = super().get(path, default)
            of_one = "instance=" in parse_qs(urlsplit(path).query)["query"][0]
            return (200, matrix([{"metric": {"__name__": "vllm:x"}, "values": values}])) if of_one else answer

    code, _, err = asked(capsys, Long("vllm", {"a:1": seats}))
    assert code == 1 and says in err
