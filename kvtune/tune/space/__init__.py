"""The settings that sweeps and searches may try. Imports no vLLM.

model.py    what a model and this machine decide: block sizes, layouts, windows
reuse.py    values of `two_class` for a load, from the distances at which its prefixes come back
grid.py     which settings a sweep tries: a grid, or seeded samples of it
"""
