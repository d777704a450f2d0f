"""What benchmarks/checkpoint.py compares: one way of saving per class, all behind the ``Saver`` protocol."""
