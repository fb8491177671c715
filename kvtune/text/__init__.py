"""Finds and names the text that keeps prompts from hitting the prefix cache. No vLLM, no engine, no I/O.

In: prompts of a log as token ids, in the order in which they were sent, and a function that returns their text; or two
bodies. Out: divergences (a prompt differs from an earlier one, and agrees with it again later), the edits between two
prompts, groups of these, mended prompts.
Imported by: explain, tap, watch.

    divergence.py   an earlier prompt that agrees with this one before and after a difference
    decoded.py      the text of token ids, with the place of each token in it
    parts.py        a body or a rendered prompt cut into system text, tools, and messages
    atoms.py        text cut into values (a time, an id, an address ..) and words
    kinds.py        what an edit is (a time, an id, an order ..), and how to mend it
    edits.py        each separate edit between two prompts: its kind, its place, the two texts
    changes.py      the edits of a divergence among the tokens
    groups.py       edits of one kind, place and label, counted
    mending.py      the prompts with the differing text moved after the shared part
    earlier.py      The earlier prompts of a server, by cache salt: what of a prompt one of them had
"""
