"""KV offloading to host memory: on a CPU engine, and with a cache policy of kvtune's.

In: vLLM's own `--kv-offloading-size`. Out: on a CPU engine an OffloadingSpec whose copies are memory copies; with
`eviction_policy` kvtune, on any platform, a policy that also says what is stored. All else is vLLM's own.
Imported by: core/plugin.py (install); vLLM imports the modules marked * by the names that install.py gives it.

    install.py   names the classes in the configuration
    vllm_types.py What is used of vLLM's offloading connector on the scheduler's side
    memcpy.py*   the spec and its worker: copies between the KV cache and the tier's tensors
    spec.py*     vLLM's spec and manager, which ask the policy what to store
    policy.py*   ReusePolicy: what is stored and evicted, by reuse
    windows.py   which windows are needed, and which are kept while there is room
    duel.py      whether that or plain age hits more

Modules marked * import vLLM.
"""
