"""Measurements; each module says how to run it. Run them from the repository's root."""
