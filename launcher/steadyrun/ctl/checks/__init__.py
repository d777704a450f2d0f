"""The checks of ``steadyctl doctor``: each module is a group, each function one check that never hangs."""
