"""``steadyctl``: look at runs and incidents, order faults, check a machine; one module per group of commands."""
