"""Whether this vLLM is one that the core was written against. Read before anything is installed.

symbols.py     every symbol of vLLM that the core replaces, wraps or relies on the inside of. Data only
manifest.py    check(): those symbols against the manifest of the installed version;
               `python -m kvtune.core.compat.manifest` writes the manifest of the installed vLLM
manifests/     one JSON file a version of vLLM
"""
