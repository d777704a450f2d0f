"""What is collected from below the program: stacks, processes, cgroups, the kernel log."""
