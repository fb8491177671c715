"""A tap before a router of two stock servers: the server that it names of each request is the one that answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from kvtune.requests.log.requests_log import read_log
from tests.lab.engine.test_watch import stock
from tests.servers.tap.test_command import tap
from tests.servers.watch.fleet_load import Client

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]


@contextmanager
def router(bases: Sequence[str], sent: list[str]) -> Iterator[str]:
    """A router that sends each request to the next server, and notes to which."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(bases[len(sent) % len(bases)])
            body = self.rfile.read(int(self.headers["content-length"]))
            passed = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = httpx.post(f"{sent[-1]}{self.path}", content=body, headers=passed, timeout=300)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}"
    finally:
        serving.shutdown()
        thread.join()
        serving.server_close()


def test_a_tap_before_a_router_names_the_server_of_each_request_or_none(tmp_path: Path) -> None:
    """First requests with the tap's session ids, then a client's own, of three sessions: often one behind another."""
    log, sent, model = tmp_path / "log.jsonl", list[str](), "tiny-llama"
    with ExitStack() as stack:
        bases = [stack.enter_context(stock(tmp_path, model)) for _ in range(2)]
        before = stack.enter_context(router(bases, sent))
        words = [word for base in bases for word in ("--replica", base)]
        relayed = stack.enter_context(tap(before, "-o", str(log), "--json", *words))
        client = Client(model, [f"http://127.0.0.1:{relayed.port}"], sessions=3)
        alone = stack.enter_context(httpx.Client(timeout=300))

        def ask(text: list[int]) -> str:
            body = {
                "model": model,
                "prompt": text,
                "max_tokens": 9,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            alone.post(f"{client.bases[0]}/v1/completions", json=body).raise_for_status()
            return str(json.loads(relayed.lines(len(sent))[-1])["replica"])

        first = [""]
        while not all(first[-2:]) or len(first) < 3:  # until the events of both are read
            first.append(ask(client.words(50)))
        texts = [client.words(40 + number) for number in range(20)]
        new, again = [[ask(text) for text in texts] for _ in range(2)]
        client.run(40, "round robin")
        relayed.lines(len(sent))
    named = [row.replica for row in sorted(read_log(log), key=lambda row: row.t0 or 0.0)]
    assert [(got, real) for got, real in zip(named, sent, strict=True) if got not in ("", real)] == []
    assert new.count("") <= 1, "each stores a block, whose event comes in 0.3 s, or later on a busy machine"
    assert again.count("") >= 10, "what hit as a whole stores none"
    known = f"the server is known of {len(sent) - named.count('')} of {len(sent)} requests"
    print(said := next(line for line in relayed.err if "the server is known of" in line))
    assert known in said
