"""The output folder: where commands write runs, pages and journals, and where `last` looks."""

from __future__ import annotations

import os
from pathlib import Path

OUTPUT_VARIABLE = "KVTUNE_OUTPUT"
REPORTS = Path("reports")
"""Where commands write unless -o or KVTUNE_OUTPUT names another folder."""


def output_folder() -> Path:
    """Return the folder where commands without -o write, and where `last` looks for the newest run."""
    named = os.environ.get(OUTPUT_VARIABLE)
    return Path(named) if named else REPORTS
