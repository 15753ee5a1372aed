"""Hypothesis strategies over the data of one fixed shape.

Shapes are few and fixed, so that thousands of drawn cases run through a handful
of compiled programs.
"""

import dataclasses

import cases
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """A fixed shape: one compiled program for each way of running it."""

  n: int
  rows: int
  width: int
  dtype: np.dtype

  def __str__(self):
    return f"{self.n}x{self.rows}x{self.width}-{self.dtype.name}"


def gradients(shape: Shape) -> st.SearchStrategy[np.ndarray]:
  """Stacks of one shape: sparse bits, or dense values with specials in them."""
  return st.one_of(_sparse_bits(shape), _patterns(shape))


def _sparse_bits(shape: Shape) -> st.SearchStrategy[np.ndarray]:
  """A few elements set to anything at all, the rest zero: shrinks well."""
  word = cases.word_of(shape.dtype)
  elements = st.one_of(
    st.sampled_from([int(bits) for bits in _special_bits(shape.dtype)]),
    st.integers(0, int(np.iinfo(word).max)),
  )
  return hnp.arrays(
    word,
    (shape.n, shape.rows, shape.width),
    elements=elements,
    fill=st.just(0),
  ).map(lambda words: words.view(shape.dtype))


@st.composite
def _patterns(draw, shape: Shape) -> np.ndarray:
  """Ids drawn device by device, values from a seed, then some specials."""
  n, rows, width = shape.n, shape.rows, shape.width
  seed = draw(st.integers(0, 2**32 - 1))
  scale = 2.0 ** draw(st.sampled_from([0, 0, 0, -14, 10, -120]))
  rng = np.random.default_rng(seed)
  values = (scale * rng.standard_normal((n, rows, width))).astype(shape.dtype)
  stack = cases.keep(values, [draw(_ids(rows)) for _ in range(n)])
  places = st.tuples(
    st.integers(0, n - 1), st.integers(0, rows - 1), st.integers(0, width - 1)
  )
  specials = _special_bits(shape.dtype).view(shape.dtype)
  for place, index in draw(
    st.lists(st.tuples(places, st.integers(0, len(specials) - 1)), max_size=6)
  ):
    stack[place] = specials[index]
  return stack


def _ids(rows: int) -> st.SearchStrategy[list[int]]:
  """The rows of one device: none, all, a range, or any set."""
  anything = st.lists(
    st.integers(0, rows - 1), max_size=min(rows, 12), unique=True
  )
  ends = st.tuples(st.integers(0, rows), st.integers(0, rows))
  ranges = ends.map(lambda ab: list(range(min(ab), max(ab))))
  strides = st.tuples(st.integers(0, rows - 1), st.integers(1, 33)).map(
    lambda start_step: list(range(start_step[0], rows, start_step[1]))
  )
  return st.one_of(
    anything, ranges, strides, st.just([]), st.just(list(range(rows)))
  )


def _special_bits(dtype) -> np.ndarray:
  """Bit patterns at the edges of the dtype, both signs."""
  info = ml_dtypes.finfo(dtype)
  floats = np.array(
    [0.0, 1.0, 1.5, float(info.max), float(info.smallest_normal), np.inf],
    np.float64,
  ).astype(dtype)
  word = cases.word_of(dtype)
  signaling = floats.view(word)[-1:] + word.type(1)
  quiet = np.array([np.nan]).astype(dtype).view(word)
  positive = np.concatenate(
    [
      floats.view(word),
      np.array([1, cases.largest_subnormal(dtype)], word),
      quiet,
      signaling,
    ]
  )
  sign = word.type(1 << (8 * word.itemsize - 1))
  return np.concatenate([positive, positive | sign])
