"""What flags keep of a model's recurrent states, and what that brings: the choices, their replays, one small table.

In: a set-up of a model with states, and its load. Out: `States`, which `sweep --states`, `explain` and `doctor` show.
"""
