"""Comparison of runs: which figures differ by more than chance. Pure."""
