"""The key of a run's own server: every route wants it, and no command line shows it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtune.lab.engine.front_end import key

KEY = "drawn"


def asked(
    kind: str, *headers: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch, path: str = "/"
) -> list[Any]:
    """What the server sends back; ["app"] where the request gets through."""
    monkeypatch.setenv(key.VARIABLE, KEY)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("app")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(key.OwnClientOnly(app)(scope, receive, send))
    return sent


RIGHT = (b"authorization", b"Bearer drawn")


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/reset_prefix_cache", "/metrics", "/v1/completions", ""]
)
def test_every_route_wants_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for headers in ((), ((b"authorization", b"Bearer x"),), ((b"x-api-key", b"drawn"),), (RIGHT, RIGHT)):
        assert asked("http", *headers, monkeypatch=monkeypatch, path=path)[0] == 401
        assert asked("websocket", *headers, monkeypatch=monkeypatch, path=path) == ["websocket.close"]
    for kind in ("http", "websocket"):
        assert asked(kind, RIGHT, monkeypatch=monkeypatch, path=path) == ["app"]
    assert [*key.header(KEY).items()] == [("Authorization", "Bearer drawn")]


def test_the_servers_start_and_end_want_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("lifespan", monkeypatch=monkeypatch) == ["app"]


def test_without_a_key_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(key.VARIABLE, raising=False)
    with pytest.raises(KeyError):
        key.OwnClientOnly(lambda scope, receive, send: asyncio.sleep(0))
