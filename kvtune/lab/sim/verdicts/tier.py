"""Finds why a tier of host memory lacked the tokens that a prompt missed. Runs in processes that have vLLM.

Records what the tier has ever held and what it had no room for; changes no decision. Causes, by the first chunk that
the tier lacks:

    evicted_from_both   the tier held the chunk and evicted it
    store_refused       offered while the tier had no room, and the request that offered it has ended
    stored_late         offered while the tier had no room; that request still runs and will offer it again
    window_not_stored   never offered to the tier: a window or state, which vLLM stores at few positions
    never_stored        never offered to the tier: part of an answer, or not admitted by threshold or policy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtune.lab.sim.verdicts.groups import LookupGroup
from kvtune.plugin.vllm.patches import in_place_of
from kvtune.plugin.vllm.types import Key, Matched, PrepareStoreOutput, ReqContext, Request, SchedulerSide


class TierMemory:
    """Remembers which keys (chunks) one tier has held, and for which keys it had no room."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._groups = {config.group_idx: config for config in side.config.kv_group_configs}
        self._held: set[Key] = set()
        self._ever: set[Key] = set()
        self._refused: dict[Key, str] = {}  # key -> the request that offered it last

        @in_place_of(side.manager, "prepare_store")
        def storing(
            prepare: Callable[..., PrepareStoreOutput | None], keys: Collection[Key], context: ReqContext
        ) -> PrepareStoreOutput | None:
            stores = prepare(keys, context)
            if stores is None:
                self._refused.update(dict.fromkeys(keys, context.req_id))
            else:
                self._held.difference_update(stores.evicted_keys)
                self._held.update(stores.keys_to_store)
                self._ever.update(stores.keys_to_store)
            return stores

    def watch_lookups(self, looked_up: Callable[[str, int, int], None]) -> None:
        """Call `looked_up(request id, tokens in the pool, more tokens in the tier)` after each answered lookup."""

        @in_place_of(self._side, "get_num_new_matched_tokens")
        def looking_up(
            look_up: Callable[..., Matched], request: Request, computed: int, *args: object, **options: object
        ) -> Matched:
            answer = look_up(request, computed, *args, **options)
            if answer[0] is not None:
                looked_up(request.request_id, computed, answer[0])
            return answer

    def cause(
        self, groups: Sequence[LookupGroup], block_hashes: Sequence[bytes], local: int, boundary: int
    ) -> tuple[str, str]:
        """Return why the tier's hit ends before `boundary`, and the label of the first group that lacks a chunk.

        `local`: the end of the pool's hit. Both results are "" if the tier held every chunk up to `boundary`.
        """
        per_hash = self._side.config.tokens_per_hash
        for group in groups:
            for number in group.ids:
                config = self._groups.get(number)
                if config is None:
                    continue
                windowed = config.sliding_window_size_in_chunks is not None
                chunk = config.tokens_per_chunk
                for end in group.needed_ends(boundary):
                    if end <= local:
                        continue
                    index = -(-end // chunk) * chunk // per_hash - 1
                    key = _key(block_hashes[index], number) if index < len(block_hashes) else b""
                    if key not in self._held:
                        return self._why(key, windowed), group.label
        return "", ""

    def _why(self, key: Key, windowed: bool) -> str:
        if key in self._ever:
            return "evicted_from_both"
        if (request := self._refused.get(key)) is not None:
            return "stored_late" if self._runs(request) else "store_refused"
        return "window_not_stored" if windowed else "never_stored"

    def _runs(self, request_id: str) -> bool:
        status = self._side._req_status.get(request_id)
        return status is not None and not status.req.is_finished()


def _key(block_hash: bytes, group: int) -> Key:
    from vllm.v1.kv_offload.base import make_offload_key

    key: Key = make_offload_key(block_hash, group)
    return key
