"""Renders requests' bodies by the server that had them: its own renderer, else its /tokenize.

`/v1/../render` renders each API's body as a request would be (`vllm serve --enable-scale-out`, `vllm launch render`).
`/tokenize` is everywhere, and gets kvtune's own conversion of the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from kvtune.base.errors import UsageError
from kvtune.requests.log.bodies import MESSAGES, Body, Rendered
from kvtune.requests.log.rendering import Renderer
from kvtune.requests.log.requests_log import MOST_TOKENS
from kvtune.servers.watch.client import StatusError

if TYPE_CHECKING:
    from kvtune.servers.watch.server import Server

OWN, TOKENIZE = "the server's own renderer", "the server's /tokenize"
NOT_THERE = (403, 404, 405, 501)
"""What a server answers that does not render. vLLM without --enable-scale-out answers 403."""
REFUSED = (400, 422)


class _Rendered(msgspec.Struct):
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=MOST_TOKENS)]


class ServerRendering(Renderer):
    """Asks a server. `how` is known after the first body."""

    def __init__(self, server: Server) -> None:
        self.name = server.base
        self.how = OWN
        self._server = server
        self._model = ""

    def render(self, bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        for body in bodies:
            try:
                yield self.rendered(body)
            except UsageError as error:
                yield error

    def rendered(self, body: Body) -> Rendered:
        """Return the prompt of one body. UsageError if the server refuses it, KvtuneError if it does not answer."""
        if self.how == OWN:
            try:
                return self._own(body)
            except StatusError as error:
                if error.status not in NOT_THERE:
                    raise
                self.how = TOKENIZE
        return Rendered(self._server.tokenized(body), TOKENIZE)

    def text(self, ids: Sequence[int]) -> str:
        return self._server.text_of(ids)

    def _own(self, body: Body) -> Rendered:
        path = f"{body.api}/render"
        self._model = self._model or self._server.card().id
        asked = {**body.fields, "mm_payload": "none"} | ({"model": self._model} if self._model else {})
        if body.api == MESSAGES:
            asked.setdefault("max_tokens", 1)
        try:
            answer = self._server.client.ask(path, asked)
        except StatusError as error:
            if error.status in REFUSED:
                raise UsageError(
                    f"is refused by {self.name}{path} ({error.status})",
                    "the server would refuse the request, too: leave it out",
                ) from None
            raise
        if answer.lstrip()[:1] != b"[":
            return Rendered(self._server.client.read(answer, path, _Rendered).token_ids, OWN)
        many = self._server.client.read(answer, path, list[_Rendered])
        if len(many) != 1:
            raise UsageError("has several prompts", "write a line for each of them")
        return Rendered(many[0].token_ids, OWN)
