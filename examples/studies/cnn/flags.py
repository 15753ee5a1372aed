"""The flags of the image model, and what they must satisfy."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.studies.common import flags as common

_EPOCHS = 10
_PLOT = "train_cnn.png"


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = common.parser(description, "cnn")
  _add_flags(parser)
  flags = parser.parse_args(argv)
  if broken := _broken_rule(flags):
    parser.error(broken)
  if flags.steps is None and flags.epochs is None:
    flags.epochs = _EPOCHS
  if flags.plot is None and flags.out:
    flags.plot = str(Path(flags.out, _PLOT))
  return flags


def _add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
    "--data",
    metavar="DIR",
    help="of CIFAR-10's binary files, or with a subdirectory of images for each"
    " class; default: scikit-learn's digits",
  )
  add("--image-size", type=int, default=32, help="of subdirectories' images")
  common.add_sparsifier(
    parser,
    "the largest part of the gradient is sent, the rest waits; none: the dense"
    " mean",
  )
  add("--devices", type=int, help="the first so many; default: all, or 8 CPUs")
  add("--batch", type=int, default=64, help="images a step, of all devices")
  add("--width", type=int, default=32, help="channels of the first stage")
  add("--lr", type=float, default=0.05, help="of SGD with momentum 0.9")
  add("--steps", type=int)
  add("--epochs", type=int, help=f"in place of --steps; default: {_EPOCHS}")
  add("--eval-every", type=int, default=50, help="steps between accuracies")
  add("--seed", type=int, default=0)
  common.add_files(parser, f"{_PLOT} beside them with --out, else none")


_POSITIVE = ("image_size", "devices", "batch", "width", "lr", "steps", "epochs")
_POSITIVE += ("eval_every",)


def _broken_rule(flags: argparse.Namespace) -> str | None:
  if broken := common.broken_rule(flags, _POSITIVE):
    return broken
  if flags.steps is not None and flags.epochs is not None:
    return (
      "--steps and --epochs do not go together, got"
      f" --steps {flags.steps} --epochs {flags.epochs}"
    )
  if flags.width % 8:
    return f"--width must be a multiple of 8, got {flags.width}"
  return None
