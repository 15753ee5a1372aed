"""The flags of `train_lm.py`, and what they must satisfy."""

import argparse
from collections.abc import Sequence

from lm_data import LENGTH
from lm_trainer import OPTIMIZERS
import processes
from sparsified import KINDS
import train_flags

from zenjax import traces

_COMPARE_STEPS = 30  # Three runs, to end in some minutes on two CPU cores.
_TRAIN_STEPS = 200  # About one epoch of the standard library on 8 devices.
_PLOT = "train_lm.png"


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = train_flags.parser(description)
  _add_flags(parser.add_argument)
  processes.add_flags(parser)
  flags = parser.parse_args(argv)
  if broken := _broken_rule(flags):
    parser.error(broken)
  train_flags.set_defaults(
    flags,
    OPTIMIZERS,
    compare_steps=_COMPARE_STEPS,
    train_steps=_TRAIN_STEPS,
    plot=_PLOT,
  )
  return flags


def _add_flags(add: train_flags.Add) -> None:
  steps = f"{_COMPARE_STEPS} in compare, else {_TRAIN_STEPS}"
  train_flags.add_training(add, OPTIMIZERS, steps)
  add(
    "--sparsifier",
    choices=("none", *KINDS),
    default="none",
    help="in the place of zen_sync: the largest part of the whole gradient is"
    " sent, the rest waits",
  )
  add("--density", type=float, default=0.01, help="that part; default: 0.01")
  add("--batch-tokens", type=int, default=4096, help="per device and step")
  add("--negatives", type=int, default=512, help="per device and step")
  add("--width", type=int, default=128, help="of the two tables")
  add("--vocab", type=int, help="keep so many words and join the rest")
  add("--corpus", metavar="FILE", help="UTF-8 text to train on")
  add("--eval-tokens", type=int, default=4096, help="of held-out text")
  train_flags.add_output(add, _PLOT)
  add("--out", metavar="DIR", help="numbers of every step go to steps.jsonl")
  add(
    "--trace",
    metavar="DIR",
    help="record here, in a new directory, which rows of each table's gradient"
    " every device touches; `python -m benchmarks.run sparsity DIR` reads it",
  )
  add("--trace-steps", type=int, default=32, help="the first so many steps")


_POSITIVE = ("steps", "negatives", "width", "lr", "eval_tokens", "trace_steps")


def _broken_rule(flags: argparse.Namespace) -> str | None:
  if broken := train_flags.broken_rule(flags, _POSITIVE):
    return broken
  if flags.batch_tokens < 1 or flags.batch_tokens % LENGTH:
    return (
      f"--batch-tokens must be a positive multiple of {LENGTH},"
      f" got {flags.batch_tokens}"
    )
  if flags.vocab is not None and flags.vocab < 2:
    return f"--vocab must be at least 2, got {flags.vocab}"
  if flags.out and flags.sync == "compare":
    return "--out goes with --sync zen or pmean, got --sync compare"
  return _broken_sparsifier(flags) or _broken_trace(flags)


def _broken_sparsifier(flags: argparse.Namespace) -> str | None:
  if flags.sparsifier == "none":
    return None
  if flags.sync != "zen" or flags.grads != "dense":
    return (
      "--sparsifier takes the place of zen_sync and needs dense gradients, got"
      f" --sync {flags.sync} --grads {flags.grads}"
    )
  if not 0 < flags.density <= 1:
    return f"--density must be in (0, 1], got {flags.density}"
  return None


def _broken_trace(flags: argparse.Namespace) -> str | None:
  if not flags.trace:
    return None
  if flags.coordinator is not None:
    return "--trace records the devices of one process, got --coordinator"
  if flags.sync == "compare":
    return "--trace goes with --sync zen or pmean, got --sync compare"
  try:
    traces.check_free(flags.trace)
  except ValueError as error:
    return f"--trace: {error}"
  return None
