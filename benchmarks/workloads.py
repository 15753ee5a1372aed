"""The named workloads, at full size and at a size that fits two cores.

A source draws the rows that each of `n` devices looks up in one step. Rows are
sorted by frequency, row 0 the most frequent, as vocabularies usually are.
Importing this needs NumPy only, so tests take their ids from here too:

>>> from benchmarks import workloads
>>> lm = workloads.get("lm1b-lstm")
>>> [len(part) for part in workloads.ids(lm, n=2, seed=0)]
[4085, 4085]
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Literal
import zlib

import numpy as np

# As a dense layer makes it, or as autodiff of a look-up does.
Gradient = Literal["matmul", "scatter-add"]

# Sources: `draw` returns the look-ups of each device, `n` arrays `[T]` int32 in
# `[0, rows)`.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
  """Independent look-ups from one Zipf-Mandelbrot distribution.

  The probability of row `k` is the integral of `(x + shift) ** -exponent` over
  `[k, k + 1]`: the usual formula smoothed, with an inverse in closed form, so
  that a table of ten million rows needs no table of probabilities.

  Attributes:
    density: Distinct rows of a device over the rows of the table. Exact: what
      varies between devices is which rows, and how often.
    exponent: Decides how the union grows with the number of devices; not 1.
    shift: Flattens the head; hardly changes the union.
  """

  density: float
  exponent: float
  shift: float = 2.7  # Mandelbrot's value for words

  def draw(self, rows, n, rng):
    distinct = max(1, round(self.density * rows))
    lookups = _expected_lookups(distinct, rows, self.exponent, self.shift)
    sample = functools.partial(zipf, rng, rows, self.exponent, self.shift)
    return [_until_distinct(sample, distinct, lookups, rng) for _ in range(n)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HashedFields:
  """Fields with vocabularies of their own, hashed into one table."""

  cardinalities: tuple[int, ...]
  global_batch: int  # examples of all devices; one look-up a field each
  exponent: float  # of every field, as the shift
  shift: float

  def draw(self, rows, n, rng):
    batch = self.global_batch // n
    fields = list(enumerate(self.cardinalities))
    return [
      np.concatenate([self._field(*f, rows, batch, rng) for f in fields])
      for _ in range(n)
    ]

  def _field(self, field, size, rows, batch, rng):
    values = zipf(rng, size, self.exponent, self.shift, batch)
    mixed = _fmix64(values.astype(np.uint64) + np.uint64(field << 40))
    return (mixed % np.uint64(rows)).astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
  """Contiguous text: every device reads from a place of its own."""

  load: Callable[[], np.ndarray]  # the ids of the whole corpus, `[N]`
  tokens: int  # ids read by a device in one step

  def draw(self, rows, n, rng):
    corpus = self.load()
    if len(corpus) < self.tokens:
      raise ValueError(
        f"`tokens` must not exceed the corpus, got {self.tokens} tokens a"
        f" device from {len(corpus)}: take fewer tokens or a longer text."
      )
    starts = rng.integers(0, len(corpus) - self.tokens + 1, size=n)
    return [corpus[start : start + self.tokens] for start in starts]


class EveryRow:
  """Every device looks up every row once: density 100 %."""

  def draw(self, rows, n, rng):
    return [rng.permutation(rows).astype(np.int32) for _ in range(n)]


Source = Zipf | HashedFields | Text | EveryRow


def zipf(
  rng: np.random.Generator, rows: int, exponent: float, shift: float, size: int
) -> np.ndarray:
  """Samples `[size]` int64 of a Zipf-Mandelbrot distribution over `rows`."""
  power = 1 - exponent  # of the antiderivative, but for a constant factor
  a, b = np.array([shift, rows + shift]) ** power
  x = (a + rng.random(size) * (b - a)) ** (1 / power) - shift
  return np.clip(x.astype(np.int64), 0, rows - 1)


@functools.lru_cache(maxsize=64)
def _expected_lookups(distinct, rows, exponent, shift):
  """Look-ups after which `distinct` different rows are expected."""
  # Row k is missed by T look-ups with probability exp(-T p_k), about. On a
  # geometric grid of rows 4,096 cells are as good as ten million.
  edges = np.unique(np.geomspace(1, rows + 1, 4096).astype(np.int64)) - 1
  count = np.diff(edges)
  mass = np.diff((edges + shift) ** (1 - exponent))
  p = mass / mass.sum() / count
  low, high = float(distinct), 1e12
  while high / low > 1 + 1e-6:
    middle = np.sqrt(low * high)
    seen = -(count * np.expm1(-middle * p)).sum()
    low, high = (middle, high) if seen < distinct else (low, middle)
  return int(np.ceil(high))


def _until_distinct(sample, distinct, lookups, rng):
  """Draws until `distinct` rows were seen; returns exactly `lookups` ids."""
  ids = sample(lookups)
  while True:
    _, first = np.unique(ids, return_index=True)
    if len(first) >= distinct:
      break
    ids = np.concatenate([ids, sample(max(64, lookups // 8))])
  first = np.sort(first)[:distinct]
  stream = ids[: first[-1] + 1]
  # Shapes are static under jit, so every device makes the same number of
  # look-ups: repeated ones are dropped if in excess, and fill up if lacking.
  repeats = np.delete(stream, first)[: lookups - distinct]
  missing = lookups - distinct - len(repeats)
  filled = [stream[first], repeats, rng.choice(stream, missing)]
  return rng.permutation(np.concatenate(filled)).astype(np.int32)


def _fmix64(x):
  # Finalizer of MurmurHash3 (Austin Appleby, public domain), 64 bits.
  x = x ^ (x >> np.uint64(33))
  x = x * np.uint64(0xFF51AFD7ED558CCD)
  x = x ^ (x >> np.uint64(33))
  x = x * np.uint64(0xC4CEB9FE1A85EC53)
  return x ^ (x >> np.uint64(33))


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
  """A table, and the rows of it that devices look up."""

  name: str  # the key in `FULL` and `SCALED`, or in `SWEEP`
  rows: int
  width: int  # elements of a row, float32
  # Distinct rows of one device over `rows`, at `n = 8` where it depends on `n`.
  density: float
  # Distinct rows of 8 devices together over those of one (the Zen paper's
  # densification ratio).
  union_growth: float
  source: Source
  gradient: Gradient = "scatter-add"  # How the step comes by its gradient.

  @property
  def bytes(self) -> int:
    return self.rows * self.width * 4


def ids(workload: Workload, n: int, seed: int) -> list[np.ndarray]:
  """Rows looked up by each of `n` devices in step `seed`: `n` x `[T]` int32."""
  key = zlib.crc32(workload.name.encode())
  rng = np.random.default_rng([key, workload.rows, n, seed])
  return workload.source.draw(workload.rows, n, rng)


def sets(workload: Workload, n: int, seed: int) -> list[np.ndarray]:
  """Returns of each device the distinct rows of a step, ascending."""
  return [np.unique(found) for found in ids(workload, n, seed)]


def union(sets: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the rows that any of the sets holds, ascending."""
  return np.unique(np.concatenate(sets))


