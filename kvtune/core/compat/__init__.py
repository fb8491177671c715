"""What differs between versions of vLLM, and which parts of the core this one allows. No version is compared elsewhere.

symbols.py     by part of the core: every symbol of vLLM that it replaces, wraps or relies on the inside of. Data only
manifest.py    those symbols of the installed vLLM against a known version's;
               `python -m kvtune.core.compat.manifest` writes the manifest of the installed vLLM
parts.py       standing(): which parts can load, and why the others cannot
names.py       what versions name differently or define elsewhere, decided by what is there
changes.py     what changed between two versions, symbol by symbol, as a diff
manifests/     one JSON file a known version of vLLM
"""
