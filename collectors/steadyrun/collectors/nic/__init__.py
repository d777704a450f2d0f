"""Network ports: InfiniBand, RoCE and Ethernet, their states and error counters."""
