"""Who waits for whom: flight records of all ranks in, root causes out. Pure."""
