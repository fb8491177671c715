"""KV offloading to host memory on a CPU engine.

In: vLLM's own `--kv-offloading-size`. Out: an OffloadingSpec whose copies are memory copies. All else is vLLM's own.
Imported by: core/plugin.py (install); vLLM imports the module marked * by the name that install.py gives it.

    install.py   names the spec in the configuration
    memcpy.py*   the spec and its worker: copies between the KV cache and the tier's tensors

The module marked * imports vLLM.
"""
