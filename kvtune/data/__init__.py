"""What kvtune writes, names, counts and draws: runs, knobs, causes, layouts, recipes; `show` draws an answer."""
