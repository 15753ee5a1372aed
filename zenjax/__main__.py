"""Runs the command line as `python -m zenjax`."""

import sys

from zenjax._src.planner.cli import main

if __name__ == "__main__":
  sys.exit(main())
