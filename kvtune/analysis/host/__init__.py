"""What a run costs the host, apart from the device: Run -> results. Pure.

cost.py      time that EngineCore's Python takes besides the model
overlap.py   how much of it the device hides, in an engine that schedules ahead
ceiling.py   how many tokens a second the host can drive at most, and the process that sets it
"""
