"""Writes the golden run files of the current schema: `python -m tests.golden.make`. Deterministic, byte for byte.

Files that are there are never written again: they are what those versions of kvtune left behind, also where a schema
has since got tables or columns.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np

from kvtune.data.run.types import SCHEMA, TABLES, Run
from tests.golden import synthetic

FOLDER = Path(__file__).parent

RUNS = {
    "rounds": lambda: synthetic.rounds_run(prefixes=4, prefix=600, suffix=64, output=8),
    "kvtune": lambda: synthetic.kvtune_run(),
    "chat": lambda: synthetic.open_run(requests=12, output=20),
    "partial": lambda: synthetic.partial_run(),
    "failed": lambda: synthetic.empty_run(),
    "sim": lambda: synthetic.sim_run(),
    "bare": lambda: synthetic.bare_run(),
    "evictions": lambda: synthetic.evicting_run(),
    "hostile": lambda: synthetic.hostile_run(),
}


def encoded(run: Run) -> bytes:
    """The run file's bytes, with no time of writing in them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _member(archive, "header.json", msgspec.json.format(msgspec.json.encode(run.header), indent=1))
        for name, table in run.tables.items():
            for column, kind in TABLES[name].items():
                buffer = io.BytesIO()
                array = np.asarray(table[column], dtype=None if kind == "U" else kind)
                np.save(buffer, array, allow_pickle=False)
                _member(archive, f"tables/{name}/{column}.npy", buffer.getvalue())
    return out.getvalue()


def _member(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)


def main() -> None:
    for name, make in RUNS.items():
        path = FOLDER / f"schema{SCHEMA}-{name}.kvrun"
        if path.exists():
            continue
        path.write_bytes(encoded(make()))
        print(f"{path.name}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
