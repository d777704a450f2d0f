"""Dumps, logs and run folders in, a report out: for the terminal, as JSON, as one page."""
