"""Turns a request's body into the token ids that the server makes of it.

The server itself is asked (`kvtune/servers/watch/rendering.py`), or a tokenizer that the user names renders here, as
it does a log. A prompt of token ids needs no one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.base.errors import KvtuneError
from kvtune.requests.log.bodies import COMPLETIONS, Body, body_of
from kvtune.requests.log.rendering import Renderer, renderer
from kvtune.servers.tap.messages import Settings
from kvtune.servers.watch.client import SilentError
from kvtune.servers.watch.rendering import OWN, ServerRendering
from kvtune.servers.watch.server import Server

RENDER_S = 5.0
"""Seconds that a server has to render a request. The requests behind it wait meanwhile."""
AGAIN_S = 30.0
"""Seconds until it is asked again, if it did not answer in time."""


class Rendering:
    def __init__(self, settings: Settings) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._server.client.post_s = RENDER_S
        self._silent_until = 0.0
        self._tokenizer = settings.tokenizer
        self._by: Renderer = ServerRendering(self._server)
        self._chosen = False

    def prompts(self, api: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each of the request's prompts. KvtuneError says why they are not known."""
        given = body.get("prompt") if api == COMPLETIONS else None
        if isinstance(given, list) and given:
            many = given if isinstance(given[0], list) else [given]
            if all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in many):
                return [list(ids) for ids in many]
        if not self._tokenizer and time.monotonic() < self._silent_until:
            raise KvtuneError(f"the server rendered none in {RENDER_S:.0f} s, and is asked again in a while")
        if self._tokenizer and not self._chosen:
            self._by, self._chosen = renderer(self._tokenizer), True
        each = [{**body, "prompt": text} for text in given] if isinstance(given, list) else [body]
        try:
            return [list(self._ids(api, prompt)) for prompt in each]
        except SilentError:
            self._silent_until = time.monotonic() + AGAIN_S
            raise

    def _ids(self, api: str, fields: Mapping[str, Any]) -> Sequence[int]:
        """Return one prompt's token ids. A field that nobody knows is refused, unless the server itself renders."""
        if isinstance(self._by, ServerRendering) and self._by.how == OWN:
            ids = self._by.ids(Body(api, fields))
            if self._by.how == OWN:
                return ids
        return self._by.ids(body_of(fields, api))

    def close(self) -> None:
        self._server.close()
