"""The named workloads, at full size and at a size that fits two cores.

Importing this needs NumPy only, so tests take their ids from here too:

>>> from benchmarks import workloads
>>> lm = workloads.get("lm1b-lstm")
>>> [len(part) for part in workloads.ids(lm, n=2, seed=0)]
[4085, 4085]
"""

import dataclasses
import functools
from typing import Literal
import zlib

import numpy as np

from benchmarks.ids import EveryRow
from benchmarks.ids import HashedFields
from benchmarks.ids import Source
from benchmarks.ids import Text
from benchmarks.ids import Zipf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
  """A table, and the rows of it that devices look up.

  Attributes:
    name: The key in `FULL` and `SCALED`, or in `SWEEP`.
    rows: Rows of the table.
    width: Elements of a row, float32.
    density: Distinct rows of one device over `rows`; at `n = 8` where it
      depends on `n`.
    union_growth: Distinct rows of 8 devices together over those of one (the
      Zen paper's densification ratio).
    skew: Density of the densest eighth of the table over `density`, on one
      device (the Zen paper's skewness ratio with 8 parts).
    source: Draws the ids.
    gradient: How the step comes by its gradient: "scatter-add" as autodiff of a
      look-up does, or "matmul" as a dense layer does.
  """

  name: str
  rows: int
  width: int
  density: float
  union_growth: float
  skew: float
  source: Source
  gradient: Literal["matmul", "scatter-add"] = "scatter-add"

  @property
  def bytes(self) -> int:
    return self.rows * self.width * 4


def ids(workload: Workload, n: int, seed: int) -> list[np.ndarray]:
  """Rows looked up by each of `n` devices in step `seed`: `n` x `[T]` int32."""
  key = zlib.crc32(workload.name.encode())
  rng = np.random.default_rng([key, workload.rows, n, seed])
  return workload.source.draw(workload.rows, n, rng)


def _zipf(name, rows, width, density, *, exponent, growth, skew):
  return Workload(
    name=name,
    rows=rows,
    width=width,
    density=density,
    union_growth=growth,
    skew=skew,
    source=Zipf(density=density, exponent=exponent),
  )


# Densities, and the parameters of a table, are those of the Zen paper (Wang et
# al., OSDI'25, table 1; BERT from its first version, arXiv 2309.13254).
# Exponents are fitted: with them the union of 128 devices is 38.5 times one
# device's for BERT, as the paper reports, 25 times for NMT, 23 for DeepFM, and
# that of 64 devices is 18 times for the LSTM.
_LSTM = {"exponent": 1.27, "growth": 4.5, "skew": 6.6}
_DEEPFM = {"exponent": 1.15, "growth": 4.6, "skew": 5.8}
_NMT = {"exponent": 1.13, "growth": 4.7, "skew": 5.7}
_BERT = {"exponent": 1.03, "growth": 5.5, "skew": 5.7}

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
  return Workload(
    name="criteo1tb-dlrm",
    rows=4_194_304 // divisor,
    width=128,
    density=0.0325,
    union_growth=4.4,
    skew=1.0,
    source=HashedFields(
      cardinalities=tuple(max(3, size // divisor) for size in _CRITEO_1TB),
      global_batch=262_144 // divisor,
      exponent=1.1,
      shift=1.0 / divisor,
    ),
  )


def _dense(name, rows, width, gradient):
  return Workload(
    name=name,
    rows=rows,
    width=width,
    density=1.0,
    union_growth=1.0,
    skew=1.0,
    source=EveryRow(),
    gradient=gradient,
  )


# What a sparse scheme costs where there is nothing to save: every row looked
# up, and a gradient that itself costs next to nothing.
_DENSE = (
  _dense("dense-16", 200_000, 16, "scatter-add"),
  _dense("dense-128", 100_000, 128, "scatter-add"),
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


def _sweep(percent, growth, skew):
  return _zipf(
    f"sweep-{percent:g}",
    50_000,
    128,
    percent / 100,
    exponent=_LSTM["exponent"],
    growth=growth,
    skew=skew,
  )


# One table from next to nothing to all of it, the per cent of its rows that a
# device touches in the name: where schemes overtake each other. Growth and skew
# are what the LSTM's exponent gives.
SWEEP: dict[str, Workload] = {
  w.name: w
  for w in (
    _sweep(0.01, growth=6.3, skew=7.5),
    _sweep(0.1, growth=5.0, skew=7.4),
    _sweep(1, growth=4.5, skew=6.7),
    _sweep(5, growth=4.0, skew=5.7),
    _sweep(20, growth=3.1, skew=3.8),
    _sweep(50, growth=1.9, skew=2.0),
    _dense("sweep-100", 50_000, 128, "scatter-add"),
  )
}
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
  from examples import corpus

  text = corpus.load_tokens()
  return Workload(
    name="stdlib-lm",
    rows=len(text.vocab),
    width=128,
    density=0.0036,
    union_growth=5.4,
    skew=6.4,
    source=Text(load=lambda: text.ids, tokens=4096),
  )


def get(name: str, *, full_size: bool = False) -> Workload:
  """The workload called `name`.

  Args:
    name: One of `ALL_NAMES`.
    full_size: The size of the published model, or else one for two cores. The
      sweep has one size only.

  Raises:
    ValueError: There is no such workload.
  """
  if name == "stdlib-lm":
    return stdlib_lm()
  table = (FULL if full_size else SCALED) | SWEEP
  if name not in table:
    known = ", ".join(ALL_NAMES)
    raise ValueError(f"`name` must be one of {known}, got {name!r}.")
  return table[name]
