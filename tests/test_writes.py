"""Every write of kvtune goes through kvtune/base/files.py; each exception stands here with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvtune

ROOT = Path(kvtune.__file__).parents[1]
FILES = "kvtune/base/files.py"
EXCEPTIONS = {
    "kvtune/plugin/probe/ring.py: os.open": "a ring file is mapped, and lies in the run's own work folder",
    "kvtune/plugin/probe/phase.py: os.open": "the phase is one mapped page in the run's own work folder",
    "kvtune/base/scratch.py: os.open": "the mark of a work folder, O_EXCL in a folder just made, O_NOFOLLOW after",
    "kvtune/data/run/file.py: numpy.save": "an array goes to memory, and from there into the zip",
    "kvtune/data/run/file.py: ZipFile": "the zip writes to the file that `creating` or `replacing` gave",
    "kvtune/answers/diff/environments.py: write_bytes": "an environment's files, in a folder that is made of nothing",
    "kvtune/answers/diff/environments.py: rename": "a link to kvtune's own code, and files within such an environment",
    "kvtune/answers/diff/environments.py: shutil": "vLLM's own Python, into such an environment",
    "kvtune/lab/engine/profile.py: TemporaryFile": "a file without a name, to see that the folder can be written",
    "kvtune/base/dialogue.py: TemporaryFile": "a file without a name, for what a child prints",
    "kvtune/requests/log/render_loop.py: os.open": "os.devnull, in place of a child's stdin",
    "kvtune/cli/notices.py: open": "os.devnull, to drop text",
}
WRITING = set("wax+")
METHODS = {
    **dict.fromkeys(("write_text", "write_bytes"), ""),
    **dict.fromkeys(("rename", "symlink_to", "hardlink_to", "link_to"), "rename"),
    **dict.fromkeys(("save_file", "save_pretrained", "to_csv", "tofile"), "save"),
    **dict.fromkeys(("save", "savez", "savez_compressed", "savetxt", "memmap"), "numpy.save"),
    **dict.fromkeys(("mknod", "mkfifo", "symlink", "link"), ""),
    **dict.fromkeys(("copy", "copy2", "copyfile", "copyfileobj", "copytree", "move"), "shutil"),
    **dict.fromkeys(("NamedTemporaryFile", "TemporaryFile", "mkstemp", "mkdtemp", "TemporaryDirectory"), ""),
}
MODULES = {"shutil": {"shutil"}, "numpy.save": {"np", "numpy"}, "": set()}


def writes(source: str) -> list[str]:
    """The kinds of writing calls in the source."""
    return [
        kind for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and (kind := _kind(node))
    ]


def _kind(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    texts = [
        value.value
        for value in (*call.args, *(k.value for k in call.keywords if k.arg == "mode"))
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    if name == "os.open":
        flags = ast.unparse(call.args[1])
        computed = "os.O_" not in flags
        return "os.open" if computed or any(f in flags for f in ("CREAT", "WRONLY", "RDWR", "TRUNC")) else ""
    if method in ("open", "fdopen") and name != "os.fdopen" and owner != "webbrowser":
        return "open" if any(set(mode) & WRITING and len(mode) < 5 for mode in texts) else ""
    if method == "ZipFile":
        return "ZipFile" if any(set(mode) & WRITING and len(mode) == 1 for mode in texts) else ""
    if name == "os.truncate" or (method == "touch" and not call.args):  # the pool's touch takes blocks
        return method
    if method == "replace" and not owner.endswith("structs") and len(call.args) == 1 and not call.keywords:
        return "replace"  # of a path: text has two arguments, a dataclass has names
    if method in METHODS:
        modules = MODULES.get(METHODS[method], set())
        return (METHODS[method] or method) if not modules or owner in modules else ""
    return ""


@pytest.mark.lint
def test_no_other_module_writes_a_file() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {kind}"
        for path in (ROOT / "kvtune").rglob("*.py")
        for kind in writes(path.read_text())
        if str(path.relative_to(ROOT)) != FILES
    }
    assert found == set(EXCEPTIONS)
