"""Trains a small ResNet, whose gradients are dense, and sends a part of them.

  python -m examples.studies.cnn                       # the dense mean
  python -m examples.studies.cnn --sparsifier exdyna --density 0.01
  python -m examples.studies.cnn --sparsifier top_k --devices 4 --out runs/top_k
  python -m examples.studies.cnn --data cifar-10-batches-bin --epochs 20
  python -m examples.studies.cnn --data photos --checkpoint runs/photos

Data-parallel on all accelerators, or else on 8 devices that the CPU plays. The
images are scikit-learn's digits (8 by 8, grey) unless --data names a directory
of CIFAR-10's binary files, or one with a subdirectory of images for each class.
Ctrl-C ends the step in progress, saves a checkpoint if there is a directory for
it, and leaves with exit code 130.
"""

from collections.abc import Sequence
import sys

from examples.studies.cnn import flags
from examples.studies.cnn.study import Pictures
from examples.studies.common import program


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parsed = flags.parse(__doc__ or "", argv)
  return program.main(parsed, Pictures, "the images were")


if __name__ == "__main__":
  sys.exit(main())
