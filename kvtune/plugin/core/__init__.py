"""The optimized KV core: subclasses of vLLM's own classes, loaded into an unmodified vLLM as a plugin.

In: settings from the environment. Out: vLLM's own objects with other classes, and a record of which parts are on.
Runs in vLLM's processes, and in the processes with vLLM that `sim` and `doctor` start. The `kvtune` command's own
process reads `settings.py` and `state.py` only. docs/core.md explains each part and its switch.
"Stock" is vLLM's own code. A "grade" says why a block is kept. An "extra" is a block that stock would not keep.

After the first error in the core's code (pool, windows, steady path, tokens, columns), every object is vLLM's own again
for good, and the state notes why: `breaker.py`.
"""
