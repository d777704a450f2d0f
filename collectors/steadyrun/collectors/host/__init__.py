"""Facts about the machine beside its devices: memory, pressure, space for files, processes."""
