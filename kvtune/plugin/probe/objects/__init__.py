"""Counts the objects that cause collections, by type and allocation site. In engine processes.

Counts are bounded, saved as one JSON file per process, and merged by `lab/engine/culprits.py`.
"""
