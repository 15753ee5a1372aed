"""The flags of the language model, and what they must satisfy."""

import argparse
from collections.abc import Sequence

import optax

from examples.studies.common import flags as common
from examples.studies.common.trainer import adagrad
from examples.studies.lm.data import LENGTH
from zenjax.planner import traces

# The first is the program's: it reads and writes one accumulator of a table's
# size, Adam two, and Adam's momentum moves even the rows that no word of the
# batch touched. On CPU devices that share two cores such sweeps of the tables
# hide the synchronization. SGD sweeps less still, but hardly learns rare words;
# with a sparsifier it is the one that learns as it does without.
OPTIMIZERS: common.Optimizers = {
  "adagrad": (adagrad, 0.03),
  "adam": (optax.adam, 0.01),
  "sgd": (optax.sgd, 1.0),
}

_COMPARE_STEPS = 30  # Three runs, to end in some minutes on two CPU cores.
_TRAIN_STEPS = 200  # About one epoch of the standard library on 8 devices.
_PLOT = "train_lm.png"


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the flags, or ends the program with a message about a bad one."""
  parser = common.parser(description, "lm")
  _add_flags(parser)
  flags = parser.parse_args(argv)
  if broken := _broken_rule(flags):
    parser.error(broken)
  common.set_defaults(
    flags,
    OPTIMIZERS,
    compare_steps=_COMPARE_STEPS,
    train_steps=_TRAIN_STEPS,
    plot=_PLOT,
  )
  return flags


def _add_flags(parser: argparse.ArgumentParser) -> None:
  steps = f"{_COMPARE_STEPS} in compare, else {_TRAIN_STEPS}"
  common.add_training(parser, OPTIMIZERS, steps)
  common.add_sparsifier(
    parser,
    "in the place of zen_sync: the largest part of the whole gradient is sent,"
    " the rest waits",
  )
  add = parser.add_argument
  add("--batch-tokens", type=int, default=4096, help="per device and step")
  add("--negatives", type=int, default=512, help="per device and step")
  add("--width", type=int, default=128, help="of the two tables")
  add("--vocab", type=int, help="keep so many words and join the rest")
  add("--corpus", metavar="FILE", help="UTF-8 text to train on")
  add("--eval-tokens", type=int, default=4096, help="of held-out text")
  common.add_files(parser, f"{_PLOT} in compare")
  add(
    "--trace",
    metavar="DIR",
    help="record here, in a new directory, which rows of each table's gradient"
    " every device touches; `zenjax plan --trace DIR` reads it",
  )
  add("--trace-steps", type=int, default=32, help="the first so many steps")
  common.add_processes(parser)


_POSITIVE = ("steps", "negatives", "width", "lr", "eval_tokens", "trace_steps")


def _broken_rule(flags: argparse.Namespace) -> str | None:
  if broken := common.broken_rule(flags, _POSITIVE):
    return broken
  if flags.batch_tokens < 1 or flags.batch_tokens % LENGTH:
    return (
      f"--batch-tokens must be a positive multiple of {LENGTH},"
      f" got {flags.batch_tokens}"
    )
  if flags.vocab is not None and flags.vocab < 2:
    return f"--vocab must be at least 2, got {flags.vocab}"
  sparse = flags.sparsifier != "none"
  if sparse and (flags.sync != "zen" or flags.grads != "dense"):
    return (
      "--sparsifier takes the place of zen_sync and needs dense gradients, got"
      f" --sync {flags.sync} --grads {flags.grads}"
    )
  return _broken_trace(flags) if flags.trace else None


def _broken_trace(flags: argparse.Namespace) -> str | None:
  if flags.coordinator is not None:
    return "--trace records the devices of one process, got --coordinator"
  try:
    traces.check_free(flags.trace)
  except ValueError as error:
    return f"--trace: {error}"
  return None
