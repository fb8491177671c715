"""Opens many streams on AsyncLLM with the core, on a device that takes no time: some are cancelled, some read late.

Started by test_streams.py, in a process of its own; prints what is left after each round, as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvtune.engine.front_end.config import engine_config, parse_engine_args
from kvtune.engine.models import builtin, engine_defaults

STREAMS, TOKENS, ROUNDS = 2000, 40, 4


async def run() -> list[dict[str, int]]:
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvtune.core.outputs.install import READER
    from kvtune.fake_device.settings import read_device
    from kvtune.fake_device.shape import shape

    words = [word for name, value in engine_defaults("tiny-opt").items() for word in (f"--{name}", value)]
    words = [*filter(None, words), "--model", str(builtin("tiny-opt"))]
    config = engine_config(parse_engine_args([*words, "--max-num-seqs", "1024"]))
    shape(config, read_device())
    engine = AsyncLLM.from_vllm_config(config)
    reader = getattr(engine.output_processor, READER)
    left = []

    async def stream(number: int, name: str) -> int:
        kind = RequestOutputKind.FINAL_ONLY if number % 5 == 4 else RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=kind)
        tokens = 0
        async for chunk in engine.generate(tokens_input([2 + number % 100] * 8), params, name):
            tokens += len(chunk.outputs[0].token_ids)
            if number % 5 == 1 and tokens > 3:
                return -1  # a client that goes away
            if number % 5 == 2:
                await asyncio.sleep(0.05)  # a slow one
        return tokens

    try:
        for turn in range(ROUNDS):
            names = [f"{turn}-{number}" for number in range(STREAMS)]
            tasks = [asyncio.create_task(stream(number, name)) for number, name in enumerate(names)]
            await asyncio.sleep(1.0)
            for task in tasks[3::5]:
                task.cancel()
            got = await asyncio.gather(*tasks, return_exceptions=True)
            from collections import Counter

            print(Counter(map(str, got)).most_common(8), flush=True)
            complete = sum(tokens == TOKENS for tokens in got)
            del tasks, got
            await asyncio.sleep(0.5)
            gc.collect()
            rows = [row for each in reader._engines.values() for row in each.rows if row is not None]
            left.append(
                {
                    "complete": complete,
                    "states": len(engine.output_processor.request_states),
                    "rows": len(rows) + len(reader._states.rows),
                    "slots": sum(len(each.names) for each in reader._engines.values()),
                    "objects": len(gc.get_objects()),
                }
            )
    finally:
        engine.shutdown(timeout=1.0)
    return left


if __name__ == "__main__":
    left = asyncio.run(run())
    print("left", json.dumps(left))
