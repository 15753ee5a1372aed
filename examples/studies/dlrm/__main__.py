"""Trains a click model (DLRM) with sparse gradient synchronization.

  python -m examples.studies.dlrm                    # zen_sync
  python -m examples.studies.dlrm --grads rows       # no gradient of table size
  python -m examples.studies.dlrm --sync sharded     # tables split over devices
  python -m examples.studies.dlrm --sync compare     # zen_sync beside pmean
  python -m examples.studies.dlrm --data train.txt --checkpoint runs/criteo
  python -m examples.studies.dlrm --generate clicks.tsv --rows 1000000

Data-parallel on all accelerators, or else on 8 devices that the CPU plays; over
several hosts with --coordinator, --num-processes and --process-id. The 26
tables have the cardinalities of Criteo's Kaggle data, scaled by --scale. Rows
are made up, with clicks that can be predicted, unless --data names a file in
Criteo's format. Ctrl-C ends the step in progress, saves a checkpoint if there
is a directory for it, and leaves with exit code 130.
"""

import argparse
from collections.abc import Iterator, Sequence
import os
import sys

from tqdm import tqdm

from examples.studies.common import program
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.dlrm import criteo
from examples.studies.dlrm import flags
from examples.studies.dlrm.planted import Planted
from examples.studies.dlrm.rows import Rows
from examples.studies.dlrm.study import Clicks


def generate(flags: argparse.Namespace) -> int:
  """Writes the planted log to a file. Returns the exit code."""
  try:
    with tqdm(total=flags.rows, unit=" rows", mininterval=1) as bar:

      def parts() -> Iterator[Rows]:
        for rows in Planted(flags.seed).blocks(flags.rows):
          yield rows
          bar.update(len(rows))

      criteo.write(flags.generate, parts())
  except OSError as error:
    raise SystemExit(f"--generate: {error}") from error
  except KeyboardInterrupt:
    print("Stopped by Ctrl-C while rows were written: no file is left.")
    return INTERRUPTED
  print(f"{flags.rows:,} rows: {os.path.abspath(flags.generate)}")
  return 0


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parsed = flags.parse(__doc__ or "", argv)
  if parsed.generate:
    return generate(parsed)
  return program.main(parsed, Clicks, "rows were")


if __name__ == "__main__":
  sys.exit(main())
