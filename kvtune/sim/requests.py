"""From a workload's requests to vLLM's, without making a token. Simulator's process only.

A request's block hashes (prompt and answer) come from its spans; its token list, a bytearray, only counts: vLLM reads
tokens where it hashes them. Answers: the engine is greedy, so equal prompts give equal answers, as far as both go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtune.workload.answers import with_answers
from kvtune.workload.tokens import hash_arrays
from kvtune.workload.types import Request


class Factory:
    """Makes vLLM requests of one workload; hashes are computed in workload order, ahead in batches."""

    def __init__(self, requests: Sequence[Request], hash_block_tokens: int, caching: bool) -> None:
        self._requests = requests
        self._block = hash_block_tokens
        self._hashes = hash_arrays(with_answers(requests), hash_block_tokens) if caching else iter(())
        self._ahead: dict[int, Any] = {}
        self._next = 0
        self._caching = caching
        self._params: dict[int, Any] = {}

    def make(self, index: int, arrival_s: float) -> Any:
        from vllm.v1.request import Request as EngineRequest

        planned = self._requests[index]
        return EngineRequest(
            request_id=str(index),
            prompt_token_ids=bytearray(planned.prompt_tokens),
            sampling_params=self._sampling(planned.output_tokens),
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=self._hasher(index) if self._caching else None,
        )

    def _sampling(self, output_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams

        found = self._params.get(output_tokens)
        if found is None:
            found = self._params[output_tokens] = SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
            )
        return found

    def _hasher(self, index: int) -> Any:
        hashes = self._hashes_of(index)
        block = self._block

        def hasher(request: Any) -> list[bytes]:
            have = len(request.block_hashes)
            full = request.num_tokens // block
            return hashes[have:full] if full > have else []

        hasher.hash_block_size = block  # type: ignore[attr-defined]  # the steady path asks when it has to be called
        return hasher

    def _hashes_of(self, index: int) -> list[bytes]:
        while index >= self._next:
            self._ahead[self._next] = next(self._hashes)
            self._next += 1
        array = self._ahead.pop(index)
        found: list[bytes] = array.astype("<u8").view("V8").tolist()
        return found
