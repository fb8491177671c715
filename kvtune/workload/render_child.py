"""The process that renders by a chat template: `python -m kvtune.workload.render_child`. It has one tokenizer.

`kvtune.vllm.render_child` is the same with vLLM's renderer.
"""

from __future__ import annotations

import contextlib

from kvtune.workload.render_loop import serve
from kvtune.workload.templates import Templates


def main() -> None:
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401  (its memory is none of the folder's)
    serve(Templates)


if __name__ == "__main__":
    main()
