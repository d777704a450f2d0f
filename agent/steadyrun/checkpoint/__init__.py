"""Checkpoints of a training job: so far, how often to save (``interval``)."""
