"""What a log of text costs to read, render and turn into a workload: seconds and peak memory, in a new process.

`python tests/tools/bench/requests_log.py [--requests 10000] [--tokens 4000] [--explain]`. The tokenizer is a BPE of
8,000 tokens that is trained on this repository's prose; a quarter of each prompt is one of eight shared system
prompts. With --explain a time stamp stands in front of it, and `explain --bounds-only` says what that breaks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.tokenizers import make_tokenizer

ROOT = Path(__file__).parents[3]
WORDS = 8_000
SHARED = 8


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--requests", type=int, default=10_000)
    reader.add_argument("--tokens", type=int, default=4_000)
    reader.add_argument("--tokenizer", default="", help="a folder, or bytes; by default one is trained")
    reader.add_argument("--explain", action="store_true")
    reader.add_argument("--read", default="", help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.read:
        (explain if asked.explain else read)(asked.read, asked.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        prose = [
            path.read_text(encoding="utf-8")
            for path in sorted(ROOT.glob("**/*.md"))
            if ".venv" not in str(path)
        ]
        tokenizer = asked.tokenizer or str(trained(Path(folder), prose))
        log = Path(folder, "log.jsonl")
        write(log, prose, asked.requests, asked.tokens, timed=asked.explain)
        print(f"{asked.requests:,} requests, {log.stat().st_size / 1e6:.0f} MB", flush=True)
        again = ["--read", str(log), "--tokenizer", tokenizer, *(["--explain"] if asked.explain else [])]
        subprocess.run([sys.executable, __file__, *again], check=True, cwd=ROOT)


def trained(folder: Path, prose: list[str]) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    made = make_tokenizer(folder / "tokenizer", "chatml")
    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(prose, vocab_size=WORDS, special_tokens=special, show_progress=False)
    bpe.save(str(made / "tokenizer.json"))
    return made


def write(log: Path, prose: list[str], requests: int, tokens: int, *, timed: bool) -> None:
    """Chats of about `tokens` tokens: a word and the space before it are about 1.6."""
    draw = random.Random(0)
    words = re.findall(r"\S+", " ".join(prose))
    length = int(tokens / 1.6)

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    systems = [text(length // 4) for _ in range(SHARED)]
    with log.open("w", encoding="utf-8") as file:
        for number in range(requests):
            stamp = (
                f"Time: {number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}. " if timed else ""
            )
            said = [("system", stamp + systems[number % SHARED])]
            said += [(role, text(length // 4)) for role in ("user", "assistant", "user")]
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": messages, "max_tokens": 100}) + "\n")


def read(log: str, tokenizer: str) -> None:
    from kvtune.workload.sources import Sources
    from kvtune.workload.spec import build

    start = time.perf_counter()
    sources = Sources()
    sources.renderer(tokenizer)
    loaded = time.perf_counter()
    work = build(f"requests:path={log},tokenizer={tokenizer}", sources=sources)
    ended = time.perf_counter()
    tokens = sum(request.prompt_tokens for request in work.requests)
    del sources  # ends the process that rendered, so that its time and memory count
    used, child = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_s = used.ru_utime + used.ru_stime + child.ru_utime + child.ru_stime
    print(
        f"{tokens / len(work.requests):,.0f} tokens a request; {loaded - start:.1f} s to load the tokenizer, "
        f"{ended - loaded:.1f} s to read, render and build; {cpu_s:.1f} s of CPU time in all; "
        f"peak {used.ru_maxrss / 1024:,.0f} MiB, and {child.ru_maxrss / 1024:,.0f} MiB of the process that rendered"
    )


def explain(log: str, tokenizer: str) -> None:
    from tests.simulator import run

    start = time.perf_counter()
    run(["explain-log", f"{log},tokenizer={tokenizer}", "--bounds-only"])
    ended = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{ended - start:.1f} s for `explain --bounds-only`, {used.ru_utime + used.ru_stime:.1f} s of CPU time; "
        f"peak {used.ru_maxrss / 1024:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
