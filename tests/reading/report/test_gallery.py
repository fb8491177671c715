"""The gallery: real runs and a real study that are committed. Their pages draw again, are small and load nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reading.report.drawn import words
from tests.simulator import run

GALLERY = Path(__file__).parents[3] / "reports" / "gallery"
README = GALLERY / "README.md"
SOURCES = {
    "run": ["rounds-stock.kvrun"],
    "compare": ["rounds-stock.kvrun", "rounds-kvtune.kvrun"],
    "sweep": ["tune.jsonl"],
}


def test_it_is_under_five_megabytes_and_every_file_of_it_is_named() -> None:
    files = [path for path in GALLERY.iterdir() if path != README]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    text = README.read_text(encoding="utf-8")
    assert [path.name for path in files if path.name not in text] == []
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (GALLERY / link).is_file(), link
    project = (GALLERY.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "reports/gallery/README.md" in project


@pytest.mark.parametrize("name", SOURCES)
def test_a_page_is_drawn_again_from_its_files(name: str, tmp_path: Path) -> None:
    made = tmp_path / "page.html"
    assert run(["report", *(str(GALLERY / file) for file in SOURCES[name]), "-o", str(made)]) == 0
    kept, again = ((GALLERY / f"{name}.html", made)[i].read_text(encoding="utf-8") for i in (0, 1))
    title = re.compile(r"<h1>.*?</h1>", re.S)
    assert title.findall(kept) == title.findall(again)
    passages = re.compile(r'<pre id="(?:verdict|outcome|recipe)[^"]*">(.*?)</pre>', re.S)
    assert [words(t) for t in passages.findall(kept)] == [words(t) for t in passages.findall(again)]


def test_the_study_has_a_winner_with_its_recipe_and_intervals() -> None:
    page = (GALLERY / "sweep.html").read_text(encoding="utf-8")
    assert "A winner" in page and 'class="short better"' in page
    assert "kvtune serve tiny-gemma3 --recipe tiny-gemma3-cpu.toml" in words(page)
