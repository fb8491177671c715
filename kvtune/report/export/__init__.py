"""Exports a run to other tools.

spans.py        nested spans of time per process: what both trace formats share
trace.py        Chrome trace JSON, which Perfetto opens
csv.py          a folder of CSV files, one a table
"""
