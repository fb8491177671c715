"""Whether this vLLM can be simulated. Imports no vLLM."""

from __future__ import annotations

from kvtune.engine.resolve import check_engine
from kvtune.errors import KvtuneError
from kvtune.vllm.parts import differing

TOO_SMALL = "the pool holds"
"""The start of the error message for a pool that cannot hold one request of the maximum length."""


def check_vllm() -> None:
    """Raise KvtuneError if vLLM is not installed, or if its code differs from the code that the simulator knows."""
    version = check_engine()
    if why := differing(("simulator",)):
        raise KvtuneError(
            f"the simulator does not know vLLM {version}: {why}",
            "measure on the engine (--on engine); `kvtune doctor` lists what works with this vLLM",
        )
