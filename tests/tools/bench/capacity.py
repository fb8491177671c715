"""Writes reports/tables/capacity.md: how many recorded sessions fit a 70B model on 4 x 80 GiB, and how long that takes.

python -m tests.tools.bench.capacity [--made 739]: the last part is of as many sessions, made of the recorded ones.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from kvtune.cli.app import run
from tests.recorded_sessions import unpacked

TABLE = Path(__file__).parents[3] / "reports" / "tables" / "capacity.md"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}
"""Llama 3.1 70B."""
ASKED: tuple[tuple[str, list[str]], ...] = (
    ("Step times not known", []),
    ("Step times of a 70B by arithmetic: 15 ms + 0.07 ms a prompt token", ["--cost", "token=0.07,step=15"]),
)


ABOUT = (
    "the 31 recorded sessions of tests/data on the shape of Llama 3.1 70B in bf16, as on one device of 320 GiB. "
    "Simulated: no GPU was used."
)
ALIKE = (1, 1, 2, 2, 3, 4)
"""How many recorded sessions make a longer one. The 739 published ones have 2.4 times as many requests as the 31."""
REST_S = 60.0


def made(recorded: Path, folder: Path, count: int) -> Path:
    """Write `count` sessions, each of recorded ones after each other: the next goes on from the last one's context."""
    rng = random.Random(count)
    sessions = [json.loads(file.read_text()) for file in sorted(recorded.glob("*.json"))]
    folder.mkdir()
    for number in range(count):
        first, *others = (rng.choice(sessions) for _ in range(rng.choice(ALIKE)))
        whole: dict[str, Any] = {**first, "id": f"made-{number}", "totals": {}}
        whole["requests"] = list(first["requests"])
        for other in others:
            whole["requests"] += continued(whole["requests"], other["requests"])
        (folder / f"made_{number:04}.json").write_text(json.dumps(whole))
    return folder


def continued(before: list[dict[str, Any]], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a session's requests with the context of an earlier one before them. Sub-agents begin without it."""
    last = [one for one in before if "hash_ids" in one][-1]
    new = 1 + max(most_id(one) for one in before)
    began_s = max(one["t"] + one.get("api_time", 0.0) for one in before) + REST_S

    def moved(one: dict[str, Any], context: list[int]) -> dict[str, Any]:
        one = {**one, "t": one["t"] + began_s}
        if "hash_ids" not in one:
            return {**one, "requests": [moved(each, []) for each in one["requests"]]}
        ids = context + [new + each for each in one["hash_ids"]]
        return {**one, "in": one["in"] + 64 * len(context), "hash_ids": ids}

    return [moved(one, last["hash_ids"]) for one in requests]


def most_id(one: dict[str, Any]) -> int:
    if "hash_ids" in one:
        return max(one["hash_ids"], default=0)
    return max((most_id(each) for each in one["requests"]), default=0)


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def asked(model: Path, sessions: Path, words: list[str]) -> list[str]:
    """Return a command's answer and what it took."""
    out = io.StringIO()
    began_s, began_cpu_s, load = time.monotonic(), cpu_s(), os.getloadavg()[0]
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        engine = ["--like-device", "320GiB", *words, "--", "--load-format", "dummy", "--skip-tokenizer-init"]
        code = run(["capacity", str(model), "-w", f"trace:path={sessions}", *engine])
    assert code == 0, out.getvalue()
    took = f"{cpu_s() - began_cpu_s:.0f} CPU seconds, {time.monotonic() - began_s:.0f} s"
    return [
        f"{took} on two cores with a load of {load:.1f} before.",
        "",
        "```",
        out.getvalue().rstrip(),
        "```",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--made", type=int, default=739)
    count = parser.parse_args().made
    parts = ["# How many sessions fit", "", f"`python -m tests.tools.bench.capacity`: {ABOUT}"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "llama-70b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE))
        sessions = unpacked(folder)
        for title, words in ASKED:
            parts += ["", f"## {title}", "", *asked(model, sessions, words)]
        title, words = ASKED[1]
        parts += ["", f"## {count} sessions. {title}", ""]
        parts += [
            "Made of the 31: each is one to four of them after each other, in one context.",
            "",
        ]
        parts += asked(model, made(sessions, folder / "made", count), words)
    TABLE.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
