"""`python -m kvtune` is the `kvtune` command."""

from kvtune.cli.start import main

main()
