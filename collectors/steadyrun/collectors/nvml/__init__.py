"""NVIDIA GPUs, asked through NVML in a process of its own: a driver call that hangs takes nobody with it."""
