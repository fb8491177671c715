"""What workloads are read with: renderers of text, and recorded sessions. Kept by who builds several workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.requests.loads.weka import recorded
from kvtune.requests.log.bodies import Body, Rendered
from kvtune.requests.log.rendering import renderer
from kvtune.requests.log.requests_log import Render
from kvtune.requests.types import AUTO


class Sources:
    """Makes each renderer once, and reads a folder's sessions once. A renderer's process ends with this object."""

    def __init__(self) -> None:
        self.renderer = lru_cache(maxsize=4)(renderer)
        self.recorded = lru_cache(maxsize=1)(recorded)

    def render(self, tokenizer: str) -> Render | None:
        """Return a function that renders bodies and loads the tokenizer when first called; None for "auto"."""

        def render(bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
            try:
                renderer = self.renderer(tokenizer)
            except KvtuneError as error:
                kind = UsageError if isinstance(error, UsageError) else KvtuneError
                raise kind(f"has text, and {error.message}", error.hint) from error
            return renderer.render(bodies)

        return None if tokenizer == AUTO else render
