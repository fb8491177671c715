"""Retention of the store apart from that of the pool, by replay: `python bench/retention.py --traces FOLDER`.

The arms of vllm-project/vllm#46906, which is open: vLLM 0.32 and 0.33 have one flag for pool and store
(`--prefix-cache-retention-interval`). With it alone only the arms with equal intervals run; here the replay's connector
is given the other interval, in vLLM's own `SchedulerOffloadConfig`. Its store is vLLM's tier of host memory, not
Mooncake's. One line per arm: hits of both tiers, tokens loaded, chunks stored, chunks that were never read.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvtune.data.platforms import DEVICES
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.worker import prepare
from kvtune.reading.analysis.offload import offload
from kvtune.requests.loads.spec import build

ARMS: tuple[tuple[str, int, int | None], ...] = (
    ("store none", 0, None),
    ("store 4k", 0, 4096),
    ("store 0", 0, 0),
    ("pool 4k, store 4k", 4096, 4096),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", required=True, help="a folder of recorded agent sessions")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--gib", type=float, default=100)
    options = parser.parse_args()
    prepare("", "h100")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    from kvtune.lab.sim.replay import replay

    own: Any = scheduler.SchedulerOffloadConfig.from_spec.__func__
    spec = f"trace:format=weka,path={options.traces},sessions={options.sessions},hours={options.hours}"
    workload = build(spec, seed=0)
    for name, pool, store in ARMS:

        def with_store(cls: Any, *args: Any, store: int | None = store) -> Any:
            return own(cls, *args)._replace(retention_interval=store)

        scheduler.SchedulerOffloadConfig.from_spec = classmethod(with_store)
        flags = ["--kv-offloading-size", str(options.gib), "--prefix-cache-retention-interval", str(pool)]
        setup = Setup(
            model=options.model, engine_args=flags, device=Simulated(), platform=DEVICES["h100"], core="stock"
        )
        tier = offload(replay(workload, setup.sized()))
        assert tier is not None and tier.copies is not None
        hits = tier.pool_hit_tokens + tier.tier_hit_tokens
        print(
            f"{name:<18} {100 * hits / tier.prompt_tokens:6.2f} % hits of {tier.prompt_tokens:,} tokens, "
            f"{tier.tier_hit_tokens:,} loaded, {tier.copies.stored_chunks:,} chunks stored, "
            f"{tier.copies.unread_chunks:,} never read, {tier.copies.evicted_chunks:,} evicted",
            flush=True,
        )


if __name__ == "__main__":
    main()
