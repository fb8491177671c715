"""Counts every prompt token of a run as a hit or under one cause of miss, and tries settings against the causes.

In: a `Run`. Out: an explanation and remedies, each of them replayed. Where the run's own hits differ from the
replay's, the explanation says so and stores nothing in the run.
"""
