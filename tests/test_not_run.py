"""`make test` ends with what it did not do: each group of skipped tests, and the command that brings it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.not_run import group_of, lines

TESTS = Path(__file__).parent
CHROMIUM = "Chromium is not installed (Debian: apt-get install chromium chromium-driver)"
OUTPUT = f"""
SKIPPED [4] tests/report/test_browser.py:117: {CHROMIUM}
SKIPPED [3] tests/report/test_browser.py:123: {CHROMIUM}
SKIPPED [8] tests/core/cache/test_windows.py:186: this vLLM's hashes never look ahead
SKIPPED [2] tests/layout/test_plan_vllm.py:132: could not import 'torchvision': No module named 'torchvision'
SKIPPED [1] tests/new/test_new.py:1: a reason that nobody listed
3753 passed, 18 skipped in 263.52s (0:04:23)
"""


def test_each_group_is_named_once_with_the_command_that_brings_it() -> None:
    assert list(lines(OUTPUT.splitlines())) == [
        "  not run: a reason that nobody listed (1 tests)",
        "  not run: block hashes that look ahead (8 tests): .ci/versions 0.33.0",
        "  not run: models with images (2 tests): a torchvision that was built for this torch",
        "  not run: tests in a real browser (7 tests): apt-get install chromium chromium-driver",
    ]
    assert list(lines(["3753 passed in 263.52s"])) == []


def reasons() -> Iterator[str]:
    """Every text with which a test here skips: of pytest.skip, skipif and importorskip."""
    for path in TESTS.rglob("*.py"):
        if path.is_relative_to(TESTS / "tools") or path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = {word.arg: word.value for word in node.keywords}
                first = given.get("reason", node.args[0] if node.args else None)
                if node.func.attr in ("skip", "skipif", "importorskip") and first is not None:
                    text = ast.unparse(first)
                    yield text if isinstance(first, ast.Constant | ast.JoinedStr) else ""


@pytest.mark.parametrize("reason", sorted(set(reasons()) - {""}))
def test_every_reason_to_skip_has_a_group(reason: str) -> None:
    group, command = group_of(reason)
    assert command, f"add {reason} to BRINGS in tests/tools/not_run.py"
    assert group != reason
