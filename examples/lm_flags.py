"""The flags of `train_lm.py`, and what they must satisfy."""

import argparse
from collections.abc import Sequence

from lm_data import LENGTH
from lm_trainer import OPTIMIZERS

from zenjax import traces

_COMPARE_STEPS = 30  # Three runs, to end in some minutes on two CPU cores.
_TRAIN_STEPS = 200  # About one epoch of the standard library on 8 devices.


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  _add_flags(parser.add_argument)
  flags = parser.parse_args(argv)
  compare = flags.sync == "compare"
  if flags.steps is None:
    flags.steps = _COMPARE_STEPS if compare else _TRAIN_STEPS
  if flags.plot is None and compare:
    flags.plot = "train_lm.png"
  if flags.lr is None:
    _, flags.lr = OPTIMIZERS[flags.optimizer]
  if broken := _broken_rule(flags):
    parser.error(broken)
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
  add("--batch-tokens", type=int, default=4096, help="per device and step")
  add("--negatives", type=int, default=512, help="per device and step")
  add("--width", type=int, default=128, help="of the two tables")
  add("--vocab", type=int, help="keep so many words and join the rest")
  rates = ", ".join(
    f"{rate:g} {name}" for name, (_, rate) in OPTIMIZERS.items()
  )
  add("--lr", type=float, help=f"learning rate; default: {rates}")
  add("--seed", type=int, default=0)
  add("--corpus", metavar="FILE", help="UTF-8 text to train on")
  add("--eval-tokens", type=int, default=4096, help="of held-out text")
  add("--checkpoint", metavar="DIR", help="save here, at the end and on Ctrl-C")
  add("--resume", action="store_true", help="go on from --checkpoint")
  add(
    "--trace",
    metavar="DIR",
    help="record here, in a new directory, which rows of each table's gradient"
    " every device touches; `python -m benchmarks.run sparsity DIR` reads it",
  )
  add("--trace-steps", type=int, default=32, help="the first so many steps")
  add("--plot", metavar="FILE", help="default: train_lm.png in compare")


def _broken_rule(flags: argparse.Namespace) -> str | None:
  for name in (
    "steps",
    "negatives",
    "width",
    "lr",
    "eval_tokens",
    "trace_steps",
  ):
    if not getattr(flags, name) > 0:
      flag = f"--{name.replace('_', '-')}"
      return f"{flag} must be positive, got {getattr(flags, name)}"
  if flags.batch_tokens < 1 or flags.batch_tokens % LENGTH:
    return (
      f"--batch-tokens must be a positive multiple of {LENGTH},"
      f" got {flags.batch_tokens}"
    )
  if flags.seed < 0:
    return f"--seed must not be negative, got {flags.seed}"
  if flags.vocab is not None and flags.vocab < 2:
    return f"--vocab must be at least 2, got {flags.vocab}"
  if flags.grads == "rows" and flags.sync == "pmean":
    return (
      "--grads rows goes with --sync zen or compare, got --sync pmean, which"
      " averages whole tables"
    )
  if flags.checkpoint and flags.sync == "compare":
    return "--checkpoint goes with --sync zen or pmean, got --sync compare"
  if flags.resume and not flags.checkpoint:
    return "--resume needs --checkpoint DIR, got no directory"
  return _broken_trace(flags)


def _broken_trace(flags: argparse.Namespace) -> str | None:
  if not flags.trace:
    return None
  if flags.sync == "compare":
    return "--trace goes with --sync zen or pmean, got --sync compare"
  try:
    traces.check_free(flags.trace)
  except ValueError as error:
    return f"--trace: {error}"
  return None
