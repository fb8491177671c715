"""Writes the manifest of the installed vLLM: `python -m bench.versions.manifest`. Commit it once that is tested."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvtune.base.errors import KvtuneError
from kvtune.base.files import replacing
from kvtune.data.installed import installed_version, source_path
from kvtune.plugin.vllm.manifest import MANIFESTS, Manifest, describe, names_in
from kvtune.plugin.vllm.symbols import MOVED, SYMBOLS


def modules() -> list[str]:
    """Return every module that defines a symbol in any known version."""
    return list(dict.fromkeys([*SYMBOLS, *(home for homes in MOVED.values() for home in homes)]))


def describe_installed() -> Manifest:
    """Describe the installed vLLM. KvtuneError if it lacks a symbol: symbols.py must be corrected first."""
    manifest: Manifest = {}
    for module in modules():
        path = source_path(module)
        if path is None:
            continue
        source = path.read_bytes()
        if symbols := describe(source, names_in(module)):
            manifest[module] = {"sha256": hashlib.sha256(source).hexdigest(), "symbols": symbols}
    for module, names in SYMBOLS.items():
        for name in names:
            homes = (module, *MOVED.get(f"{module}.{name}", ()))
            if not any(name in manifest.get(home, {}).get("symbols", ()) for home in homes):
                raise KvtuneError(f"{module} has no {name}", "correct kvtune/plugin/vllm/symbols.py")
    return manifest


def write_manifest() -> Path:
    """Write the manifest of the installed vLLM, to be committed once that version is tested."""
    manifest = describe_installed()
    path = MANIFESTS / f"vllm-{installed_version()}.json"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as part:
        part.write((json.dumps(manifest, indent=1) + "\n").encode())
    return path


if __name__ == "__main__":
    print(write_manifest())
