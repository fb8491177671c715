"""Text rendered by the server that had it: its own renderer where it has one, else /tokenize."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.requests.log.bodies import Rendered, body_of
from kvtune.servers.watch.rendering import OWN, TOKENIZE, ServerRendering
from kvtune.servers.watch.server import Server
from tests.servers.watch.played import Answers, http

ASKED = {"role": "user", "content": "Hi"}
BODIES: tuple[dict[str, Any], ...] = (
    {"messages": [ASKED], "model": "theirs"},
    {"messages": [ASKED], "system": "Be brief."},
    {"input": "Hi"},
    {"prompt": "Hi"},
)


def serving(asked: list[tuple[str, Any]], status: int = 200) -> Answers:
    answers = Answers("")
    answers.paths["/v1/models"] = (200, '{"data": [{"id": "served", "max_model_len": 512}]}')

    def rendering(path: str) -> Any:
        def said(body: Any) -> str:
            asked.append((path, body))
            one = {"token_ids": [1, 2, len(asked)], "features": None}
            return json.dumps([one] if path == "/v1/completions" else one)

        return said

    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"):
        answers.paths[f"{path}/render"] = (status, rendering(path))
    answers.paths["/tokenize"] = (200, lambda _: '{"tokens": [7]}')
    return answers


def test_each_apis_body_is_rendered_by_the_servers_own_renderer() -> None:
    asked: list[tuple[str, Any]] = []
    with http(serving(asked)) as base, closing(Server(base)) as server:
        by = ServerRendering(server)
        made = list(by.render([body_of(body) for body in BODIES]))
        assert made == [Rendered([1, 2, n], OWN) for n in range(1, 5)] and by.how == OWN
    assert [path for path, _ in asked] == [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/completions",
    ]
    assert all(body["model"] == "served" and body["mm_payload"] == "none" for _, body in asked)


def test_a_server_without_it_is_asked_to_tokenize_from_then_on() -> None:
    asked: list[tuple[str, Any]] = []
    with http(serving(asked, 403)) as base, closing(Server(base)) as server:
        by = ServerRendering(server)
        made = list(by.render([body_of(body) for body in BODIES]))
        assert made == [Rendered([7], TOKENIZE)] * 4 and by.how == TOKENIZE
        reminded = {"system": "s", "messages": [ASKED, {"role": "system", "content": "x"}, ASKED]}
        (refused,) = by.render([body_of(reminded)])
        assert isinstance(refused, UsageError) and "a system message between others" in refused.message
    assert len(asked) == 1


@pytest.mark.parametrize(("status", "kind"), [(400, UsageError), (500, KvtuneError)])
def test_a_refused_body_is_not_tokenized_in_another_way(status: int, kind: type[KvtuneError]) -> None:
    with http(serving([], status)) as base, closing(Server(base)) as server:
        by = ServerRendering(server)
        with pytest.raises(kind, match=f"/v1/chat/completions/render .*{status}"):
            by.ids({"messages": [ASKED]})
