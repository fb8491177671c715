"""The parts of vLLM that kvtune uses: types, fingerprints, patches, differences of versions and platforms.

kvtune's modules are imported by their full names and no code puts kvtune/ on sys.path, so this is never taken for vLLM.
Modules import vLLM inside their functions, if at all. No version is compared elsewhere.
A *chunk* is max_num_batched_tokens.
"""
