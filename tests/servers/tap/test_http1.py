"""Following a connection: whatever the pieces, every byte comes out again, and messages end where they end."""

from __future__ import annotations

import gzip
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.servers.tap import exchange
from kvtune.servers.tap.answers import read_answer
from kvtune.servers.tap.exchange import Connection, client_of
from tests.choice import drawn
from tests.servers.tap.wire import Heard, connection, cut

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
SESSION = re.compile(rb"X-Session-ID: kvtune-test-\d+\r\n")


def followed() -> tuple[Heard, Connection]:
    heard = Heard()
    return heard, connection(heard)


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = b"".join(b"%x;a=b\r\n%s\r\n" % (len(one), one) for one in cut(body, size))
    return pieces + b"0\r\n" + trailer + b"\r\n"


BODIES = st.binary(max_size=300)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request to an API, and its body."""
    body = draw(BODIES)
    if draw(st.booleans()):
        return CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    trailer = draw(st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]))
    head = CHAT + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + chunked(body, draw(st.integers(1, 50)), trailer), body


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """An answer that does not end with the connection, and its body."""
    body = draw(BODIES)
    before = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n"])
    )
    if draw(st.booleans()):
        return before + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, body
    head = b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n"
    return before + head + chunked(body, draw(st.integers(1, 50))), body


@settings(max_examples=drawn(100), deadline=None)
@given(
    st.lists(st.tuples(requests(), answers()), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(1, 200),
    st.booleans(),
)
def test_every_byte_passes_and_every_message_is_found(
    exchanges: list[tuple[tuple[bytes, bytes], tuple[bytes, bytes]]], size: int, other: int, session: bool
) -> None:
    heard = Heard()
    one = connection(heard, add_session=session)
    sent = b"".join(request for (request, _), _ in exchanges)
    back = b"".join(answer for _, (answer, _) in exchanges)
    passed = b"".join(one.asking(piece) for piece in cut(sent, size))
    assert SESSION.sub(b"", passed) == sent
    assert len(SESSION.findall(passed)) == (len(exchanges) if session else 0)
    for piece in cut(back, other):
        one.answering(piece)
    one.closed("client")
    assert [body for _, body, _ in heard.asked_] == [body for (_, body), _ in exchanges]
    assert [(status, body, how) for _, status, body, how in heard.answered_] == [
        (200, body, "whole") for _, (_, body) in exchanges
    ]


PARTS = st.sampled_from(
    [
        CHAT,
        b"\r\n",
        b"\n",
        b"Content-Length: 4\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 4, 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"X-Session-ID: mine\r\n",
        b"4\r\nabcd\r\n",
        b"0\r\n\r\n",
        b"zz\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 204 No\r\n\r\n",
        b"HTTP/2.0 200\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"abcd",
    ]
) | st.binary(min_size=1, max_size=60)


@settings(max_examples=drawn(200), deadline=None)
@given(st.lists(st.tuples(st.booleans(), PARTS), max_size=25))
def test_broken_http_and_no_http_pass_unchanged(parts: list[tuple[bool, bytes]]) -> None:
    """Both directions in any order: whatever ends the following, nothing is lost and nothing is said twice."""
    heard, one = followed()
    sent = passed = b""
    for asks, part in parts:
        if asks:
            sent += part
            passed += one.asking(part)
        else:
            one.answering(part)
            passed += one.let_go()
    passed += one.let_go()
    one.closed("server")
    assert SESSION.sub(b"", passed) == sent
    assert [number for number, *_ in heard.answered_] == sorted({number for number, *_ in heard.asked_})


def test_a_clients_own_session_id_is_left_alone() -> None:
    _, one = followed()
    request = CHAT + b"x-session-id: mine\r\nContent-Length: 2\r\n\r\n{}"
    assert one.asking(request) == request


def test_other_paths_are_not_touched_and_not_recorded() -> None:
    heard, one = followed()
    request = b"GET /metrics HTTP/1.1\r\n\r\nPOST /tokenize HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    assert one.asking(request) == request
    one.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na" * 2)
    one.closed("client")
    assert heard.asked_ == heard.answered_ == []


ASKED = CHAT + b"Content-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "line", "told"),
    [
        (ASKED, b"HTTP/1.1 204 No Content", [b"", b"x"]),
        (ASKED, b"HTTP/1.1 304 Not Modified", [b"", b"x"]),
        (b"HEAD /v1/models HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK", [b"x"]),
    ],
)
def test_answers_without_a_body_end_with_their_head(first: bytes, line: bytes, told: list[bytes]) -> None:
    heard, one = followed()
    one.asking(first + ASKED)
    one.answering(line + b"\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert [body for _, _, body, _ in heard.answered_] == told


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (["server", "client"], "whole"),
        (["client", "server"], "client"),
        ([], "server"),
    ],
)
def test_an_answer_without_a_length_is_whole_when_the_server_ends_it_first(ends: list[str], how: str) -> None:
    heard, one = followed()
    one.asking(CHAT + b"Content-Length: 0\r\n\r\n")
    one.answering(b"HTTP/1.0 200 OK\r\n\r\nab")
    one.answering(b"cd")
    for who in ends:
        one.ended(who)
    one.closed("server")
    assert [(body, ended) for _, _, body, ended in heard.answered_] == [(b"abcd", how)]


@pytest.mark.parametrize("status", [b"18446744073709551616", b"20", b"+200", "²00".encode()])
def test_an_answer_with_no_status_is_not_followed_and_its_request_has_its_end(status: bytes) -> None:
    heard, one = followed()
    one.asking(CHAT + b"Content-Length: 2\r\n\r\n{}")
    one.answering(b"HTTP/1.1 " + status + b" OK\r\nContent-Length: 0\r\n\r\n")
    assert heard.answered_ == [(1, 0, b"", "unread")]


def test_what_begins_like_a_head_is_followed_after_it_was_let_go_and_named_by_nobody() -> None:
    heard, one = followed()
    head = CHAT + b"Content-Length: 2\r\n\r\n"
    assert one.asking(head[:40]) == b"" and one.holding
    assert one.let_go() == head[:40] and not one.holding
    assert one.asking(head[40:] + b"{") == head[40:] + b"{"
    assert one.asking(b"}" + head + b"{}") == b"}" + head[:-2] + b"X-Session-ID: kvtune-test-2\r\n\r\n{}"
    one.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx" * 2)
    assert [body for _, body, _ in heard.asked_] == [b"{}", b"{}"]
    assert [body for _, _, body, _ in heard.answered_] == [b"x", b"x"]


def test_of_a_chunked_body_no_byte_is_held() -> None:
    _, one = followed()
    one.asking(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
    for part in (b"5", b"\r", b"\nhello", b"0\n\n", b"ffff"):
        assert one.asking(part) == part


@pytest.mark.parametrize("field", [b"X: a\r\n Transfer-Encoding: chunked", b"Content-Length : 3"])
def test_a_head_that_servers_read_in_different_ways_is_not_followed(field: bytes) -> None:
    heard, one = followed()
    request = CHAT + field + b"\r\n\r\n0\r\n\r\n" + CHAT + b"\r\n"
    assert one.asking(request) == request and not heard.asked_


def test_an_answer_before_the_body_is_whole_ends_the_exchange() -> None:
    heard, one = followed()
    one.asking(CHAT + b"Content-Length: 100\r\n\r\nabc")
    one.answering(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    assert one.asking(b"x" * 97) == b"x" * 97
    assert heard.asked_ == [(1, b"", True)] and heard.answered_ == [(1, 413, b"", "whole")]


def test_a_sender_of_single_bytes_costs_no_more_than_its_bytes() -> None:
    _, one = followed()
    for _ in range(60_000):
        one.asking(b"a")
    assert len(one.let_go()) == 60_000


def test_what_is_kept_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    numbers = exchange.Numbers("p-", budget=exchange.Budget(1000))
    first, second = exchange.Connection(heard, numbers), exchange.Connection(heard, numbers)
    head = CHAT + b"Content-Length: 900\r\n\r\n"
    first.asking(head + b"a" * 800)
    assert numbers.budget.held == 800
    second.asking(head + b"b" * 900)
    assert heard.asked_ == [(2, b"", True)], "there was no room for the second body"
    second.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n" + b"x" * 300_000 + b"y" * 100_000)
    (_, _, tail, _) = heard.answered_[0]
    assert tail.endswith(b"y" * 64_000) and len(tail) <= 2 * exchange.TAIL, "an answer's end has its usage"
    first.asking(b"a" * 100)
    assert heard.asked_[1] == (1, b"a" * 900, False)
    first.closed("client")
    second.closed("client")
    assert numbers.budget.held == 0


def test_a_client_that_pipelines_without_end_is_relayed_and_not_followed() -> None:
    heard, one = followed()
    request = CHAT + b"Content-Length: 0\r\n\r\n"
    passed = b"".join(one.asking(request) for _ in range(1500))
    assert SESSION.sub(b"", passed) == request * 1500
    assert len(heard.answered_) == 1000 and {how for *_, how in heard.answered_} == {"unread"}


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.1.233 (external, cli)", "claude-code"),
        ("OpenAI/Python 3.57.0", "openai-python"),
        ("AsyncOpenAI/Python 3.57.0", "openai-python"),
        ("Anthropic/JS 0.1", "anthropic-js"),
        ("curl/8.5.0", "curl"),
        ("Mozilla/5.0 (X11; Linux x86_64) secret@example.com", "mozilla"),
        ("", "client"),
        ("\x1b[2J", "client"),
        ("x" * 200, "x" * 40),
    ],
)
def test_of_the_user_agent_only_the_clients_name_is_kept(agent: str, name: str) -> None:
    assert client_of(agent) == name


def test_an_answer_that_a_proxy_compressed_is_read() -> None:
    text = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}'
    assert read_answer(gzip.compress(text), "application/json", "gzip").prompt_tokens == 9
    assert read_answer(b"damaged", "application/json", "gzip").prompt_tokens == -1
    assert read_answer(text, "application/json", "br").prompt_tokens == -1
