"""The parts of vLLM that kvtune uses: types, fingerprints, patches, differences of versions and platforms.

kvtune's modules are imported by their full names and no code puts kvtune/ on sys.path, so this is never taken for vLLM.
Modules marked * import vLLM inside their functions; the others import nothing of it. No version is compared elsewhere.
A *chunk* is max_num_batched_tokens.
Imported by: cli, core, doctor, engine, explain, fake_device, lab, layout, probe, report, sim, tune, watch.

    types.py       the used parts of vLLM's scheduler, requests, blocks, pool and outputs, as Protocols
    config.py      the same for its configuration, KV cache specs and attention backends
    offloading.py  the same for its offloading connector, on the scheduler's side
    symbols.py     by part of the core: every symbol of vLLM that it replaces, wraps or whose code it relies on
    manifest.py    those symbols of the installed vLLM against a known version's;
                   `python -m kvtune.vllm.manifest` writes the manifest of the installed vLLM
    manifests/     one JSON file a known version of vLLM
    parts.py       standing(): which parts of the core can load, and why the others cannot
    changes.py     what changed between two versions, symbol by symbol, as a diff
    names.py*      symbols that versions name differently or define elsewhere, found by looking for them
    patches.py     the registry of everything that kvtune replaces in vLLM; docs/internals.md has the table
    model_class.py* why vLLM cannot import a model's class, which it logs and does not raise
    waits.py       where EngineCore waits for a step's tokens: `result()` of what the executor returned
    platforms.py   platforms that vLLM runs on, and what its server takes on each where no flag says otherwise
    plugin_state.py What kvtune keeps for a whole process of vLLM: `STATE`
    as_if.py*      makes this process's vLLM that of another device: vLLM's own CUDA platform class, forced
    absent.py*     stand-ins for compiled modules and packages that only a GPU's vLLM has
    render_child.py* the process that renders bodies of requests with vLLM's own renderer
    cpu_flags.py*  another machine's CPU flags for vLLM's decisions (KVTUNE_AVX512_BF16)
"""
