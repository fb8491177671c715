"""Sends a workload's requests to vLLM's front end and records their times. Runs in the host process.

Each request is one coroutine, which iterates `AsyncLLM.generate`, as in vLLM's API server: the tokens of each step come
as they are made. A finished request is appended to a file at once: a crash loses only requests in flight.

If EngineCore dies, vLLM never answers a utility call that is under way (`get_supported_tasks`, made by the first
request, or `reset_prefix_cache`). So every wait for an engine goes through `unless_dead`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from math import nan
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

import msgspec

from kvtune.base.files import appending
from kvtune.lab.engine.messages import Served
from kvtune.lab.feed import Feed
from kvtune.requests.loads.tokens import prompt_ids
from kvtune.requests.types import Request, Workload

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LOOK_S = 0.5
GRACE_S = 5.0
"""Seconds to wait, after the engine died, for its requests to fail: their errors name the cause."""

Result = TypeVar("Result")


class RequestLog:
    """A file of length-prefixed msgpack records. Writes are unbuffered: they survive a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = appending(path, private=True, buffering=0)
        self._encode = msgspec.msgpack.Encoder().encode

    def append(self, served: Served) -> None:
        frame = self._encode(served)
        self._file.write(len(frame).to_bytes(4, "little") + frame)

    def close(self) -> None:
        self._file.close()


def read_request_log(path: Path) -> list[Served]:
    """Return all complete records of the file; an incomplete last one is ignored."""
    raw = path.read_bytes() if path.exists() else b""
    decode = msgspec.msgpack.Decoder(Served).decode
    records: list[Served] = []
    nth = 0
    while nth + 4 <= len(raw):
        length = int.from_bytes(raw[nth : nth + 4], "little")
        if nth + 4 + length > len(raw):
            break
        records.append(decode(raw[nth + 4 : nth + 4 + length]))
        nth += 4 + length
    return records


class Answer:
    """One request's answer so far: the time of each delivery, its number of tokens, and when EngineCore made them."""

    __slots__ = ("counts", "ended", "finish", "hits", "made", "times", "tokens")

    def __init__(self) -> None:
        self.times, self.counts, self.made = array("q"), array("i"), array("d")
        self.tokens = array("i")
        self.hits, self.finish, self.ended = -1, "", 0


class Driver:
    """Sends a workload once. `stop` ends it early: requests in flight are aborted and logged as unfinished."""

    def __init__(
        self,
        engine: AsyncLLM,
        workload: Workload,
        vocab_size: int,
        log: RequestLog,
        tier_hits: dict[str, int],
    ) -> None:
        """`tier_hits`: prompt tokens that came from a tier of host memory, by request index (as text)."""
        self._engine = engine
        self._tier_hits = tier_hits
        self._workload = workload
        self._vocab = vocab_size
        self._log = log
        self._answers: dict[int, array[int]] = {}
        self._keep_answers = any(r.after for r in workload.requests)
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
        """Send all requests and wait until they end. `on_start` gets the workload's start time (monotonic ns)."""
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
        self._log.close()

    async def ask(self, index: int, request: Request, ids: list[int], answer: Answer) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=self._engine.tokenizer is not None,
        )
        times, counts, made, tokens = answer.times, answer.counts, answer.made, answer.tokens
        async for output in self._engine.generate(tokens_input(ids), params, str(index)):
            now = monotonic_ns()
            if output.num_cached_tokens is not None:
                answer.hits = output.num_cached_tokens
            for part in output.outputs:
                new = len(part.token_ids)
                if new:
                    times.append(now)
                    counts.append(new)
                    made.append(getattr(output.metrics, "last_token_ts", nan))  # no metrics: no time
                    self.output_tokens += new
                    tokens.extend(part.token_ids)
                if part.finish_reason is not None:
                    answer.finish = str(part.finish_reason)
            if output.finished:
                answer.ended = now

    async def _serve(self, index: int, feed: Feed, start: int) -> None:
        request = self._workload.requests[index]
        ids = prompt_ids(request.prompt, self._workload.seed, self._vocab, self._answers)
        answer = Answer()
        self.sent += 1
        sent = monotonic_ns()
        try:
            await self.ask(index, request, ids, answer)
        except asyncio.CancelledError:
            answer.finish = ""
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":
                self.failure = error
            else:
                answer.finish, answer.ended = "error", monotonic_ns()
                self.failure = self.failure or (error if self.finished == 0 else None)
        tokens = answer.tokens
        self._log.append(
            Served(
                index,
                sent,
                answer.ended,
                answer.hits,
                len(tokens),
                answer.finish,
                answer.times.tobytes(),
                answer.counts.tobytes(),
                crc32(tokens.tobytes()) if tokens else 0,
                answer.made.tobytes(),
                self._tier_hits.pop(str(index), 0),
            )
        )
        if answer.ended:
            self.finished += 1
            self.query_tokens += len(ids)
            self.hit_tokens += max(0, answer.hits)
            if self._keep_answers:
                self._answers[index] = tokens
            feed.finished(index, (monotonic_ns() - start) / 1e9)
        self._changed.set()


async def unless_dead(
    engine: AsyncLLM, work: Coroutine[None, None, Result], look_s: float = LOOK_S, grace_s: float = GRACE_S
) -> Result:
    """Return the result of `work`. Raise the engine's error if the engine dies and `work` does not end in `grace_s`."""
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
