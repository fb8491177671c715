"""The models that a soak serves: built-in ones by their recipes, and the engine tests' tiny twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tests.lab.engine.twins import EXACT_ROTARY


@dataclass(frozen=True, slots=True)
class Model:
    """`blocks`: of the pool, less than all requests that may run need at their longest.

    `tie`: nats between two tokens that rounding may turn round. `twin`: its name among the twins, "" for a built-in
    model. `block`: tokens of a block, 0 where recipe or vLLM chooses. `flags`: further ones of `vllm serve`.
    """

    blocks: int
    tie: float = 1e-3
    speculates: bool = True
    twin: str = ""
    block: int = 0
    flags: Sequence[str] = ()


MODELS = {
    "tiny-llama": Model(160),
    "tiny-gemma3": Model(260),
    # It computes in bfloat16: stock parts from stock. And on a CPU, vLLM 0.32's worker ends at the first step where it
    # speculates with cached states: that takes Triton.
    "tiny-qwen3next": Model(40, tie=inf, speculates=False),
    "tiny-gptoss": Model(260, twin="gptoss", block=32),
    "tiny-gemma4": Model(500, twin="gemma4", block=32),
    "tiny-llama4": Model(400, twin="llama4", block=32),
    "tiny-lfm2moe": Model(100, speculates=False, twin="lfm2moe", flags=EXACT_ROTARY),
    # Without chunks (MLA on a CPU), stock vLLM that speculates never schedules prompts beyond --max-num-batched-tokens.
    "tiny-deepseek": Model(320, speculates=False, twin="deepseek", flags=EXACT_ROTARY),
}
