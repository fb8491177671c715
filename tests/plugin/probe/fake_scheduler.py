"""A fake scheduler whose steps are one prefill and two decodes, and an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Scheduler:
    def __init__(self) -> None:
        self.running = [1, 2, 3]
        self.waiting = [4]
        pool = SimpleNamespace(get_num_free_blocks=lambda: 77)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self, throttle: bool = False) -> Any:
        return SimpleNamespace(
            total_num_scheduled_tokens=130,
            num_scheduled_tokens={"a": 1, "b": 1, "c": 128},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=["a", "b"],
                num_computed_tokens=[500, 700],
                num_output_tokens=[3, 9],
                resumed_req_ids=set(),
            ),
            finished_req_ids=set(),
            preempted_req_ids=None,
            scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=64)],
        )

    def update_from_output(self, output: Any, model_output: Any) -> str:
        return f"updated {model_output}"


class Engine:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.model_executor = SimpleNamespace(execute_model=None, sample_tokens=None)
        self.batch_queue = None
        self.result = ""
        self.execute = True

    def step(self) -> bool:
        if self.execute:
            output = self.scheduler.schedule(False)
            self.result = self.scheduler.update_from_output(output, "tokens")
        return self.execute
