"""vLLM's scheduler, with a count of its own of what held requests back: the truth beside what a watch says.

`--scheduler-cls tests.servers.watch.witness.Witness` (or `AsyncWitness`) writes one line an event into the file that
WITNESS names. EngineCore imports it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Witnessing:
    """What `schedule` left waiting, and why; when the model ran; how many requests there were."""

    def schedule(self, *args: Any, **options: Any) -> Any:
        output = super().schedule(*args, **options)  # type: ignore[misc]
        running, all_waiting = self.get_request_counts()  # type: ignore[attr-defined]
        waiting = all_waiting - len(self.deferred_waiting)  # type: ignore[attr-defined]
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()  # type: ignore[attr-defined]
        held = []
        if waiting:
            head = self.waiting.peek_request()  # type: ignore[attr-defined]
            groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
            needs = groups * -(-head.num_tokens // self.block_size)  # type: ignore[attr-defined]
            left = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens  # type: ignore[attr-defined]
            if running >= self.max_num_running_reqs:  # type: ignore[attr-defined]
                held.append("seats")
            elif left <= 0:
                held.append("steps")
            if needs > free:
                held.append("pool")
        self._write("schedule", held, output.total_num_scheduled_tokens, len(output.preempted_req_ids or ()))
        return output

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        self._write("computed")
        done = super().update_from_output(*args, **options)  # type: ignore[misc]
        self._write("updated")
        return done

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._write("added")

    def finish_requests(self, *args: Any, **options: Any) -> Any:
        done = super().finish_requests(*args, **options)  # type: ignore[misc]
        self._write("finished")
        return done

    def _write(self, what: str, held: list[str] | None = None, tokens: int = 0, preempted: int = 0) -> None:
        if "_file" not in self.__dict__:
            self._file = Path(os.environ["WITNESS"]).open("a", buffering=1)  # noqa: SIM115
        requests = len(self.requests)  # type: ignore[attr-defined]
        line = [time.time(), what, requests, held or [], tokens, preempted]
        self._file.write(json.dumps(line) + "\n")


class Witness(_Witnessing, Scheduler):  # type: ignore[misc]
    pass


class AsyncWitness(_Witnessing, AsyncScheduler):  # type: ignore[misc]
    pass
