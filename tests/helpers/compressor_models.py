"""NumPy models of the compressors, and the table of all of them.

`ROWS` is what the contract tests run: add a compressor, and its model, here. A
model `(x, uniform) -> y` says what blocks `x: [m, block]` are after they were
sent. `uniform: [m, block]` are random numbers in [0, 1).
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from zenjax import compress

F32 = np.float32
BLOCK = 64
Model = Callable[[np.ndarray, np.ndarray], np.ndarray]


def low_bit(bits: int, stochastic: bool = False) -> Model:
  most = 2 ** (bits - 1) - 1

  def model(x, uniform):
    scale = np.abs(x).max(axis=1, keepdims=True) / F32(most)
    x = x * np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
    levels = np.floor(x + uniform) if stochastic else np.rint(x)
    return np.clip(levels, -most, most).astype(F32) * scale

  return model


def cast(dtype: Any) -> Model:
  dtype = jnp.dtype(dtype)
  limits = jnp.finfo(dtype)

  def model(x, uniform):
    del uniform
    if limits.maxexp == 128:
      return x.astype(dtype).astype(F32)
    _, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))
    scale = np.ldexp(F32(1), np.maximum(exponent - limits.maxexp + 1, -120))
    return (x / scale).astype(dtype).astype(F32) * scale

  return model


def sign(x: np.ndarray, uniform: np.ndarray) -> np.ndarray:
  del uniform
  scale = np.abs(x).mean(axis=1, keepdims=True)
  return np.where(x < 0, -scale, scale)


def vote(x: np.ndarray, uniform: np.ndarray) -> np.ndarray:
  del uniform
  return np.sign(x)


def one_bit(x: np.ndarray, uniform: np.ndarray) -> np.ndarray:
  del uniform
  out = np.zeros_like(x)
  for here, got in zip(x, out):
    for side in (here < 0, here >= 0):
      if side.any():
        got[side] = here[side].mean(dtype=np.float64)
  return out


@dataclasses.dataclass(frozen=True)
class Row:
  """A compressor, its model, and what it promises."""

  compressor: Any
  model: Model
  keeps: bool  # all errors: nothing is lost
  draws: bool = False  # random numbers


ROWS = {
  "int8": Row(compress.LowBit(8, block=BLOCK), low_bit(8), True),
  "int4": Row(compress.LowBit(4, block=BLOCK), low_bit(4), True),
  "int2": Row(compress.LowBit(2, block=BLOCK), low_bit(2), True),
  "qsgd": Row(
    compress.LowBit(4, "stochastic", BLOCK), low_bit(4, True), False, True
  ),
  "terngrad": Row(
    compress.LowBit(2, "stochastic", BLOCK), low_bit(2, True), False, True
  ),
  "bfloat16": Row(compress.Cast(jnp.bfloat16, BLOCK), cast(jnp.bfloat16), True),
  "float16": Row(compress.Cast(jnp.float16, BLOCK), cast(jnp.float16), True),
  "e4m3": Row(
    compress.Cast(jnp.float8_e4m3fn, BLOCK), cast(jnp.float8_e4m3fn), True
  ),
  "e5m2": Row(
    compress.Cast(jnp.float8_e5m2, BLOCK), cast(jnp.float8_e5m2), True
  ),
  "sign": Row(compress.Sign(BLOCK), sign, True),
  "one_bit": Row(compress.OneBit(BLOCK), one_bit, True),
  "vote": Row(compress.SignVote(BLOCK), vote, False),
}


def step(
  model: Model,
  given: np.ndarray,
  sizes: tuple[int, ...],
  uniforms: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """One compressed mean.

  Args:
    model: What sending does to blocks.
    given: What each device has, residual included, `[n, M, block]`; `n` divides
      `M`.
    sizes: Devices along each axis, the slowest link first.
    uniforms: Random numbers of each device, `[n, 2, M, block]`.

  Returns:
    The mean `[M, block]`, and what each device keeps, `[n, M, block]`.
  """
  n, count, block = given.shape
  slices = sizes[-1] if len(sizes) > 1 else 1
  hosts, part = n // slices, count // slices
  mine = part // hosts
  kept, mean = np.zeros_like(given), np.zeros_like(given[0])
  nothing = np.zeros((n, 2, count, block), F32)
  uniforms = nothing if uniforms is None else uniforms
  for s in range(slices):
    rows = slice(s * part, (s + 1) * part)
    ranks = [h * slices + s for h in range(hosts)]
    sums = [
      _sum(given[h * slices : (h + 1) * slices, rows]) for h in range(hosts)
    ]
    sent = [model(x, uniforms[r, 0, :part]) for x, r in zip(sums, ranks)]
    for r, x, y in zip(ranks, sums, sent):
      kept[r, rows] = x - y
    for h, r in enumerate(ranks):
      own = slice(h * mine, (h + 1) * mine)
      total = _sum([y[own] for y in sent])
      back = model(total / F32(n), uniforms[r, 1, :mine])
      mean[rows][own] = back
      kept[r, rows][own] += total - back * F32(n)
  return mean, kept


def _sum(parts: Any) -> np.ndarray:
  total = np.zeros_like(parts[0])
  for x in parts:
    total = total + x
  return total
