"""Steps drawn at random, for the planner's search to plan.

Seconds are multiples of 2**-20, so that sums in any order are equal.
"""

from typing import NamedTuple

import numpy as np

from benchmarks import library

_TICK = 2.0**-20


class Drawn(NamedTuple):
  """Tensors, and what they cost in groups."""

  tensors: tuple[library.Tensor, ...]
  groups: library.GroupCosts


def small(seed: int, tensors: int, options: int) -> Drawn:
  """Anything goes: work, link and backward pass of one magnitude.

  The first option is all link. Not every tensor has all others.
  """
  rng = np.random.default_rng(seed)
  busy = 2.0 ** rng.uniform(-2, 2)  # The backward pass over communication.
  once = [_option(f"s{o}", rng.integers(0, 400, 3), o) for o in range(options)]
  drawn = []
  for j in range(tensors):
    own = []
    for o in range(options):
      if o and rng.random() < 0.15:
        continue
      most = (2000, 4000, 2000) if o == 0 else (1500, 2500, 1500)
      ticks = rng.integers(0, most, 3)
      fixed = [once[o].before_s, once[o].link_s, once[o].after_s]
      own.append(_option(f"s{o}", ticks + np.array(fixed) / _TICK, o))
    backward = round(rng.integers(0, 3000) * busy)
    size = float(rng.integers(1, 6) * 1000)  # With ties.
    drawn.append(library.Tensor(f"t{j}", size, backward * _TICK, tuple(own)))
  groups = library.GroupCosts(drawn, {option.name: option for option in once})
  return Drawn(tuple(drawn), groups)


def _option(name: str, ticks: np.ndarray, number: int) -> library.Option:
  before, link, after = (float(tick) * _TICK for tick in ticks)
  if number == 0:  # Nothing to do on the device.
    before = after = 0.0
  return library.Option(name, before, link, after)


def model(seed: int, tensors: int, sparse: int) -> Drawn:
  """A model's tensors, of which so many have rows to leave out.

  Half of them are tiny, 256 bytes to 64 KB, the others up to 100 MB, all
  log-uniform. Each goes as it is or in 16 bits, and the sparse ones by two more
  schemes, at 1 to 60 % of the bytes. Link and memory are drawn too: 200 MB/s to
  30 GB/s, 3 to 300 GB/s, 10 us to 1 ms.
  """
  rng = np.random.default_rng(seed)
  bandwidth, memory = 10 ** rng.uniform((8.3, 9.5), (10.5, 11.5))
  latency, launch = 10 ** rng.uniform(-5, -3), 1e-5
  once = [
    _rounded("pmean", 0.0, latency, 0.0),
    _rounded("pmean16", launch, latency, launch),
    _rounded("all_gather", launch, latency, launch),
    _rounded("zen", 2 * launch, 2 * latency, launch),
  ]
  sizes = np.exp(rng.uniform(np.log(64e3), np.log(1e8), tensors))
  tiny = rng.permutation(tensors)[: tensors // 2]  # Biases and norms.
  sizes[tiny] = np.exp(rng.uniform(np.log(256), np.log(64e3), len(tiny)))
  with_rows = set(rng.choice(tensors, sparse, replace=False).tolist())
  busy = 2 * rng.uniform(0.1, 1) / bandwidth
  drawn = []
  for j, size in enumerate(sizes.tolist()):
    work = size / memory
    parts = [(0.0, 2 * size / bandwidth, 0.0)]
    parts.append((1.5 * work, size / bandwidth, 1.5 * work))
    if j in with_rows:
      gathered, sent = size * rng.uniform((0.01, 0.01), (0.9, 0.6))
      parts.append((work, 2 * gathered / bandwidth, 3 * gathered / memory))
      parts.append((work, 2 * sent / bandwidth, 5 * sent / memory))
    own = tuple(
      _rounded(o.name, o.before_s + before, o.link_s + link, o.after_s + after)
      for o, (before, link, after) in zip(once, parts)
    )
    backward = _rounded("", busy * size + rng.exponential(1e-4), 0.0, 0.0)
    drawn.append(library.Tensor(f"t{j}", size, backward.before_s, own))
  groups = library.GroupCosts(drawn, {option.name: option for option in once})
  return Drawn(tuple(drawn), groups)


def _rounded(
  name: str, before: float, link: float, after: float
) -> library.Option:
  tick = _TICK / 1024
  seconds = (round(x / tick) * tick for x in (before, link, after))
  return library.Option(name, *seconds)
