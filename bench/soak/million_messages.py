"""What a front end sends EngineCore for a request of the trouble. Imports vLLM when used."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from bench.soak.trouble import LONGEST, Ask, prompt

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

GENERATED = 0
"""The token that the simulator's device generates."""
NEVER = GENERATED + 7


class Messages:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, number: int, ask: Ask, at_s: float, client: int) -> EngineCoreRequest:
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=tokens_of(self._seed, ask),
            mm_features=None,
            sampling_params=_parameters(ask),
            pooling_params=None,
            arrival_time=at_s,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            client_index=client,
            priority=ask.priority,
        )


def _parameters(ask: Ask) -> SamplingParams:
    from vllm.sampling_params import SamplingParams

    by_kind: dict[str, dict[str, object]] = {
        "logprobs": {"logprobs": 2},
        "stop": {"stop_token_ids": [GENERATED, NEVER] if stops_first(ask) else [NEVER]},
        "sampled": {"temperature": 0.8, "seed": 1},
        "choices": {"temperature": 0.8, "seed": 2},
    }
    usual: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": ask.output,
        "ignore_eos": True,
        "detokenize": False,
    }
    return SamplingParams(**{**usual, **by_kind.get(ask.special, {})})


def stops_first(ask: Ask) -> bool:
    """Whether the first token that comes is a stop token of this request."""
    return ask.special == "stop" and ask.number % 2 == 0


def tokens_of(seed: int, ask: Ask) -> list[int]:
    """`prompt`, with the streams that many requests share drawn once."""
    return _stem(seed, ask.stem)[: ask.shared] + prompt(seed, Ask(ask.number, 0.0, ask.stem, 0, ask.own, 1))


@lru_cache(maxsize=64)
def _stem(seed: int, stem: int) -> list[int]:
    return prompt(seed, Ask(0, 0.0, stem, LONGEST, 0, 1))
