"""Sends a workload's requests to AsyncLLM and records their times. Runs in the host, vLLM's front-end process.

Each request is one coroutine that iterates `AsyncLLM.generate`, as in vLLM's API server. A finished request is appended
to a file at once: a crash loses only requests in flight.

vLLM never answers a utility call (`get_supported_tasks`, which each first request makes, or `reset_prefix_cache`) whose
EngineCore died before it answered: what waits for an engine waits through `unless_dead`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from math import nan
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol, TypeVar
from zlib import crc32

import msgspec

from kvtune.engine.messages import Served
from kvtune.workload.feed import Feed
from kvtune.workload.tokens import prompt_ids
from kvtune.workload.types import Workload

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LOOK_S = 0.5
GRACE_S = 5.0
"""How long requests of a dead engine have to fail on their own, which says more."""

Result = TypeVar("Result")


class RequestLog:
    """Length-prefixed msgpack records, appended unbuffered: they survive a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._encode = msgspec.msgpack.Encoder().encode

    def append(self, served: Served) -> None:
        frame = self._encode(served)
        self._file.write(len(frame).to_bytes(4, "little") + frame)


def read_request_log(path: Path) -> list[Served]:
    """All complete records of the file; an incomplete last one is ignored."""
    raw = path.read_bytes() if path.exists() else b""
    decode = msgspec.msgpack.Decoder(Served).decode
    records: list[Served] = []
    at = 0
    while at + 4 <= len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + length > len(raw):
            break
        records.append(decode(raw[at + 4 : at + 4 + length]))
        at += 4 + length
    return records


class Driver:
    """One pass over a workload. `stop` ends it early: requests in flight are aborted and logged as unfinished."""

    def __init__(
        self,
        engine: AsyncLLM,
        workload: Workload,
        vocab_size: int,
        log: RequestLog,
        tier_hits: dict[str, int] | None = None,
    ) -> None:
        """`tier_hits`: by request, tokens that a tier of host memory gave back."""
        self._tier_hits = {} if tier_hits is None else tier_hits
        self._engine = engine
        self._workload = workload
        self._vocab = vocab_size
        self._log = log
        self._answers: dict[int, array[int]] = {}
        self._keep_answers = any(r.after is not None for r in workload.requests)
        self._changed = asyncio.Event()
        self._stopped = False
        self.failure: Exception | None = None
        self.sent = self.finished = self.output_tokens = self.hit_tokens = self.query_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        self._stopped = True
        self._changed.set()

    async def run(self, on_start: Callable[[int], None]) -> None:
        """Send everything and wait for the end. `on_start` gets the start of the workload in monotonic ns."""
        start = monotonic_ns()
        on_start(start)
        feed = Feed(self._workload)
        running: set[asyncio.Task[None]] = set()
        while not feed.done and not self._stopped and self.failure is None:
            now_s = (monotonic_ns() - start) / 1e9
            for index in feed.ready(now_s):
                task = asyncio.create_task(self._serve(index, feed, start))
                running.add(task)
                task.add_done_callback(running.discard)
            due = feed.next_time()
            wait_s = None if due is None else max(0.0, due - (monotonic_ns() - start) / 1e9)
            self._changed.clear()
            if wait_s == 0.0:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        if self._stopped or self.failure is not None:
            for task in list(running):
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _serve(self, index: int, feed: Feed, start: int) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        request = self._workload.requests[index]
        ids = prompt_ids(request.prompt, self._workload.seed, self._vocab, self._answers)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=self._engine.tokenizer is not None,
        )
        times, counts, made = array("q"), array("i"), array("d")
        answer = array("i")
        total, hits, finish, ended = 0, -1, "", 0
        self.sent += 1
        sent = monotonic_ns()
        try:
            async for output in self._engine.generate(tokens_input(ids), params, str(index)):
                now = monotonic_ns()
                if output.num_cached_tokens is not None:
                    hits = output.num_cached_tokens
                for part in output.outputs:
                    new = len(part.token_ids)
                    if new:
                        times.append(now)
                        counts.append(new)
                        made.append(getattr(output.metrics, "last_token_ts", nan))  # no metrics: no time
                        total += new
                        self.output_tokens += new
                        answer.extend(part.token_ids)
                    if part.finish_reason is not None:
                        finish = str(part.finish_reason)
                if output.finished:
                    ended = now
        except asyncio.CancelledError:
            finish = ""
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":
                self.failure = error
            else:
                finish, ended = "error", monotonic_ns()
                self.failure = self.failure or (error if self.finished == 0 else None)
        crc = crc32(answer.tobytes()) if total else 0
        self._log.append(
            Served(
                index,
                sent,
                ended,
                hits,
                total,
                finish,
                times.tobytes(),
                counts.tobytes(),
                crc,
                made.tobytes(),
                self._tier_hits.pop(str(index), 0),
            )
        )
        if ended:
            self.finished += 1
            self.query_tokens += len(ids)
            self.hit_tokens += max(0, hits)
            if self._keep_answers:
                self._answers[index] = answer
            feed.finished(index, (monotonic_ns() - start) / 1e9)
        self._changed.set()


class Engine(Protocol):
    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> BaseException: ...


async def unless_dead(
    engine: Engine, work: Coroutine[None, None, Result], look_s: float = LOOK_S, grace_s: float = GRACE_S
) -> Result:
    """The result of `work`. Raises the engine's error where the engine died and `work` does not end by itself."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=look_s))[0]:
            if engine.errored:
                await asyncio.wait({task}, timeout=grace_s)
                break
        if task.done():
            return task.result()
        raise engine.dead_error
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace_s)
