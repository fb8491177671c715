"""Turns a request's body into the token ids that the server makes of it: the server itself is asked.

`/v1/../render` does it for every API (`vllm serve --enable-scale-out`); else `/tokenize` does it for OpenAI's bodies. A
prompt of token ids needs no one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtune.errors import KvtuneError
from kvtune.tap.exchange import APIS
from kvtune.tap.messages import Settings
from kvtune.watch.client import StatusError
from kvtune.watch.server import Server
from kvtune.workload.requests_log import MOST_TOKENS

Ids = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
NOT_THERE = (403, 404, 405, 501)
PATHS = {api: path for path, api in APIS.items()}


class _Rendered(msgspec.Struct):
    token_ids: Annotated[Ids, Meta(max_length=MOST_TOKENS)]


class Rendering:
    def __init__(self, settings: Settings) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._renders = True
        """Whether the server may have the endpoints that render."""

    def prompts(self, api: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each of the request's prompts. KvtuneError says why they are not known."""
        given = body.get("prompt") if api == "completions" else None
        if isinstance(given, list) and given:
            many = given if isinstance(given[0], list) else [given]
            if all(type(token) is int for one in many for token in one):
                return [list(one) for one in many]
        if self._renders:
            try:
                return self._rendered(api, body)
            except StatusError as error:
                if error.status not in NOT_THERE:
                    raise
                self._renders = False
        if api == "messages":
            raise KvtuneError(
                "token ids of /v1/messages need `vllm serve --enable-scale-out`, or the middleware"
            )
        texts = given if isinstance(given, list) else [given]
        if api == "completions" and len(texts) > 1:
            return [self._server.tokenized({"prompt": text}) for text in texts]
        return [self._server.tokenized(body)]

    def _rendered(self, api: str, body: Mapping[str, Any]) -> list[list[int]]:
        path = f"{PATHS[api]}/render"
        asked = {**body, "mm_payload": "none"} if api == "chat" else body
        answer = self._server.client.post(path, asked)
        if answer.content.lstrip()[:1] == b"[":
            return [one.token_ids for one in self._server.client.read(answer, path, list[_Rendered])]
        return [self._server.client.read(answer, path, _Rendered).token_ids]

    def close(self) -> None:
        self._server.close()
