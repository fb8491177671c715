"""Runs and loads as figures, and figures as pages. Pure functions; no engine."""
