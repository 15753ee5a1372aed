"""Text for the language model: windows, held out or in batches.

Batches are a pure function of the seed and the step.

Letters: B windows of a device in a step, L predictions of a window, S negatives
of a device, n devices, V words.
"""

import argparse
from collections.abc import Iterator
import dataclasses

import numpy as np

from examples.studies.common import cluster
from examples.studies.lm import corpus

LENGTH = 64  # L. A window holds L + 1 words and predicts all but the first.
PADDING = -1  # In the place of words, where the text ends within a window.

# Windows are held out in stretches of HELD_OUT_RUN, one stretch in
# HELD_OUT_EVERY, so that most of their surroundings were not trained on either.
_HELD_OUT_RUN = 128
_HELD_OUT_EVERY = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
  """Holds what all devices train on in one step, split along the first axes.

  Attributes:
    windows: [n * B, L + 1] int32, words or `PADDING`.
    negatives: [n * S] int32, words from the log-uniform law.
  """

  windows: np.ndarray
  negatives: np.ndarray

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The arrays that a step takes."""
    return self.windows, self.negatives

  @property
  def size(self) -> int:
    """Tokens."""
    return len(self.windows) * LENGTH

  def rotated(self, devices: int) -> "Batch":
    """Gives every device the work of its neighbour.

    The mean over devices is the same, but for the order of its summation.
    """
    return Batch(
      np.roll(self.windows, len(self.windows) // devices, axis=0),
      np.roll(self.negatives, len(self.negatives) // devices),
    )


def load(
  flags: argparse.Namespace, devices: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Reads the text that the program's flags name.

  Returns:
    Windows to train on, windows held out, and the number of words.
  """
  try:
    text = corpus.load_tokens(flags.corpus)
  except (OSError, ValueError) as error:
    raise SystemExit(f"--corpus: {error}") from error
  ids, vocab = text.ids, len(text.vocab)
  cluster.require_same("The text", ids)
  if flags.vocab is not None and flags.vocab < vocab:
    ids, vocab = cap_vocabulary(ids, flags.vocab), flags.vocab
  windows, held_out = split(ids)
  needed = devices * flags.batch_tokens // LENGTH
  if len(windows) < needed or len(held_out) < devices:
    raise SystemExit(
      f"--corpus must hold a batch for {devices} devices and some text beside,"
      f" got {len(ids):,} tokens: give more text or a smaller --batch-tokens"
    )
  print(
    f"{len(ids):,} tokens, {vocab:,} distinct; {devices} devices,"
    f" {devices * flags.batch_tokens:,} tokens a step"
  )
  return windows, _sample(held_out, flags.eval_tokens, devices), vocab


def split(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Cuts a text into windows, [*, L + 1]: to train on, and held out.

  The last one is padded.
  """
  missing = -len(ids) % (LENGTH + 1)
  windows = np.pad(ids, (0, missing), constant_values=PADDING)
  windows = windows.reshape(-1, LENGTH + 1)
  count = len(windows)
  held = np.arange(count) // _HELD_OUT_RUN % _HELD_OUT_EVERY
  held = held == _HELD_OUT_EVERY // 2
  return windows[~held], windows[held]


def _sample(held_out: np.ndarray, tokens: int, devices: int):
  """Picks held-out windows, evenly spaced, that predict about `tokens` words.

  Returns:
    [m, L + 1], m a multiple of `devices` and at least `devices`.
  """
  per_device = min(tokens // LENGTH, len(held_out)) // devices
  count = max(per_device, 1) * devices
  return held_out[np.linspace(0, len(held_out) - 1, count).astype(int)]


def batches(
  windows: np.ndarray,
  *,
  devices: int,
  batch_tokens: int,
  negatives: int,
  vocab: int,
  seed: int,
  first_step: int = 0,
) -> Iterator[Batch]:
  """Yields batches from `first_step` on; every epoch has its own order."""
  per_step = devices * (batch_tokens // LENGTH)
  steps = len(windows) // per_step
  step, epoch, order = first_step, -1, np.empty(0, np.int64)
  while True:
    if step // steps != epoch:
      epoch = step // steps
      order = np.random.default_rng([seed, 0, epoch]).permutation(len(windows))
    at = step % steps * per_step
    yield Batch(
      windows[order[at : at + per_step]],
      _negatives(devices * negatives, vocab, [seed, 1, step]),
    )
    step += 1


def _negatives(count: int, vocab: int, seed: list[int]) -> np.ndarray:
  # Words are sorted by frequency, and word frequencies are Zipf-like: the
  # inverse of the cumulative distribution log(1 + word) / log(1 + V).
  uniform = np.random.default_rng(seed).random(count)
  words = np.exp(uniform * np.log(vocab + 1.0)).astype(np.int32) - 1
  return np.minimum(words, vocab - 1)


def cap_vocabulary(ids: np.ndarray, vocab: int) -> np.ndarray:
  """Joins all but the `vocab - 1` most frequent words into one word.

  Args:
    ids: [T] int32, sorted by frequency: 0 is the most frequent word.
    vocab: Words to keep, the joint one included.

  Returns:
    [T] int32, sorted by frequency again.
  """
  ids = np.minimum(ids, vocab - 1)
  counts = np.bincount(ids, minlength=vocab)
  rank = np.empty(vocab, np.int32)
  rank[np.argsort(-counts, kind="stable")] = np.arange(vocab, dtype=np.int32)
  return rank[ids]
