"""Exports a run to other tools: a Chrome trace, which Perfetto opens, and a folder of CSV files."""
