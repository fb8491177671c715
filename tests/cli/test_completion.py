"""The Tab key: commands, options and their words, as typer answers a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvtune.cli.profile import ProfileQuery
from kvtune.cli.query import declared
from tests.cli.terminal import KVTUNE, bare

GOLDEN = Path(__file__).parents[1] / "golden"


def offered(line: str, **variables: str) -> str:
    environment = bare(_KVTUNE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line, **variables)
    done = subprocess.run(KVTUNE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_commands_and_options_are_offered() -> None:
    assert '"explain"' in offered("kvtune expl") and '"--workload"' in offered("kvtune profile tiny-opt --wo")


def test_what_is_offered_is_what_the_options_take() -> None:
    fields = declared(ProfileQuery)
    for name, taken in (("core", ("kvtune", "stock")), ("on", ("engine", "host", "sim"))):
        assert fields[name].words == taken
        assert all(f'"{word}"' in offered(f"kvtune profile tiny-opt --{name} ") for word in taken)


def test_nothing_is_printed_beside_the_answers_where_last_is_typed(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "schema1-real.kvrun", tmp_path)
    assert '"--fail-on"' in offered("kvtune compare last --fail", KVTUNE_OUTPUT=str(tmp_path))
