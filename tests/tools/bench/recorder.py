"""What `kvtune serve --record` costs EngineCore: CPU time of requests with and without the recorder, paired.

    python tests/tools/bench/recorder.py [--outputs 16,128] [--prompt 1500] [--pairs 40] [--server]

Two of vLLM's schedulers in this process get the same batches in turn (A B, B A, ..): one with the recorder as a served
engine has it (trace and counters), one without. Counted is what EngineCore's process does for a batch besides waiting
for the model: decoding the requests, hashing their blocks, scheduling, the messages to the worker and to the front end.
The front end's own work is host cost, too: `--server` measures it, on a real server without a tokenizer (token ids in
and out, no streaming: the least that a front end does), and gives the recorder's share of both.

`in its hooks` is the CPU time between entry and exit of what the recorder put around vLLM's calls (less what reading
the clock takes), as a share of the same side's whole. The paired ratio holds what it does to others' caches as well,
and a busy machine's noise: its interval is of the mean of the pairs' logarithms (Student, 95 %).
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from kvtune.core.steps import scheduler as steady
from kvtune.knobs import CoreSettings
from kvtune.probe.recorder import Recorder
from tests.core import steady_rig as rig
from tests.tools.bench.ratio import ratio

BATCH = 16
HASHED = 16  # tokens of a block, a GPU's usual one


class Side:
    """One EngineCore, as far as requests pass through it."""

    def __init__(self, prompt: int, core: str, folder: Path | None) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        blocks = BATCH * (prompt // HASHED + 200)
        shape = rig.Shape(blocks=blocks, block=HASHED, seqs=BATCH, batched=8192, max_len=32_768)
        self.scheduler = rig.build(shape)
        if core == "kvtune":
            steady.adopt(self.scheduler, CoreSettings())
        self.in_hooks_ns = 0
        if folder is not None:
            recorder = Recorder(folder / "trace.jsonl", folder)
            self._time_hooks(recorder)
            recorder.attach(self.scheduler)
        self.hasher = rig.get_request_block_hasher(HASHED, rig.sha256)
        self.coming, self.leaving = MsgpackDecoder(EngineCoreRequest), MsgpackEncoder()

    def _time_hooks(self, recorder: Any) -> None:
        """Everything that the recorder does for a request goes through its guard."""
        guard, clock_ns = recorder._guard, _clock_ns()

        def timed(do: Any, request: Any) -> None:
            start = thread_time_ns()
            guard(do, request)
            self.in_hooks_ns += thread_time_ns() - start - clock_ns

        recorder._guard = timed

    def serve(self, wire: list[Any]) -> int:
        """CPU nanoseconds from the requests' bytes to the last answer's."""
        scheduler = self.scheduler
        start = thread_time_ns()
        for message in wire:
            scheduler.add_request(
                rig.Request.from_engine_core_request(self.coming.decode(message), self.hasher)
            )
        while scheduler.has_requests():
            scheduled = scheduler.schedule()
            pickle.dumps(scheduled, pickle.HIGHEST_PROTOCOL)
            names = list(scheduled.num_scheduled_tokens)
            output = rig.ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] if self._answers(name) else [] for name in names],
            )
            for outputs in scheduler.update_from_output(scheduled, output).values():
                self.leaving.encode(outputs)
        return thread_time_ns() - start

    def _answers(self, name: str) -> bool:
        one = self.scheduler.requests[name]
        return bool(one.num_computed_tokens >= one.num_tokens)


def _clock_ns() -> int:
    """What lies between two readings of the clock with nothing between them."""
    collected = []
    for _ in range(1000):
        start = thread_time_ns()
        collected.append(thread_time_ns() - start)
    return sorted(collected)[500]


def batch(number: int, prompt: int, output: int, chance: random.Random) -> list[Any]:
    """New prompts, as the front end sends them."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()
    params = rig.SamplingParams(max_tokens=output, ignore_eos=True, output_kind=rig.RequestOutputKind.DELTA)
    collected = []
    for i in range(BATCH):
        tokens = [chance.randrange(rig.VOCAB) for _ in range(prompt)]
        made = EngineCoreRequest(
            request_id=f"r{number}-{i}",
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        collected.append([bytes(part) for part in encoder.encode(made)])
    return collected


def front_end_us(prompt: int, outputs: list[int], batches: int = 6) -> dict[int, float]:
    """CPU time of the server's own process for a request, by output tokens; as many at once as EngineCore gets here."""
    import psutil

    from tests.engine.serving import served
    from tests.tune.recipes.test_full_circle import FLAGS, ask, kvtune

    by_name = {}
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="kvtune-recorder-") as folder:
        command = kvtune("serve", "tiny-opt", "--record", str(Path(folder) / "trace.jsonl"), "--")
        with served(Path(folder), command, FLAGS) as base, ThreadPoolExecutor(BATCH) as pool:
            (server,) = psutil.Process().children()
            for output in outputs:
                for number in range(-1, batches):
                    if number == 0:
                        before = server.cpu_times()
                    prompts = [[chance.randrange(10, 4000) for _ in range(prompt)] for _ in range(BATCH)]
                    list(pool.map(lambda tokens, n=output: ask(base, tokens, "tiny-opt", n), prompts))
                after = server.cpu_times()
                spent_s = after.user + after.system - before.user - before.system
                by_name[output] = 1e6 * spent_s / batches / BATCH
    return by_name


def measure(prompt: int, output: int, pairs: int, core: str, front_us: float) -> str:
    with tempfile.TemporaryDirectory(prefix="kvtune-recorder-") as folder:
        bare, recorded = Side(prompt, core, None), Side(prompt, core, Path(folder))
        chance = random.Random(0)
        spent = []
        for number in range(-4, pairs):
            wire = batch(number, prompt, output, chance)
            gc.collect()
            sides = (bare, recorded) if number % 2 else (recorded, bare)
            cost = {side: side.serve(wire) for side in sides}
            if number < 0:
                recorded.in_hooks_ns = 0
            else:
                spent.append((cost[bare], cost[recorded]))
        written = len((Path(folder) / "trace.jsonl").read_text().splitlines())
        assert written == BATCH * (pairs + 4), "the recorder switched itself off"
    times = np.array(spent, dtype=float)
    middle, low, high = ratio(times[:, 0], times[:, 1])
    cost_us = (times[:, 1] - times[:, 0]) / BATCH / 1000
    hooks_us, share = recorded.in_hooks_ns / BATCH / pairs / 1000, recorded.in_hooks_ns / times[:, 1].sum()
    both_us = times[:, 1].mean() / BATCH / 1000 + front_us
    whole = f"{front_us:6.0f} us, {100 * hooks_us / both_us:.2f} %" if front_us else "not measured"
    return (
        f"{core:<7} {prompt:>7} {output:>7}  {times[:, 0].mean() / BATCH / 1000:9.0f} us  "
        f"{hooks_us:7.1f} us = {100 * share:.2f} %  {whole}  {np.median(cost_us):7.1f} us  "
        f"{middle:.4f} ({low:.4f} to {high:.4f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--outputs", default="16,128")
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--server", action="store_true", help="measure the front end as well")
    options = parser.parse_args()
    outputs = [int(text) for text in options.outputs.split(",")]
    front_us = front_end_us(options.prompt, outputs) if options.server else {}
    print(
        "core     prompt  output   EngineCore   in its hooks    front end, of both   median pair   ratio with / without"
    )
    for core in ("stock", "kvtune"):
        for output in outputs:
            told = measure(options.prompt, output, options.pairs, core, front_us.get(output, 0.0))
            print(told, flush=True)


if __name__ == "__main__":
    main()
