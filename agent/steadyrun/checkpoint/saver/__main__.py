"""So that ``python -m steadyrun.checkpoint.saver`` runs the saver."""

import sys

from steadyrun.checkpoint.saver.main import end, main

if __name__ == "__main__":
    end(main(sys.argv[1:]))
