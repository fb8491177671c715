"""Checks this machine, and a model's effective settings. Loads no weights; starts vLLM only to measure the host.

In: nothing, or a MODEL with vLLM's flags. Out: findings, each with a level, and what to do about it.
"""
