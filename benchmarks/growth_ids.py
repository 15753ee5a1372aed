"""Real ids as training reads them: orders of one text, step by step.

NumPy only. Each yields steps without end, of each device the ascending rows of
its `tokens` ids.
"""

from collections.abc import Callable, Iterator
import itertools

import numpy as np

Step = list[np.ndarray]
_WINDOW = 64


def starts(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Contiguous text from a random place, of every device and step its own."""
  rng = np.random.default_rng([seed, n])
  while True:
    at = rng.integers(0, len(ids) - tokens + 1, n)
    yield [np.unique(ids[a : a + tokens]) for a in at]


def windows(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Windows of 64 tokens, shuffled: as `train_lm.py` reads them."""
  rng = np.random.default_rng([seed, n])
  count = len(ids) // _WINDOW
  cut = ids[: count * _WINDOW].reshape(count, _WINDOW)
  size = max(tokens // _WINDOW, 1)
  while True:
    order = rng.permutation(count)[: count // (n * size) * n * size]
    for step in order.reshape(-1, n, size):
      yield [np.unique(cut[mine]) for mine in step]


def streams(
  ids: np.ndarray, n: int, tokens: int, *, seed: int
) -> Iterator[Step]:
  """Every device reads a part of its own from front to back."""
  rng = np.random.default_rng([seed, n])
  part = len(ids) // n
  at = rng.integers(0, part)
  while True:
    places = at + np.arange(tokens)
    yield [np.unique(ids[d * part + places % part]) for d in range(n)]
    at += tokens


def apart(ids: np.ndarray, n: int, tokens: int, *, seed: int) -> Iterator[Step]:
  """As `streams`, one step in 13: so steps may be recorded, too."""
  yield from itertools.islice(streams(ids, n, tokens, seed=seed), 0, None, 13)


ORDERS: dict[str, Callable[..., Iterator[Step]]] = {
  "starts": starts,
  "windows": windows,
  "streams": streams,
  "streams, 1 in 13": apart,
}
