"""The flags of the click model, and what they must satisfy."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import optax

from examples.studies.common import flags as common
from examples.studies.common.trainer import adagrad
import zenjax

OPTIMIZERS: common.Optimizers = {
  "adagrad": (adagrad, 0.02),
  "rowwise_adagrad": (zenjax.rows.rowwise_adagrad, 0.02),
  "adam": (optax.adam, 3e-3),
  "sgd": (optax.sgd, 1.0),
}

_COMPARE_STEPS = 100  # Two runs, to end in some minutes on two CPU cores.
_TRAIN_STEPS = 300
_ROWS = 500_000
_PLOT = "train_dlrm.png"


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = common.parser(description, "dlrm")
  _add_flags(parser)
  flags = parser.parse_args(argv)
  if broken := _broken_rule(flags):  # Before defaults hide what was given.
    parser.error(broken)
  common.set_defaults(
    flags,
    OPTIMIZERS,
    compare_steps=_COMPARE_STEPS,
    train_steps=_TRAIN_STEPS,
    plot=_PLOT,
  )
  if flags.rows is None:
    flags.rows = _ROWS
  return flags


def _add_flags(parser: argparse.ArgumentParser) -> None:
  steps = f"{_COMPARE_STEPS} in compare, else {_TRAIN_STEPS}"
  common.add_training(parser, OPTIMIZERS, steps, "sharded")
  add = parser.add_argument
  add("--batch", type=int, default=256, help="rows per device and step")
  add("--width", type=int, default=16, help="of the tables")
  add(
    "--scale",
    type=float,
    default=0.01,
    help="rows of the tables over the published cardinalities; 1 needs 2.2 GB"
    " a device, and as much for the optimizer; --sync sharded divides them",
  )
  add(
    "--data",
    metavar="FILE",
    help="in Criteo's format, its name ending in .gz if compressed; default:"
    " what --generate would write, without end",
  )
  add("--eval-rows", type=int, default=16384, help="the first ones, held out")
  add("--eval-every", type=int, default=25, help="steps between two AUCs")
  add("--generate", metavar="FILE", help="write rows here, and end")
  add("--rows", type=int, help=f"for --generate; default: {_ROWS}")
  common.add_files(parser, f"{_PLOT} in compare")
  common.add_processes(parser)


_POSITIVE = ("steps", "batch", "width", "lr", "eval_rows", "eval_every", "rows")


def _broken_rule(flags: argparse.Namespace) -> str | None:
  if broken := common.broken_rule(flags, _POSITIVE):
    return broken
  if not 0 < flags.scale <= 1:
    return f"--scale must be over 0 and at most 1, got {flags.scale}"
  if flags.rows is not None and not flags.generate:
    return f"--rows goes with --generate FILE, got --rows {flags.rows} alone"
  if flags.generate and flags.data:
    return (
      "--generate writes a file and ends, so it does not go with --data, got"
      f" --data {flags.data}"
    )
  if flags.generate and Path(flags.generate).exists():
    return f"--generate must name a new file, but {flags.generate} exists"
  return None
