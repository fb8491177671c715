"""Mutated inputs in a child of 2 GiB; what crashes is kept in seeds/.

`python -m tests.fuzz [READER] [COUNT] [SEED]`. Without a reader, all of them; without a count, COUNT,
or FEWER of those that draw a page for each input.
"""

from __future__ import annotations

import sys

from tests.fuzz.readers import READERS
from tests.fuzz.run import fuzzed

COUNT, FEWER = 10_000, 1_000
DRAWN = ("page", "study")


def main(arguments: list[str]) -> int:
    names = [arguments.pop(0)] if arguments and arguments[0] in READERS else list(READERS)
    given, seed = (int(text) for text in (*arguments, "0", "0")[:2])
    failed = 0
    for name in names:
        outcome = fuzzed(name, given or (FEWER if name in DRAWN else COUNT), seed, keep=True)
        failed += len(outcome.wrong)
        print(
            f"{name}: {outcome.done:,} inputs, {outcome.read:,} read, {outcome.refused:,} refused, "
            f"{len(outcome.wrong)} kinds of crash, the longest {outcome.longest_s:.1f} s, "
            f"{outcome.peak_bytes >> 20} MiB at most",
            flush=True,
        )
        for what, number in outcome.wrong.items():
            print(f"  {number}: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
