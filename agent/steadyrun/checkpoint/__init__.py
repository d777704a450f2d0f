"""Checkpoints of a training job: how often to save (``interval``), and whether what was saved is whole (``verify``)."""
