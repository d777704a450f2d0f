"""The node's saver: a process that owns the snapshot memory and writes checkpoints from it."""