def volume(
  workload: Workload, steps: Sequence[Sequence[np.ndarray]]
) -> dict[str, float]:
  """Returns bytes that a ring all-reduce moves, and that any scheme must.

  `steps` has, of each step and device, the rows that are looked up.
  """
  n = len(steps[0])
  local = float(np.mean([len(np.unique(i)) for step in steps for i in step]))
  together = float(np.mean([len(union(step)) for step in steps]))
  return {
    "density": local / workload.rows,
    "union_density": together / workload.rows,
    "dense_bytes": 2 * (n - 1) / n * workload.bytes,
    "bound_bytes": (n - 1) / n * (local + together) * workload.width * 4,
  }


def _zipf(name, rows, width, density, *, exponent, growth):
  source = Zipf(density=density, exponent=exponent)
  return Workload(name, rows, width, density, growth, source)


# Densities, and the parameters of a table, are those of the Zen paper (Wang et
# al., OSDI'25, table 1; BERT from its first version, arXiv 2309.13254).
# Exponents are fitted: with them the union of 128 devices is 38.5 times one
# device's for BERT, as the paper reports, 25 times for NMT, 23 for DeepFM, and
# that of 64 devices is 18 times for the LSTM.
_LSTM = {"exponent": 1.27, "growth": 4.5}
_DEEPFM = {"exponent": 1.15, "growth": 4.6}
_NMT = {"exponent": 1.13, "growth": 4.7}
_BERT = {"exponent": 1.03, "growth": 5.5}

# Vocabularies of the 26 categorical fields of the Criteo Terabyte click logs,
# as the MLPerf DLRM reference counts them before it caps them at 40 million.
_CRITEO_1TB = (
  *(227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467),
  *(3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14, 292775614),
  *(40790948, 187188510, 590152, 12973, 108, 36),
)


