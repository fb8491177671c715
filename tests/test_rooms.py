"""The shape of the house: folders and modules that one can take in, and no circle of imports between files."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[1] / "kvtune"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
MOST_MODULES = 20
MOST_LINES = 350


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_has_at_most_twenty_modules(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_MODULES


def test_no_module_is_longer_than_350_lines() -> None:
    long = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in long.items() if lines > MOST_LINES} == {}


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """import-linter sees circles of siblings; this also sees those between a package's `__init__` and its modules."""
    graph = grimp.build_graph("kvtune", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    assert circle(imports) == []


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
