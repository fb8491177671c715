"""The process that renders by a chat template: `python -m kvtune.requests.log.render_child`. It has one tokenizer.

`kvtune.lab.engine.render_child` is the same with vLLM's renderer.
"""

from __future__ import annotations

import contextlib
import gc
import sys

from kvtune.requests.log.render_loop import serve
from kvtune.requests.log.templates import Templates


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # no tokenizer needs it; it takes 3 s to import
    gc.disable()  # collections find nothing in what is imported, and take a sixth of its time
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer  # noqa: F401  (its memory is none of the folder's)
    gc.enable()
    serve(Templates)


if __name__ == "__main__":
    main()
