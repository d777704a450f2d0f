"""``python -m steadyrun.ctl`` is ``steadyctl``."""

from steadyrun.ctl.main import console_main

if __name__ == "__main__":
    console_main()
