"""KV offloading to host memory on a CPU engine.

In: vLLM's own `--kv-offloading-size`. Out: an OffloadingSpec whose copies are memory copies. All else is vLLM's own,
which imports the spec by the name that install.py gives it.
"""
