"""``steadyctl ckpt``: commands about checkpoints, one module each."""
