"""The judge of `kvtune check` on answers that others published: `python -m bench.arms FOLDER`.

FOLDER has the files of receipts/ of malaiwah/qwen38-27b-exl3: each arm is a server that was asked the same 38 prompts.
They name each token by its text and give its own logprob alone, not those of the other first ones, so the judge sees
less than in a check. Prints a row an arm. An arm is never part of the noise that it is judged by.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvtune.answers.check.judge import RARE, Answer, distance, judged, limit
from kvtune.base.statistics import fisher

HEAD = "compared, equal answers, largest distance, limit, wrong, failed as published, of these wrong, chance of as many"
VERDICTS = "verdict, if all exchanged blocks were told"

COLD = ("B", "Bn", "B2")
"""Arms without a prefix cache. What an arm is compared with is the first; its distances from the others are the noise.
Bn is B again, B2 takes four requests at a time. An arm that is one of them is left out."""


class Asked(msgspec.Struct):
    """A request. `failed`: its answer is wrong or garbled, as the authors' own rules say."""

    request_id: str
    response_tokens: list[str]
    chosen_token_logprobs: list[float]
    failed: bool


class Arm(msgspec.Struct):
    rows: list[Asked]


class Arms(msgspec.Struct):
    arms: dict[str, Arm]


def read(folder: Path) -> dict[str, dict[str, tuple[Answer, bool]]]:
    """Return for each arm its answers, and whether they failed, by request."""
    paths = sorted(folder.rglob("arm-*.json.gz"))
    arms = {
        path.name[4:-8]: msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Arm) for path in paths
    }
    for path in folder.rglob("lmcache-l1-2x-raw/assembled.json"):
        others = msgspec.json.decode(path.read_bytes(), type=Arms).arms
        arms |= {f"{name}, two GPUs": arm for name, arm in others.items()}
    return {
        name: {row.request_id: (answer(row), row.failed) for row in arm.rows} for name, arm in arms.items()
    }


def answer(row: Asked) -> Answer:
    pairs = zip(row.response_tokens, row.chosen_token_logprobs, strict=True)
    return Answer(row.response_tokens, [{token: value} for token, value in pairs])


def row(name: str, arms: dict[str, dict[str, tuple[Answer, bool]]]) -> tuple[str, ...]:
    """Judge an arm as a check judges a path. No block was exchanged, and nothing asked again."""
    first, *others = (arms[each] for each in COLD if each != name)
    noise = [distance(first[key][0], other[key][0]) for other in others for key in first]
    beyond, count = limit(noise), len(arms[name])
    nats = {key: distance(first[key][0], each) for key, (each, _) in arms[name].items()}
    wrong = {key for key, value in nats.items() if value > beyond}
    failed = {key for key, (_, failed) in arms[name].items() if failed}
    equal = sum(first[key][0].tokens == each.tokens for key, (each, _) in arms[name].items())
    chance = fisher(len(wrong), count, len(wrong), count + len(noise))
    verdicts = (judged(len(wrong), count, seen, chance < RARE)[0] for seen in (0.0, 1.0))
    figures = (count, equal, f"{max(nats.values()):.3f}", f"{beyond:.3f}", len(wrong), len(failed))
    return (name, *map(str, figures), str(len(wrong & failed)), f"{chance:.2g}", *verdicts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    arms = read(parser.parse_args().folder)
    head = f"arm, {HEAD}, {VERDICTS}".split(", ")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in arms:
        print("|", " | ".join(row(name, arms)), "|")
