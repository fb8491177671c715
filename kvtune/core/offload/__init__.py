"""KV offloading to host memory on a CPU engine: what vLLM's native offloading leaves to GPUs.

In: vLLM's own `--kv-offloading-size` on a CPU engine. Out: an OffloadingSpec whose copies are memory copies; scheduler
side, manager, eviction policies and metrics are vLLM's own. On other platforms nothing changes.
Imported by: core/plugin.py (install); vLLM imports memcpy.py by name.

    install.py   names memcpy.py's spec in the configuration of a CPU engine
    vllm_types.py What is used of vLLM's offloading connector on the scheduler's side
    memcpy.py*   the spec and its worker: copies between the KV cache and the tier's tensors

Modules marked * import vLLM.
"""
