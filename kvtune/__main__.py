"""`python -m kvtune` is the `kvtune` command."""

from kvtune.cli.app import main

main()
