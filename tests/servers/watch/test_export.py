"""`kvtune watch URL --metrics PORT`: what is scraped adds up, never falls, outlives the server; board and alerts."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.export import Exporter, alerts, board
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.watched import Watched
from tests.servers.watch.fleets import drawn, fleet, play
from tests.servers.watch.played import Answers, alone, counters, http, published, until
from tests.servers.watch.recordings import recorded
from tests.simulator import run

Series = dict[tuple[str, str], float]


class Scraped:
    """An exporter that runs in a thread."""

    def __init__(self, base: str, settle: float = 10.0) -> None:
        self.said: list[str] = []
        self.stop = threading.Event()
        exporter = Exporter(lambda: alone(base, settle=settle), self.said.append, 0.02)
        self.thread = threading.Thread(target=exporter.run, args=(0,), kwargs={"stop": self.stop})

    def __enter__(self) -> Scraped:
        self.thread.start()
        until(lambda: bool(self.said))
        self.url = self.said[0].removeprefix("metrics: ")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def series(self) -> Series:
        """Each scrape is checked: causes add up to what was not hit."""
        return scraped(self.url)


def text_of(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def scraped(url: str) -> Series:
    found = {
        (sample.name, sample.labels.get("cause", "")): sample.value
        for family in text_string_to_metric_families(text_of(url))
        for sample in family.samples
    }
    missed = sum(value for (name, _), value in found.items() if name == "kvtune_missed_tokens_total")
    assert missed == found["kvtune_prompt_tokens_total", ""] - found["kvtune_hit_tokens_total", ""]
    return found


def test_scrapes_of_a_played_server_add_up_and_end_at_what_it_counted() -> None:
    publisher, answers = published(counters(0, 0))
    payloads = recorded("full_attention").payloads
    with contextlib.closing(publisher), http(answers) as base, Scraped(base, settle=0.6) as exporter:
        until(lambda: exporter.series()["kvtune_server_up", ""] == 1)
        before: Series = {}
        for part in (1, 2, 3):
            publisher.publish(payloads[(part - 1) * len(payloads) // 3 : part * len(payloads) // 3])
            done = 26605 * part // 3, 7232 * part // 3
            answers.paths["/metrics"] = (200, counters(*done, preempted=part, done=17 * part))
            seen: Series = {}
            while seen.get(("kvtune_prompt_tokens_total", ""), 0) < done[0]:
                time.sleep(0.02)
                seen = exporter.series()
                falls = {
                    key for key, value in before.items() if key[0].endswith("_total") and seen[key] < value
                }
                assert not falls
                before = seen
    assert seen["kvtune_hit_tokens_total", ""] == 7232 and seen["kvtune_preemptions_total", ""] == 3
    assert seen["kvtune_missed_tokens_total", "cold"] > 10_000
    assert seen["kvtune_missed_tokens_total", "evicted"] > 0
    assert seen["kvtune_evicted_blocks_total", ""] > 0 and seen["kvtune_cached_blocks", ""] > 0
    assert seen["kvtune_events_complete", ""] == 1 and seen["kvtune_pool_use_ratio", ""] == 0.25
    assert (seen["kvtune_running_requests", ""], seen["kvtune_waiting_requests", ""]) == (1, 0)
    assert ("kvtune_evicted_age_seconds", "") not in seen  # the recording is old: nothing in the last 10 s


def test_a_server_that_is_away_is_down_and_comes_back() -> None:
    publisher, answers = published(counters(0, 0))
    ready = answers.paths.pop("/metrics")
    with contextlib.closing(publisher), http(answers) as base, Scraped(base, settle=0.0) as exporter:
        until(lambda: len(exporter.said) == 2)
        assert exporter.said[1].endswith("asking again")
        seen = exporter.series()
        assert seen["kvtune_server_up", ""] == 0 and ("kvtune_running_requests", "") not in seen
        answers.paths["/metrics"] = ready
        until(lambda: exporter.series()["kvtune_server_up", ""] == 1)
        answers.paths["/metrics"] = (200, counters(500, 100))
        until(lambda: exporter.series()["kvtune_prompt_tokens_total", ""] == 500)
        answers.paths["/metrics"] = (503, "busy")
        until(lambda: exporter.series()["kvtune_server_up", ""] == 0)
        assert exporter.series()["kvtune_prompt_tokens_total", ""] == 500
        answers.paths["/metrics"] = (200, counters(50, 10, started=100.0))
        until(lambda: exporter.series()["kvtune_prompt_tokens_total", ""] == 550)
    assert [line.endswith("answers") for line in exporter.said] == [False, False, True, False, True]


def test_every_metric_has_help_and_without_events_all_misses_are_unknown() -> None:
    answers = Answers(counters(100, 40))
    with http(answers) as base, Scraped(base) as exporter:
        until(lambda: exporter.series()["kvtune_server_up", ""] == 1)
        text = text_of(exporter.url)
        assert exporter.series()["kvtune_events_complete", ""] == 0
        answers.paths["/metrics"] = (200, counters(300, 90))
        until(lambda: exporter.series()["kvtune_missed_tokens_total", "unknown"] == 150)
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type in ("counter", "gauge") for family in families)
    assert not [family.name for family in families if not family.name.startswith("kvtune_")]


def test_the_command_says_one_line_serves_and_ends_with_sigterm() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with http(Answers(counters(100, 40))) as base:
        command = [sys.executable, "-m", "kvtune", "watch", base, "--metrics", str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None and child.stdout is not None
            url = f"http://127.0.0.1:{port}/metrics"
            assert child.stderr.readline() == f"metrics: {url}\n"
            until(lambda: scraped(url)["kvtune_server_up", ""] == 1)
            child.send_signal(signal.SIGTERM)
            assert child.wait() in (130, 143)
            assert child.stdout.read() == "" and "Traceback" not in child.stderr.read()


def test_what_cannot_be_served_ends_in_one_line_and_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(("watch", "http://127.0.0.1:9", "--metrics", port)) == 1
        assert "cannot listen at 127.0.0.1" in capsys.readouterr().err
    assert run(("watch", "http://127.0.0.1:9", "--metrics", port, "--once")) == 2
    assert "--once is not read with --metrics" in capsys.readouterr().err
    assert run(("watch", "--metrics", port)) == 2
    assert "needs the URL" in capsys.readouterr().err
    assert run(("watch", "ftp://host", "--metrics", port)) == 2
    assert "is not the address of a server" in capsys.readouterr().err


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(alerts())["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """Of every panel, with what Grafana puts in place of its variables."""
    found = [target["expr"] for panel in json.loads(board())["panels"] for target in panel.get("targets", ())]
    for name, value in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$kvtune", ".*"), ("$model", ".*")):
        found = [query.replace(name, value) for query in found]
    return found


@contextlib.contextmanager
def exported(urls: list[str]) -> Iterator[tuple[Exporter, CollectorRegistry]]:
    """The metrics of a fleet, which was looked at twice."""
    exporter = Exporter(
        lambda: Servers(Addresses(urls), lambda url, named, others: Watched(Server(url), named, others)),
        print,
    )
    with contextlib.closing(exporter):
        exporter.look()
        exporter.look()
        registry = CollectorRegistry()
        registry.register(exporter)
        yield exporter, registry


def test_of_a_fleet_each_servers_counts_have_its_name() -> None:
    made = drawn(7, lambda number, _: number % 3)
    with fleet(made) as (playing, urls):
        play(made, playing)
        with exported(urls) as (exporter, registry):
            text = generate_latest(registry).decode()
            playing[2].answers.paths["/metrics"] = (500, "")
            exporter.look()
            assert f'kvtune_server_up{{server="{urls[2]}"}} 0.0' in generate_latest(registry).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    truth = made.truth()
    assert found["kvtune_fleet_as_routed_tokens_total",] == truth.routed
    assert truth.routed < found["kvtune_fleet_best_replica_tokens_total",] <= truth.best
    for place, url in enumerate(urls):
        asked, hit, _ = made.asked(place)
        causes = sum(
            value for name, value in found.items() if name[0] == "kvtune_missed_tokens_total" and url in name
        )
        assert found["kvtune_hit_tokens_total", url] == hit
        assert found["kvtune_prompt_tokens_total", url] == hit + causes <= asked
        assert found["kvtune_other_replica_tokens_total", url] > 100


def test_board_and_alerts_are_printed_and_name_only_series_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(("watch", "--board")) == 0
    assert capsys.readouterr().out == board()
    assert run(("watch", "--alerts")) == 0
    assert capsys.readouterr().out == alerts()
    with (
        http(Answers(counters(100, 40))) as base,
        http(Answers(counters(50, 10))) as other,
        Scraped(base) as exporter,
        exported([base, other]) as (_, registry),
    ):
        ours = text_of(exporter.url) + generate_latest(registry).decode()
    theirs = recorded("full_attention").metrics
    later = {"kvtune_running_requests", "kvtune_waiting_requests", "kvtune_pool_use_ratio"}
    later |= {f"vllm:spec_decode_num_{each}_tokens_total" for each in ("accepted", "draft")}
    later |= {"kvtune_cached_blocks", "kvtune_evicted_age_seconds", "kvtune_events_complete"}
    for query in [*queries(), *(rule["expr"] for rule in rules())]:
        assert "$" not in query
        for name in re.findall(r"(?:kvtune_|vllm:)\w+", query):
            assert name in later or f"\n{name}{{" in ours + theirs or f"\n{name} " in ours + theirs, name
    ids = [panel["id"] for panel in json.loads(board())["panels"]]
    assert len(ids) == len(set(ids))


@contextlib.contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[str]:
    """A real Prometheus that scrapes these addresses every second; its own address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "alerts.yml").write_text(alerts())
    jobs = [{"job_name": name, "static_configs": [{"targets": [at]}]} for name, at in targets.items()]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["alerts.yml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert child.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                return "Ready" in text_of(f"http://{address}/-/ready")
            time.sleep(0.1)
            return False

        until(ready)
        yield f"http://{address}"
    finally:
        child.terminate()
        child.wait()


def asked(base: str, query: str) -> list[Any]:
    answer = json.loads(text_of(f"{base}/api/v1/query?{urlencode({'query': query})}"))
    assert answer["status"] == "success", query
    result = answer["data"]["result"]
    assert isinstance(result, list)
    return result


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs the program `prometheus`")
@pytest.mark.skipif(not shutil.which("promtool"), reason="needs the program `promtool`")
def test_a_real_prometheus_answers_every_panel_and_every_alert(tmp_path: Path) -> None:
    publisher, answers = published(counters(0, 0))
    run = recorded("full_attention")
    # The account's eviction ages are of the last 10 s: the recording happens now.
    batches = [(number, msgspec.msgpack.decode(payload)) for number, payload in run.payloads]
    late = time.time() - batches[-1][1][0]

    def part(start: int, end: int) -> None:
        publisher.publish(
            [(n, msgspec.msgpack.encode([b[0] + late + 8, *b[1:]])) for n, b in batches[start:end]]
        )

    queried, hit = "vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{"

    def at(share: float) -> str:
        """The recorded /metrics, with the two counters at a share of their end."""

        def scaled(line: str) -> str:
            name, _, value = line.rpartition(" ")
            return f"{name} {float(value) * share:.0f}" if line.startswith((queried, hit)) else line

        return "\n".join(map(scaled, run.metrics.split("\n")))

    answers.paths["/metrics"] = (200, at(0.0))
    with contextlib.closing(publisher), http(answers) as base, Scraped(base, settle=1.0) as exporter:
        until(lambda: exporter.series()["kvtune_server_up", ""] == 1)
        targets = {"vllm": base.removeprefix("http://"), "kvtune": exporter.url.split("/")[2]}
        with prometheus(tmp_path, targets) as server:
            until(lambda: len(asked(server, "up == 1")) == 2)
            for step in range(1, 5):
                part((step - 1) * len(batches) // 4, step * len(batches) // 4)
                answers.paths["/metrics"] = (200, at(step / 4))
                time.sleep(1.2)
            until(lambda: bool(asked(server, "kvtune_evicted_age_seconds")))
            until(lambda: bool(asked(server, "rate(kvtune_hit_tokens_total[1m]) > 0")))
            for query in queries():
                assert asked(server, query), query
            for rule in rules():
                # `bool` gives a value also where an alert does not fire.
                assert asked(server, re.sub(r" ([<>]|==)(?= )", r" \1 bool", rule["expr"])), rule["alert"]
                asked(server, rule["expr"])
            total = asked(server, "sum(kvtune_missed_tokens_total) + sum(kvtune_hit_tokens_total)")
            assert total[0]["value"][1] == asked(server, "kvtune_prompt_tokens_total")[0]["value"][1]
            answers.paths["/metrics"] = (503, "busy")
            until(lambda: bool(asked(server, 'ALERTS{alertname="KvtuneServerDown",alertstate="pending"}')))
            health = json.loads(text_of(f"{server}/api/v1/rules"))["data"]["groups"]
            assert [rule["health"] for group in health for rule in group["rules"]] == ["ok"] * len(rules())
    checked = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
