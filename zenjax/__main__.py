"""`python -m zenjax`: plans, links and what-ifs from a shell."""

import sys

from zenjax._src.planner.cli import main

if __name__ == "__main__":
  sys.exit(main())
