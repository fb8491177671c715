"""Finds the text that keeps prompts from hitting the prefix cache. No vLLM, no engine, no I/O.

In: prompts of a log as token ids, in the order in which they were sent, and a function that returns their text. Out:
divergences (a prompt differs from an earlier one, and agrees with it again later), groups of these, mended prompts.
Of two bodies: each separate edit, named.
Imported by: explain, tap, watch.

    divergence.py   an earlier prompt that agrees with this one before and after a difference
    kinds.py        what the differing text is (a time, an id, an order ..), and how to mend it
    groups.py       divergences of one kind and place, counted
    parts.py        a body or a rendered prompt cut into system text, tools, and messages
    atoms.py        text cut into values (a time, an id, an address ..) and words
    edits.py        each separate edit between two prompts: its kind, its place, the two texts
    kinds.py   the kinds of edits, and how to mend each
    mending.py      the prompts with the differing text moved after the shared part
"""
