"""The lists of stand-ins and of deferred modules, against the installed vLLM: each name exists, and none is missing.

Sources are read, and nothing is imported. `.ci/versions` runs this with each version that has a manifest.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from kvtune.lab.as_if.absent import ANSWERS, COMPILED, OPERATORS, PACKAGES
from kvtune.lab.as_if.deferred import AT_ONCE, COMPILER, IMPORTERS, MODULES

pytestmark = pytest.mark.vllm

OTHER_DEVICES = ("amd", "rocm", "xpu", "tpu", "cpu", "aiter", "zen", "mori", "flydsl")
"""Parts of the names of files and kernels that run on no NVIDIA GPU."""
OPTIONAL = {
    "_typeshed",
    "cohere",
    "deep_ep",
    "helion",
    "kvcr",
    "lmcache",
    "msgpack",
    "nixl_ep",
    "ray",
    "terratorch",
}
"""Packages that a module of vLLM imports, and that vLLM's CUDA wheel does not require."""
OTHER_OPERATORS = {"aten", "fbgemm", "oink", "symm_mem", "vllm", "vllm_helion", "vllm_ir"}
"""Namespaces of operators that torch, vLLM's Python or an optional package registers."""

FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
IMPORT = r"(?:from|import) (\w+(?:\.\w+)*)(?= import | as |,| +#|$)"
IMPORTED = re.compile(rf"^[ \t]*{IMPORT}", re.MULTILINE)
AT_IMPORT = re.compile(rf"^{IMPORT}", re.MULTILINE)
ASKED = re.compile(r"(?:import_module|find_spec|has_module)\(\s*\"([\w.]+)\"")
OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.")


@cache
def sources() -> dict[str, str]:
    """Return the text of vLLM's modules by path, without the projects that it copied."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0])
    texts = {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.py")}
    return {name: FOR_TYPES.sub("", text) for name, text in texts.items() if "third_party" not in name}


def named(*patterns: re.Pattern[str], for_nvidia: bool = True) -> set[str]:
    """Return what these patterns find in vLLM's sources. `for_nvidia`: only what may run on an NVIDIA GPU."""
    found = {
        (file, name)
        for file, text in sources().items()
        for pattern in patterns
        for name in pattern.findall(text)
    }
    return {
        name
        for file, name in found
        if not for_nvidia or not any(device in f"{file} {name}".lower() for device in OTHER_DEVICES)
    }


def inside(name: str, names: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)


def is_here(name: str) -> bool:
    """Whether a module is a file or a folder here."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names:
        return True
    spec = PathFinder.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    places = [Path(each, *rest) for each in spec.submodule_search_locations or ()]
    return any(place.is_dir() or any(place.parent.glob(f"{place.name}.*")) for place in places)


def test_each_stand_in_is_something_that_vllm_asks_for() -> None:
    asked = named(IMPORTED, ASKED, for_nvidia=False)
    unasked = [name for name in PACKAGES if not any(inside(each, (name,)) for each in asked)]
    unasked += sorted({*OPERATORS} - named(OPERATOR, for_nvidia=False))
    words = {word for text in sources().values() for word in re.findall(r"\w+", text)}
    unasked += [name for name in (*COMPILED, *ANSWERS) if name.rpartition(".")[2] not in words]
    assert unasked == []


def test_what_only_the_cuda_wheel_has_gets_a_stand_in() -> None:
    asked = {name for name in named(IMPORTED, ASKED) if inside(name, ("vllm",))}
    asked |= {name.partition(".")[0] for name in named(AT_IMPORT)} - OPTIONAL - {""}
    assert {name for name in asked if not is_here(name) and not inside(name, (*COMPILED, *PACKAGES))} == set()


def test_operators_of_compiled_modules_get_a_stand_in() -> None:
    assert named(OPERATOR) - {*OPERATORS} - OTHER_OPERATORS == set()


def test_each_deferred_module_is_there_and_vllm_or_what_it_needs_imports_it() -> None:
    assert [name for name in (*MODULES, *AT_ONCE, *COMPILER) if not is_here(name)] == []
    assert [name for name in IMPORTERS if not is_here(name)] == []
    assert [name for name in (*AT_ONCE, *COMPILER) if not inside(name, MODULES)] == []
    asked = named(IMPORTED, ASKED)
    own = [name for name in MODULES if inside(name, ("vllm",))]
    assert [name for name in own if not any(inside(each, (name,)) for each in asked)] == []
