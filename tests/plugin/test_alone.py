"""A server that runs the plugin needs of kvtune's packages msgspec and numpy alone, beside what vLLM brings."""

from __future__ import annotations

import json
import subprocess
import sys

ALONE = """
import importlib, json, pkgutil, sys
ALLOWED = {*sys.stdlib_module_names, "kvtune", "msgspec", "numpy"}
OF_VLLM = {"vllm", "torch", "prometheus_client", "zmq"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"refused: {name}", name=name)

sys.meta_path.insert(0, Refuse())
import kvtune.plugin
said = {}
for module in pkgutil.walk_packages(kvtune.plugin.__path__, "kvtune.plugin."):
    try:
        importlib.import_module(module.name)
        said[module.name] = ""
    except ModuleNotFoundError as error:
        said[module.name] = (error.name or "").partition(".")[0]
rooms = sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("kvtune.")})
print(json.dumps([said, rooms, sorted(OF_VLLM)]))
"""


def test_it_imports_without_the_command_lines_packages() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    missing, rooms, of_vllm = json.loads(done.stdout)
    assert len(missing) > 60 and list(missing.values()).count("") > 40
    assert {name for name in missing.values() if name} <= set(of_vllm), missing
    assert rooms == ["kvtune.base", "kvtune.data", "kvtune.plugin"]
