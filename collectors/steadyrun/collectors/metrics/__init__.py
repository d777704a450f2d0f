"""What is measured, under which names, and how it gets to Prometheus."""
