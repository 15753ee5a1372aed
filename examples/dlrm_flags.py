"""The flags of `train_dlrm.py`, and what they must satisfy."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dlrm_trainer import OPTIMIZERS

_COMPARE_STEPS = 100  # Two runs, to end in some minutes on two CPU cores.
_TRAIN_STEPS = 300
_ROWS = 500_000


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  _add_flags(parser.add_argument)
  flags = parser.parse_args(argv)
  broken = _broken_rule(flags)  # Before defaults hide what was given.
  if broken:
    parser.error(broken)
  compare = flags.sync == "compare"
  if flags.steps is None:
    flags.steps = _COMPARE_STEPS if compare else _TRAIN_STEPS
  if flags.plot is None and compare:
    flags.plot = "train_dlrm.png"
  if flags.lr is None:
    _, flags.lr = OPTIMIZERS[flags.optimizer]
  if flags.rows is None:
    flags.rows = _ROWS
  return flags


def _add_flags(add) -> None:
  add("--sync", choices=("zen", "pmean", "compare"), default="zen")
  add(
    "--grads",
    choices=("dense", "rows"),
    default="dense",
    help="of tables: arrays of their size, or only the rows looked up, which"
    " the optimizer then updates alone",
  )
  add("--optimizer", choices=tuple(OPTIMIZERS), default="adagrad")
  add(
    "--steps",
    type=int,
    help=f"default: {_COMPARE_STEPS} in compare, else {_TRAIN_STEPS}",
  )
  add("--batch", type=int, default=256, help="rows per device and step")
  add("--width", type=int, default=16, help="of the tables")
  add(
    "--scale",
    type=float,
    default=0.01,
    help="rows of the tables over the published cardinalities; 1 needs 2.2 GB"
    " a device, and as much for the optimizer",
  )
  rates = ", ".join(
    f"{rate:g} {name}" for name, (_, rate) in OPTIMIZERS.items()
  )
  add("--lr", type=float, help=f"learning rate; default: {rates}")
  add("--seed", type=int, default=0)
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
  add("--checkpoint", metavar="DIR", help="save here, at the end and on Ctrl-C")
  add("--resume", action="store_true", help="go on from --checkpoint")
  add("--plot", metavar="FILE", help="default: train_dlrm.png in compare")


_POSITIVE = ("steps", "batch", "width", "lr", "eval_rows", "eval_every", "rows")


def _broken_rule(flags: argparse.Namespace) -> str | None:
  for name in _POSITIVE:
    value = getattr(flags, name)
    if value is not None and not value > 0:
      return f"--{name.replace('_', '-')} must be positive, got {value}"
  if not 0 < flags.scale <= 1:
    return f"--scale must be over 0 and at most 1, got {flags.scale}"
  if flags.seed < 0:
    return f"--seed must not be negative, got {flags.seed}"
  if flags.grads == "rows" and flags.sync == "pmean":
    return (
      "--grads rows goes with --sync zen or compare, got --sync pmean, which"
      " averages whole tables"
    )
  if flags.checkpoint and flags.sync == "compare":
    return "--checkpoint goes with --sync zen or pmean, got --sync compare"
  if flags.resume and not flags.checkpoint:
    return "--resume needs --checkpoint DIR, got no directory"
  return _broken_files(flags)


def _broken_files(flags: argparse.Namespace) -> str | None:
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
