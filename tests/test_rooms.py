"""The shape of the house: no circle of imports between files."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

pytestmark = pytest.mark.lint


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """import-linter sees circles of siblings; this also sees those between a package's `__init__` and its modules."""
    graph = grimp.build_graph("kvtune", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    assert circle(imports) == []


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
