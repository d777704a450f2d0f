"""Vocabulary shared by every part; standard library only, and light enough to be imported inside a training process."""
