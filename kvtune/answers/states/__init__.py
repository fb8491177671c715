"""What flags and the core keep of a model's recurrent states: the changes of it, replayed, one small table.

In: a set-up of a model with states, and its load. Out: `States`, which `sweep --states`, `explain` and `doctor` show.
"""
