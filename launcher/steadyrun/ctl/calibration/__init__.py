"""Limits out of what runs recorded: reading, replaying, weighing, drawing."""
