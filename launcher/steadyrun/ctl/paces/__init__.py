"""What ``steadyctl stragglers`` is made of: the journals read, and its text and page."""
