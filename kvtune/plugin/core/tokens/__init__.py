"""Sampled tokens as one array from the worker to the scheduler. Installed by `core.plugin`."""
