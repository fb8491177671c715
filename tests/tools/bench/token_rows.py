"""Sampled tokens of one step from worker to scheduler: pickling, unpickling, making rows. Stock against packed.

python tests/tools/bench/token_rows.py [--batch 1024]
"""

from __future__ import annotations

import argparse
import copyreg
import gc
import io
import pickle
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvtune.core.tokens import install, outputs
from kvtune.core.tokens import rows as tokens
from tests.core.steady_rig import ModelRunnerOutput


def dumps(output: Any, packed: bool) -> bytes:
    """As vLLM's message queue does it."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = dict(copyreg.dispatch_table)
    if packed:
        pickler.dispatch_table[ModelRunnerOutput] = install.reduce_output
    pickler.dump(output)
    return buffer.getvalue()


def microseconds(pair: tuple[Callable[[], Any], Callable[[], Any]], rounds: int = 400) -> tuple[float, float]:
    """Medians of both, taken in turn, the collector off."""
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for _ in range(rounds):
        for act, seen in zip(pair, times, strict=True):
            start = perf_counter()
            act()
            seen.append(perf_counter() - start)
    gc.enable()
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


def tracked(act: Callable[[], Any]) -> int:
    """Objects that the collector sees more of while the result is held."""
    gc.collect()
    gc.disable()
    before = gc.get_count()[0]
    held = act()
    objects = gc.get_count()[0] - before
    gc.enable()
    del held
    return objects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, default=1024)
    batch = parser.parse_args().batch
    flat = [i % 4000 for i in range(batch)]
    rows = [[token] for token in flat]
    names = [f"{i}-0123abcd" for i in range(batch)]

    def output(sampled: Any) -> Any:
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        )

    stock, ours, passing = output(rows), output(rows), output(tokens.PassingRows.of_flat(flat))
    stock_bytes, our_bytes = dumps(stock, False), dumps(ours, True)
    # Without the names and the index, which are the same on both sides.
    bare = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=rows)
    bare_stock, bare_ours = dumps(bare, False), dumps(bare, True)

    def made(data: bytes) -> Any:
        unpickled = pickle.loads(data)
        tokens.make_rows(unpickled)
        return unpickled

    lines: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("pickle, from lists", lambda: dumps(stock, False), lambda: dumps(ours, True)),
        ("pickle, from an array", lambda: dumps(stock, False), lambda: dumps(passing, True)),
        ("unpickle", lambda: pickle.loads(stock_bytes), lambda: pickle.loads(our_bytes)),
        ("unpickle tokens alone", lambda: pickle.loads(bare_stock), lambda: pickle.loads(bare_ours)),
        ("unpickle, rows made", lambda: pickle.loads(bare_stock), lambda: made(bare_ours)),
        (
            "rows for the output",
            lambda: [[token] for token in flat],
            lambda: list(map(outputs.OneToken, flat)),
        ),
    ]
    print(f"batch {batch}              microseconds: stock   kvtune    objects tracked: stock  kvtune")
    for name, theirs, mine in lines:
        before, after = microseconds((theirs, mine))
        print(f"{name:24} {before:18.1f} {after:8.1f} {tracked(theirs):22} {tracked(mine):7}")
    print(f"{'bytes':24} {len(stock_bytes):18} {len(our_bytes):8}")


if __name__ == "__main__":
    main()
