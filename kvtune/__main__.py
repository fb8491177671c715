"""Runs the `kvtune` command as `python -m kvtune`."""

from kvtune.cli.start import main

main()
