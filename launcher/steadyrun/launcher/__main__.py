"""``python -m steadyrun.launcher`` is ``steadyrun``, as ``python -m torch.distributed.run`` is ``torchrun``."""

import sys

from steadyrun.launcher.main import console_main

if __name__ == "__main__":
    sys.exit(console_main())
