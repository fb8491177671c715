"""Where set-ups run: a Setup, and the engines, simulators and devices that make Runs of it."""
