"""What flags keep of recurrent states, for hybrids on an H100: `python -m bench.states [NAME ..]`.

Each row is `kvtune sweep NAME --states --like-device h100` for the same load, at 15 prefixes. The answers
go to reports/tables/states.json, from which `make docs` writes the table of reports/evidence/models.md.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtune.answers.states.table import Row, States, states_of
from kvtune.base.errors import KvtuneError
from kvtune.base.scratch import scratch
from kvtune.base.units import count, percent, size
from kvtune.data.platforms import DEVICES
from kvtune.lab.lab import LAB
from kvtune.lab.setup.resolve import check_engine
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reports" / "tables" / "states.json"
CONFIGS = ROOT / "tests" / "data" / "layout" / "configs"
PREFIXES = (15,)
LOAD = "rounds:prefixes={},prefix=6000,suffix=1500,output=8,rounds=3"
FLAGS = ["--kv-cache-memory-bytes", "40000000000", "--max-model-len", "32768"]
MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']
MODELS: dict[str, tuple[str, list[str]]] = {
    "qwen3-next-80b": ("qwen3-next-80b", []),
    "qwen3-next-80b, MTP": ("qwen3-next-80b", MTP),
    "qwen3.5-27b": ("qwen3.5-27b", []),
    "qwen3.5-27b, MTP": ("qwen3.5-27b", MTP),
    "nemotron-3-nano": ("nemotron-3-nano", []),
    "nemotron-3-super, MTP": ("nemotron-3-super", MTP),
    "granite-4.0-h-tiny": ("granite-4.0-h-tiny", []),
    "lfm2.5-8b-a1b": ("lfm2.5-8b-a1b", []),
    "jamba-1.5-mini": ("jamba-1.5-mini.json", []),
    "olmo-hybrid-7b": ("olmo-hybrid-7b.json", []),
}
"""A model, or a published config.json of tests/data/layout/configs, and vLLM's flags."""
H100 = DEVICES["h100"]
FOLDERS = re.compile(r"/\S*/")
"""Places on this machine, in vLLM's messages."""


def answered(name: str, prefixes: int) -> States | str:
    """Return the table, or vLLM's refusal."""
    model, flags = MODELS[name]
    with scratch("states") as folder:
        if model.endswith(".json"):
            shutil.copy(CONFIGS / model, folder / "config.json")
            model, flags = str(folder), [*flags, "--skip-tokenizer-init"]
        try:
            setup = Setup(model=model, engine_args=[*FLAGS, *flags], platform=H100, core="kvtune").sized()
            with LAB.simulators(model, H100) as simulators:
                made = states_of(setup, build(LOAD.format(prefixes), seed=1), simulators.outcomes)
        except KvtuneError as error:
            return error.message
    assert made is not None
    rows = [msgspec.structs.replace(row, why_not=FOLDERS.sub("", row.why_not)) for row in made.rows]
    return msgspec.structs.replace(made, model=name, serve="", rows=rows)


def rows_without_drafts(states: States) -> list[Row]:
    """Return the replayed rows that add or take no drafts."""
    return [row for row in states.rows if row.visits and "--speculative-config" not in " ".join(row.flags)]


def shown_rows(states: States) -> dict[str, Row]:
    """Return the row of no setting, the best one by flags, and the core's best."""
    rows = rows_without_drafts(states)
    by_core = [row for row in rows if "core." in " ".join(row.flags)]
    by_flags = [row for row in rows if row.flags and row not in by_core]
    bests = {
        name: max(of, key=hit_tokens, default=None) for name, of in (("flags", by_flags), ("core", by_core))
    }
    return {"as it is": rows[0], **{name: row for name, row in bests.items() if row}}


def hit_tokens(row: Row) -> int:
    return row.hit_tokens or 0


def lines() -> Iterator[str]:
    """Yield the table of reports/evidence/models.md.

    "at most" are the hits if each prefix hit at visit 2 as at visit 3: what one could reach that keeps each state at
    the last whole block of a shared prefix, and loses none.
    """
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    yield "| model | | visit 2 | visit 3 | all hits | at most | states a session | sessions fit | tail | flags |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, by_prefixes in results.items():
        stored = by_prefixes[str(PREFIXES[0])]
        if isinstance(stored, str):
            yield f"| {name} | refused: {stored} | | | | | | | | |"
            continue
        states = msgspec.convert(stored, States)
        rows = shown_rows(states)
        reach = max(
            2 * max(row.visits[2] for row in rows_without_drafts(states)), *map(hit_tokens, rows.values())
        )
        for kind, row in rows.items():
            figures = (
                *(percent(row.visits[n], states.visit_tokens[n]) for n in (1, 2)),
                percent(hit_tokens(row), states.query_tokens),
                percent(reach, states.query_tokens) if kind == "as it is" else "",
                "–" if row.state_bytes is None else size(row.state_bytes),
                "–" if row.fit is None else count(row.fit),
                "–" if row.tail_tokens is None else count(row.tail_tokens),
                f"`{' '.join(row.flags)}`" if row.flags else "–",
            )
            yield f"| {name if kind == 'as it is' else ''} | {kind} | {' | '.join(figures)} |"


def main(names: list[str]) -> int:
    check_engine()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or MODELS:
        for prefixes in PREFIXES:
            states = answered(name, prefixes)
            results.setdefault(name, {})[str(prefixes)] = (
                states if isinstance(states, str) else msgspec.to_builtins(states)
            )
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(name, prefixes, states if isinstance(states, str) else states.why, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
