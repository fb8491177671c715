"""Search over settings: sweeps, tuning, and the recipes they end in."""
