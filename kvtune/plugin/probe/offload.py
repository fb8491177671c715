"""Counts a host-memory tier's copies each way, how long requests waited for them, and chunks used again.

In EngineCore and the simulator. It wraps methods of one OffloadingConnector on the scheduler's side, where every copy
begins and ends, and changes no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvtune.plugin.probe.records import Copies
from kvtune.plugin.vllm.patches import in_place_of
from kvtune.plugin.vllm.types import (
    Key,
    KVConnectorOutput,
    Matched,
    PrepareStoreOutput,
    ReqContext,
    Request,
    SchedulerSide,
    TierConnector,
    TierManager,
    VllmConfig,
    has_tier,
)


def tier_facts(connector: TierConnector, config: VllmConfig) -> dict[str, object]:
    """Return the tier as vLLM resolved it. `bytes` has room for `chunks` chunks of `blocks_per_chunk` blocks each."""
    transfer = config.kv_transfer_config
    extra: Mapping[str, object] = {} if transfer is None else transfer.kv_connector_extra_config
    return {
        "bytes": int(float(str(extra.get("cpu_bytes_to_use", 0)))),
        "chunks": int(connector.connector_scheduler.manager._num_chunks),
        "blocks_per_chunk": int(str(extra.get("blocks_per_chunk", 1))),
        "policy": str(extra.get("eviction_policy", "lru")),
    }


class OffloadWatch:
    """Sums one connector's copies since the last `news`. `now_ns` returns the time, which may be virtual."""

    def __init__(self, connector: TierConnector, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._began: dict[str, int] = {}  # by request: when its lookup was put off, or its load began
        self._unread: set[Key] = set()  # stored, and not loaded since
        self._start()
        side = connector.connector_scheduler
        self._watch_manager(side.manager)
        self._watch_lookups(side)
        self._watch_copies(side)

    def _start(self) -> None:
        self._counts = dict.fromkeys(Copies.__struct_fields__[1:], 0.0)
        self._quiet = True

    def _count(self, **more: float) -> None:
        self._quiet = False
        for name, number in more.items():
            self._counts[name] += number

    def _watch_manager(self, manager: TierManager) -> None:
        unread = self._unread

        @in_place_of(manager, "prepare_store")
        def storing(
            prepare: Callable[..., PrepareStoreOutput | None], keys: Collection[Key], context: ReqContext
        ) -> PrepareStoreOutput | None:
            stores = prepare(keys, context)
            if stores is None:
                self._count(refused=1)
            elif stores.keys_to_store:
                stored, evicted = len(stores.keys_to_store), len(stores.evicted_keys)
                self._count(stored_chunks=stored, evicted_chunks=evicted)
                unread.difference_update(stores.evicted_keys)
                unread.update(stores.keys_to_store)
            return stores

        @in_place_of(manager, "prepare_load")
        def loading(prepare: Callable[..., object], keys: Collection[Key], context: ReqContext) -> object:
            before = len(unread)
            unread.difference_update(keys)
            self._count(reused_chunks=before - len(unread))
            self._began.setdefault(context.req_id, self._now_ns())
            return prepare(keys, context)

        @in_place_of(manager, "complete_load")
        def loaded(complete: Callable[..., None], keys: Collection[Key], context: ReqContext) -> None:
            complete(keys, context)
            self._count(loads=1)
            self._waited(context.req_id)

        @in_place_of(manager, "reset_cache")
        def reset(reset_cache: Callable[[], None]) -> None:
            reset_cache()
            unread.clear()
            self._began.clear()

    def _watch_lookups(self, side: SchedulerSide) -> None:
        """Time requests that wait because their tokens are being stored, or loaded for another request."""

        @in_place_of(side, "get_num_new_matched_tokens")
        def looking_up(
            look_up: Callable[..., Matched], request: Request, *args: object, **options: object
        ) -> Matched:
            looked_up = look_up(request, *args, **options)
            if looked_up[0] is None:
                self._began.setdefault(request.request_id, self._now_ns())
            elif not looked_up[0] and self._began:
                self._waited(request.request_id)
            return looked_up

    def _watch_copies(self, side: SchedulerSide) -> None:
        @in_place_of(side, "update_connector_output")
        def updating(update: Callable[[KVConnectorOutput], None], output: KVConnectorOutput) -> None:
            meta = output.kv_connector_worker_meta
            if meta is not None:
                store, load = meta.transfer_stats.store, meta.transfer_stats.load
                if store.bytes or load.bytes:
                    self._count(stored_bytes=store.bytes, store_ns=store.time * 1e9)
                    self._count(loaded_bytes=load.bytes, load_ns=load.time * 1e9)
            update(output)

    def _waited(self, request_id: str) -> None:
        began = self._began.pop(request_id, None)
        if began is not None:
            waited = self._now_ns() - began
            longest = self._counts["longest_wait_ns"]
            self._count(wait_ns=waited, longest_wait_ns=max(0.0, waited - longest))

    def news(self, start_ns: int) -> Copies | None:
        """Return the copies since the last call as a record of the step begun at `start_ns`; None without copies."""
        if self._quiet:
            return None
        copies = Copies(start_ns, *map(round, self._counts.values()))
        self._start()
        return copies


def offload_watch(connector: object, now_ns: Callable[[], int]) -> OffloadWatch | None:
    """Return what counts the copies of a scheduler's connector; None if it is no tier of host memory."""
    return OffloadWatch(connector, now_ns) if has_tier(connector) else None