def _dlrm(divisor):
  """AlgoPerf's small DLRM, or that with everything divided by `divisor`."""
  # One table of 4,194,304 rows for all fields, ids taken modulo its rows, and a
  # global batch of 262,144 (mlcommons/algorithmic-efficiency, criteo1tb).
  # Dividing vocabularies, shift, table and batch alike keeps density and union.
  fields = HashedFields(
    cardinalities=tuple(max(3, size // divisor) for size in _CRITEO_1TB),
    global_batch=262_144 // divisor,
    exponent=1.1,
    shift=1.0 / divisor,
  )
  rows = 4_194_304 // divisor
  return Workload("criteo1tb-dlrm", rows, 128, 0.0325, 4.4, fields)


def _dense(name, rows, width, gradient: Gradient = "scatter-add"):
  return Workload(name, rows, width, 1.0, 1.0, EveryRow(), gradient)


# What a sparse scheme costs where there is nothing to save: every row looked
# up, and a gradient that itself costs next to nothing.
_DENSE = (
  _dense("dense-16", 200_000, 16),
  _dense("dense-128", 100_000, 128),
  _dense("matmul-16", 200_000, 16, "matmul"),
  _dense("matmul-128", 100_000, 128, "matmul"),
)

_FULL = (
  # 406M parameters.
  _zipf("lm1b-lstm", 793_470, 512, 0.0113, **_LSTM),
  # 214M parameters. The paper gives only the product: 16 is the width that the
  # DLRM reference uses for Criteo Kaggle, the rows are what then follows.
  _zipf("criteo-deepfm", 13_375_000, 16, 0.0280, **_DEEPFM),
  # 112M parameters, again only the product: 512 is the Transformer-base width.
  _zipf("iwslt-nmt", 218_750, 512, 0.0247, **_NMT),
  # 23M parameters: BERT-base's word-piece vocabulary and width.
  _zipf("squad-bert", 30_522, 768, 0.0106, **_BERT),
  _dlrm(1),
  *_DENSE,
)
_SCALED = (
  _zipf("lm1b-lstm", 100_000, 128, 0.0113, **_LSTM),
  _zipf("criteo-deepfm", 200_000, 16, 0.0250, **_DEEPFM),
  _zipf("iwslt-nmt", 54_688, 128, 0.0247, **_NMT),
  # Rows as at full size: 324 distinct ones are few enough already.
  _zipf("squad-bert", 30_522, 192, 0.0106, **_BERT),
  _dlrm(64),
  *_DENSE,
)
FULL: dict[str, Workload] = {w.name: w for w in _FULL}
SCALED: dict[str, Workload] = {w.name: w for w in _SCALED}


# One table from next to nothing to all of it, the per cent of its rows that a
# device touches in the name: where schemes overtake each other. Growth is what
# the LSTM's exponent gives.
_GROWTH = {0.01: 6.3, 0.1: 5.0, 1: 4.5, 5: 4.0, 20: 3.1, 50: 1.9}
_SWEEP = (
  *(
    _zipf(f"sweep-{x}", 50_000, 128, x / 100, exponent=1.27, growth=growth)
    for x, growth in _GROWTH.items()
  ),
  _dense("sweep-100", 50_000, 128),
)
SWEEP: dict[str, Workload] = {w.name: w for w in _SWEEP}
# What commands take by default. `stdlib-lm` is not in the tables: its rows are
# known once the text is read.
NAMES = (*SCALED, "stdlib-lm")
ALL_NAMES = (*NAMES, *SWEEP)


@functools.cache
def stdlib_lm() -> Workload:
  """Real ids: the sources of the Python standard library, word by word.

  The table is the vocabulary x 128; every device reads 4,096 contiguous tokens.
  Density and union are measured, and differ with the version of Python.
  """
  from examples.studies.lm import corpus

  text = corpus.load_tokens()
  source = Text(load=lambda: text.ids, tokens=4096)
  return Workload("stdlib-lm", len(text.vocab), 128, 0.0036, 5.4, source)


def get(name: str, *, full_size: bool = False) -> Workload:
  """Returns the workload called `name`, or raises ValueError.

  `full_size` is the size of the published model, or else one for two cores; the
  sweep has one size only.
  """
  if name == "stdlib-lm":
    return stdlib_lm()
  if name not in ALL_NAMES:
    known = ", ".join(ALL_NAMES)
    raise ValueError(f"`name` must be one of {known}, got {name!r}.")
  return ((FULL if full_size else SCALED) | SWEEP)[name]
