"""Turns a request's body into the token ids that the server makes of it.

The server itself is asked: `/v1/../render` does it for every API (`vllm serve --enable-scale-out`), else `/tokenize`.
Or a tokenizer that the user names renders here, as it does a log. A prompt of token ids needs no one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtune.tap.messages import Settings
from kvtune.watch.client import StatusError
from kvtune.watch.server import Server
from kvtune.workload.bodies import CHAT, COMPLETIONS, body_of
from kvtune.workload.rendering import Renderer, renderer
from kvtune.workload.requests_log import MOST_TOKENS

Ids = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
NOT_THERE = (403, 404, 405, 501)


class _Rendered(msgspec.Struct):
    token_ids: Annotated[Ids, Meta(max_length=MOST_TOKENS)]


class Rendering:
    def __init__(self, settings: Settings) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._tokenizer = settings.tokenizer
        self._renderer: Renderer | None = None
        self._renders = True
        """Whether the server may have the endpoints that render."""

    def prompts(self, api: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each of the request's prompts. KvtuneError says why they are not known."""
        given = body.get("prompt") if api == COMPLETIONS else None
        if isinstance(given, list) and given:
            many = given if isinstance(given[0], list) else [given]
            if all(isinstance(one, list) and all(type(token) is int for token in one) for one in many):
                return [list(one) for one in many]
        several = given if isinstance(given, list) else []
        if self._tokenizer:
            self._renderer = self._renderer or renderer(self._tokenizer)
            by = self._renderer.ids
            return [list(by(body_of(one, api))) for one in _each(body, several)]
        if self._renders:
            try:
                return self._rendered(api, body)
            except StatusError as error:
                if error.status not in NOT_THERE:
                    raise
                self._renders = False
        return [self._server.tokenized(body_of(one, api)) for one in _each(body, several)]

    def _rendered(self, api: str, body: Mapping[str, Any]) -> list[list[int]]:
        path = f"{api}/render"
        answer = self._server.client.post(path, {**body, "mm_payload": "none"} if api == CHAT else body)
        if answer.content.lstrip()[:1] == b"[":
            return [one.token_ids for one in self._server.client.read(answer, path, list[_Rendered])]
        return [self._server.client.read(answer, path, _Rendered).token_ids]

    def close(self) -> None:
        self._server.close()


def _each(body: Mapping[str, Any], prompts: list[Any]) -> list[Mapping[str, Any]]:
    """Return a body for each of the prompts; the body itself if it has one."""
    return [{**body, "prompt": one} for one in prompts] if len(prompts) > 1 else [body]
