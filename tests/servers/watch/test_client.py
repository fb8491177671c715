"""The one client for what servers say: nothing goes to another host, nothing is without end, an error is one line."""

from __future__ import annotations

import ast
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import kvtune
from kvtune.base.errors import KvtuneError
from kvtune.servers.watch import client
from kvtune.servers.watch.client import Client
from kvtune.servers.watch.server import Server
from tests.servers.watch.played import Answers, counters, http
from tests.simulator import run

ROOT = Path(kvtune.__file__).parent
SPEAKING = {"httpx", "httpcore", "requests", "urllib3", "aiohttp", "http.client", "urllib.request", "socket"}


@pytest.mark.lint
def test_no_other_module_speaks_to_servers() -> None:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if any(name == one or name.startswith(f"{one}.") for one in SPEAKING):
                    found.add((str(path.relative_to(ROOT)), name.partition(".")[0]))
    assert {module for module, name in found if name != "socket"} == {"servers/watch/client.py"}
    sockets = {module for module, name in found if name == "socket" and module.startswith("servers/watch/")}
    assert sockets == {"servers/watch/client.py"}, "it asks for the addresses of a name"


@contextmanager
def raw(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers each connection with what this function sends."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.05)
    stop = threading.Event()

    def each(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                answer(connection)
            except OSError:
                pass

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            threading.Thread(target=each, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        listening.close()


def saying(content: bytes, *fields: str, status: str = "200 OK") -> Callable[[socket.socket], None]:
    """An answer with this body and these fields of its head."""
    head = "".join(
        f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(content)}")
    )
    return lambda connection: connection.sendall(f"{head}\r\n".encode() + content)


def hits(base: str) -> float | None:
    with closing(Server(base)) as server:
        return server.scrape().get("prefix_cache_hits")


def said(base: str, path: str = "/metrics", **headers: str) -> str:
    """The one line that an answer is refused with."""
    asking = Client(base, headers)
    try:
        with pytest.raises(KvtuneError) as refused:
            asking.ask(path)
    finally:
        asking.close()
    assert "\n" not in refused.value.message and len(refused.value.message) < 500
    return refused.value.message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_its_target_is_named_without_keys(status: int) -> None:
    other = Answers(counters(100, 40))
    with http(other) as elsewhere:
        target = elsewhere.replace("http://", "http://me:SECRETPW@") + "/metrics?token=SECRETPW"

        with raw(saying(b"", f"Location: {target}", status=f"{status} Found")) as base:
            message = said(base, **{"X-Api-Key": "SECRETPW"})
            assert elsewhere in message and "SECRETPW" not in message
            asking = Client(base, {"X-Api-Key": "SECRETPW"})
            with pytest.raises(KvtuneError, match="follows no"):
                asking.ask("/tokenize", {"prompt": "MY PRIVATE PROMPT"})
            asking.close()
    assert other.seen == []


def test_a_body_without_end_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    with raw(endless) as base:
        assert "answers with more than 1 MiB" in said(base)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_answer_has_a_limit_of_what_it_unpacks_to(encoding: str) -> None:
    bomb = gzip.compress(b"0" * (64 << 20), 9)
    with raw(saying(bomb, f"Content-Encoding: {encoding}")) as base:
        assert "MiB, compressed" in said(base)


def test_a_gateways_own_gzip_is_read_and_no_other_kind_is() -> None:
    text = gzip.compress(counters(100, 40).encode())
    with raw(saying(text, "Content-Encoding: gzip")) as base:
        assert hits(base) == 40
    with raw(saying(text, "Content-Encoding: br")) as base:
        assert "compressed form" in said(base)
    with raw(saying(b"what", "Content-Encoding: gzip")) as base:
        assert "damaged gzip" in said(base)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_drips_has_a_limit_of_time_wherever_it_drips(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def drips(connection: socket.socket) -> None:
        connection.sendall(begun)
        while not over.wait(0.05):
            connection.sendall(b"H" if begun else b"")

    monkeypatch.setattr(client, "GET_S", 0.5)
    with raw(drips) as base:
        try:
            assert "did not answer within" in said(base)
        finally:
            over.set()


@pytest.mark.parametrize("charset", ["hex", "zlib", "idna", "undefined", "utf-7", "x" * 300])
def test_a_charset_changes_nothing(charset: str) -> None:
    odd = saying(counters(100, 40).encode(), f"Content-Type: text/plain; charset={charset}")
    with raw(odd) as base:
        assert hits(base) == 40


def test_text_of_a_server_is_one_line_wherever_it_is_shown() -> None:
    fake = "0.32\\nkvtune: fake, 1,000 blocks"
    answers = Answers(counters(100, 40).replace("tiny", fake))
    answers.paths["/version"] = (200, f'{{"version": "{fake}"}}')
    with http(answers) as base:
        server = Server(base)
        assert server.version() == server.scrape().model == "0.32 kvtune: fake, 1,000 blocks"
        server.close()


@pytest.mark.parametrize(
    "setting",
    [
        ("ALL_PROXY", "socks9://127.0.0.1:1"),
        ("SSL_CERT_FILE", "/no/such/file.pem"),
        ("HTTPS_PROXY", "http://[::1"),
    ],
)
def test_settings_of_the_environment_that_cannot_be_used_are_named(
    setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(*setting)
    with http(Answers(counters(100, 40))) as base:
        code = run(["watch", base.replace("http:", "https:"), "--once"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2) and len(lines) == 2 and "unexpected" not in lines[0]
    assert setting[0] in " ".join(lines)


def test_a_client_asks_again_after_a_signal_cut_a_question_off() -> None:
    with http(Answers(counters(100, 40))) as base:
        server = Server(base)

        def cut(*_: object) -> None:
            raise KeyboardInterrupt

        server.client._loop.call_soon(cut)
        with pytest.raises(KeyboardInterrupt):
            server.scrape()
        assert server.scrape().get("prefix_cache_hits") == 40
        server.close()


def test_no_thread_and_no_descriptor_is_left() -> None:
    with http(Answers(counters(100, 40))) as base:
        for _ in range(2):
            hits(base)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            hits(base)
        time.sleep(0.1)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
