"""Flight recorders: asking for dumps, reading them as untrusted data, and summing them up."""
