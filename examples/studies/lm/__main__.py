"""Trains a word-level language model with sparse gradient synchronization.

  python -m examples.studies.lm                    # zen_sync
  python -m examples.studies.lm --grads rows       # no gradient of table size
  python -m examples.studies.lm --sync compare     # zen_sync beside pmean
  python -m examples.studies.lm --sparsifier exdyna --density 0.01 \\
    --optimizer sgd
  python -m examples.studies.lm --sparsifier top_k --out runs/top_k
  python -m examples.studies.lm --corpus book.txt --checkpoint runs/book
  python -m examples.studies.lm --steps 32 --trace runs/trace

Data-parallel on all accelerators, or else on 8 devices that the CPU plays; over
several hosts with --coordinator, --num-processes and --process-id. The text is
the source code of Python's standard library unless --corpus names another.
Ctrl-C ends the step in progress, saves a checkpoint if there is a directory for
it, and leaves with exit code 130.
"""

from collections.abc import Sequence
import sys

from examples.studies.common import program
from examples.studies.lm import flags
from examples.studies.lm.study import Language


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parsed = flags.parse(__doc__ or "", argv)
  return program.main(parsed, Language, "the text was")


if __name__ == "__main__":
  sys.exit(main())
