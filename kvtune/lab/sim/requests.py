"""Makes vLLM's `Request` objects from a workload, without real tokens. Simulator's process only.

Block hashes of prompt and answer come from the request's spans. The token list is a bytearray of zeros: only its length
matters, because vLLM reads tokens only to hash them. Sampling is greedy, so equal prompts have equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.sim.chains import BlockHashes, Chain, Chains
from kvtune.plugin.vllm.types import Request as EngineRequest
from kvtune.requests.loads.tokens import hash_arrays, with_answers
from kvtune.requests.types import Request

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class Factory:
    """Makes the requests of one workload. Block hashes are computed in batches, in the workload's order, before use."""

    def __init__(
        self, requests: Sequence[Request], hash_block_tokens: int, caching: bool, ahead: int = 0
    ) -> None:
        """`ahead`: how many tokens after a block its hash also covers (with speculation, from vLLM 0.33 on)."""
        self._requests = requests
        self._block, self._lookahead = hash_block_tokens, ahead
        self._hashes = hash_arrays(with_answers(requests), hash_block_tokens, ahead) if caching else iter(())
        self._ahead: dict[int, NDArray[np.uint64]] = {}
        self._next = 0
        self._chains = Chains(requests)
        self._caching = caching
        self._params: dict[int, SamplingParams] = {}

    def make(self, index: int, arrival_s: float) -> EngineRequest:
        from vllm.v1.request import Request as VllmRequest

        planned = self._requests[index]
        chain = self._chain_of(index) if self._caching else None
        tokens: Any = bytearray(planned.prompt_tokens)
        request = VllmRequest(
            request_id=str(index),
            prompt_token_ids=tokens,
            sampling_params=self.sampling(planned.output_tokens),
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=None if chain is None else self._hasher(chain.hashes),
        )
        if chain is not None:
            hashes = request.block_hashes = BlockHashes(request.block_hashes)
            hashes.chain = chain
        return request

    def sampling(self, output_tokens: int) -> SamplingParams:
        from vllm.sampling_params import SamplingParams

        parameters = self._params.get(output_tokens)
        if parameters is None:
            parameters = self._params[output_tokens] = SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
            )
        return parameters

    def _hasher(self, hashes: list[bytes]) -> Callable[[EngineRequest], list[bytes]]:
        block, ahead = self._block, self._lookahead

        def hasher(request: EngineRequest) -> list[bytes]:
            have = len(request.block_hashes)
            full = max(request.num_tokens - ahead, 0) // block
            return hashes[have:full] if full > have else []

        hasher.hash_block_size = block  # type: ignore[attr-defined]  # the steady path calls it per full block
        return hasher

    def _chain_of(self, index: int) -> Chain:
        while index >= self._next:
            self._ahead[self._next] = next(self._hashes)
            self._next += 1
        return self._chains.make(index, self._ahead.pop(index))
