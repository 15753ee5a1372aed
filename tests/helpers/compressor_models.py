"""NumPy models of the compressors, and the table of all of them.

`ROWS` is what the contract tests run: add a compressor, and its model, here. A
model of a compressor made of blocks is a rule `(x, uniform) -> y`, which says
what blocks `x: [m, block]` are after they were sent. `uniform: [m, block]` are
random numbers in [0, 1).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sparsifier_models as sparsifiers

from zenjax import compress

F32 = np.float32
BLOCK = 64
# Two leaves that fill no whole blocks, and one element in the end.
SHAPES = {"a": (37, 20), "b": (450,), "c": ()}
LARGE = SHAPES | {"a": (200, 170)}  # ExDyna needs 32,768 elements.

Sizes = tuple[int, ...]  # devices along each axis, the slowest link first
Leaves = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Seen(NamedTuple):
  """What a program did in a step, for a model that cannot know all of it."""

  step: int
  update: Leaves
  before: Any  # the state, equal on all devices
  after: Any


# One step: the mean of leaves `[n, ..]`, and what each device keeps.
Model = Callable[[Leaves, Seen], tuple[Leaves, Leaves]]


# --- rules for blocks ---------------------------------------------------------


def low_bit(bits: int, stochastic: bool = False) -> Rule:
  most = 2 ** (bits - 1) - 1

  def rule(x, uniform):
    scale = np.abs(x).max(axis=1, keepdims=True) / F32(most)
    x = x * np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
    levels = np.floor(x + uniform) if stochastic else np.rint(x)
    return np.clip(levels, -most, most).astype(F32) * scale

  return rule


def cast(dtype: Any) -> Rule:
  dtype = jnp.dtype(dtype)
  limits = jnp.finfo(dtype)

  def rule(x, uniform):
    del uniform
    if limits.maxexp == 128:
      return x.astype(dtype).astype(F32)
    _, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))
    scale = np.ldexp(F32(1), np.maximum(exponent - limits.maxexp + 1, -120))
    return (x / scale).astype(dtype).astype(F32) * scale

  return rule


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


# --- models of a step ---------------------------------------------------------


def in_blocks(rule: Rule, sizes: Sizes, draws: bool = False) -> Model:
  """All leaves in blocks, each last one filled up with its own numbers."""
  n = int(np.prod(sizes))
  slices = sizes[-1] if len(sizes) > 1 else 1

  def step(given: Leaves, seen: Seen) -> tuple[Leaves, Leaves]:
    parts, spans = [], {}
    for name, x in given.items():
      flat = x.reshape(n, -1)
      size = -(-flat.shape[1] // BLOCK) * BLOCK
      start = sum(part.shape[1] for part in parts)
      whole = flat.shape[1] // BLOCK * BLOCK
      last = [np.resize(device[whole:], size - whole) for device in flat]
      parts.append(np.concatenate([flat[:, :whole], np.stack(last)], axis=1))
      spans[name] = start, start + flat.shape[1]
    blocks = np.concatenate(parts, axis=1).reshape(n, -1, BLOCK)
    blocks = np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % n), (0, 0)))
    uniforms = np.zeros((n, 2, *blocks.shape[1:]), F32)
    if draws:
      part = blocks.shape[1] // slices
      mine = part // (n // slices)
      both = _drawn(seen.step, n, part, mine)
      uniforms[:, 0, :part], uniforms[:, 1, :mine] = both
    mean, kept = _in_two_levels(rule, blocks, n // slices, slices, uniforms)
    leaf = lambda x, name: x.reshape(*x.shape[:-2], -1)[
      ..., slice(*spans[name])
    ]
    return (
      {k: leaf(mean, k).reshape(x.shape[1:]) for k, x in given.items()},
      {k: leaf(kept, k).reshape(x.shape) for k, x in given.items()},
    )

  return step


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(step, n, part, mine):
  """The random numbers of each device, by its keys."""

  def of(rank):
    key = jax.random.fold_in(jax.random.key(0), step)
    push, pull = jax.random.split(jax.random.fold_in(key, rank))
    draw = lambda key, count: jax.random.uniform(key, (count, BLOCK))
    return draw(push, part), draw(pull, mine)

  return jax.vmap(of)(jnp.arange(n))


def _in_two_levels(
  rule: Rule, given: np.ndarray, hosts: int, slices: int, uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The mean `[M, block]`, and what each device keeps, `[n, M, block]`."""
  n, count, _ = given.shape
  part = count // slices
  mine = part // hosts
  kept, mean = np.zeros_like(given), np.zeros_like(given[0])
  for s in range(slices):
    rows = slice(s * part, (s + 1) * part)
    ranks = [h * slices + s for h in range(hosts)]
    sums = [
      _sum(given[h * slices : (h + 1) * slices, rows]) for h in range(hosts)
    ]
    sent = [rule(x, uniforms[r, 0, :part]) for x, r in zip(sums, ranks)]
    for r, x, y in zip(ranks, sums, sent):
      kept[r, rows] = x - y
    for h, r in enumerate(ranks):
      own = slice(h * mine, (h + 1) * mine)
      total = _sum([y[own] for y in sent])
      back = rule(total / F32(n), uniforms[r, 1, :mine])
      mean[rows][own] = back
      kept[r, rows][own] += total - back * F32(n)
  return mean, kept


def _sum(parts: Any) -> np.ndarray:
  total = np.zeros_like(parts[0])
  for x in parts:
    total = total + x
  return total


def power_sgd(sizes: Sizes) -> Model:
  """In float64, from the program's factors."""
  del sizes

  def step(given: Leaves, seen: Seen) -> tuple[Leaves, Leaves]:
    means, kept = {}, {}
    for name, x in given.items():
      if x.ndim < 3:
        means[name], kept[name] = x.mean(axis=0), np.zeros_like(x)
        continue
      q = np.asarray(seen.before.memory[name], np.float64)
      p, r = np.linalg.qr((x @ q).mean(axis=0))
      p = p * np.sign(np.diag(r))  # Gram-Schmidt's signs
      own = x.swapaxes(1, 2) @ p
      new = own.mean(axis=0)
      means[name], kept[name] = p @ new.T, x - p @ own.swapaxes(1, 2)
      # Only the directions of Q count.
      new = new / np.abs(new).max(axis=0)
      np.testing.assert_allclose(seen.after.memory[name], new, atol=1e-4)
    return means, kept

  return step


def by_each(
  sizes: Sizes, density: float, choose: sparsifiers.Choose, wire: Any = None
) -> Model:
  def step(given: Leaves, seen: Seen) -> tuple[Leaves, Leaves]:
    return sparsifiers.by_each(
      given, sizes, density, choose, seen.update, wire
    )[:2]

  return step


def partitioned(
  sizes: Sizes, compressor: Any, division: Any, shapes: Any
) -> Model:
  n = int(np.prod(sizes))
  ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
  k = int(compressor.density * ends[-1])
  model = sparsifiers.Partitioned(
    n,
    k,
    sparsifiers.Paper(k) if compressor.controller == "paper" else None,
    division(int(ends[-1]), n),
    compressor.wire_dtype,
  )

  def step(given: Leaves, seen: Seen) -> tuple[Leaves, Leaves]:
    vector = lambda tree, *lead: np.concatenate(
      [tree[k].reshape(*lead, -1) for k in given], axis=-1
    )
    told = float(seen.after.stats["threshold"])
    both = model.step(vector(given, n), vector(seen.update), told)
    means, kept = (np.split(x, ends[:-1], axis=-1) for x in both)
    return (
      {k: m.reshape(x.shape[1:]) for m, (k, x) in zip(means, given.items())},
      {k: m.reshape(x.shape) for m, (k, x) in zip(kept, given.items())},
    )

  return step


# --- the table ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
  """A compressor, its model, and what it promises."""

  compressor: Any
  model: Callable[[Sizes], Model]
  keeps: bool = True  # all errors: nothing is lost
  draws: bool = False  # random numbers, to round by
  near: float = 2e-6  # what rounding may cost, as a part of the largest number
  wrong: float = 0.0  # the part of numbers half way between two levels
  shapes: dict[str, tuple[int, ...]] = dataclasses.field(
    default_factory=lambda: SHAPES
  )
  anywhere: bool = False  # any device may keep the error of a sum


def _blocks(compressor: Any, rule: Rule, **promises: Any) -> Row:
  draws = promises.get("draws", False)
  model = lambda sizes: in_blocks(rule, sizes, draws)
  return Row(compressor, model, wrong=1e-2, **promises)


def _by_each(compressor: Any, choose: Any, wire: Any = None) -> Row:
  return Row(
    compressor, lambda sizes: by_each(sizes, compressor.density, choose, wire)
  )


def _partitioned(compressor: Any, division: Any, shapes: Any = SHAPES) -> Row:
  return Row(
    compressor,
    lambda sizes: partitioned(sizes, compressor, division, shapes),
    wrong=1e-3 if compressor.wire_dtype else 0.0,
    shapes=shapes,
    anywhere=compressor.wire_dtype is not None,
  )


def _low_bit(bits: int) -> Row:
  return _blocks(compress.LowBit(bits, block=BLOCK), low_bit(bits))


def _drawn_low_bit(bits: int) -> Row:
  compressor = compress.LowBit(bits, "stochastic", BLOCK)
  return _blocks(compressor, low_bit(bits, True), keeps=False, draws=True)


def _cast(dtype: Any) -> Row:
  return _blocks(compress.Cast(dtype, BLOCK), cast(dtype))


ROWS = {
  "int8": _low_bit(8),
  "int4": _low_bit(4),
  "int2": _low_bit(2),
  "qsgd": _drawn_low_bit(4),
  "terngrad": _drawn_low_bit(2),
  "bfloat16": _cast(jnp.bfloat16),
  "float16": _cast(jnp.float16),
  "e4m3": _cast(jnp.float8_e4m3fn),
  "e5m2": _cast(jnp.float8_e5m2),
  "sign": _blocks(compress.Sign(BLOCK), sign),
  "one_bit": _blocks(compress.OneBit(BLOCK), one_bit),
  "vote": _blocks(compress.SignVote(BLOCK), vote, keeps=False),
  "power_sgd": Row(compress.PowerSGD(2, seed=1), power_sgd, near=2e-5),
  "top_k": _by_each(compress.TopK(0.05), sparsifiers.top_k),
  "top_k_exact": _by_each(compress.TopK(0.05, "exact"), sparsifiers.top_k),
  "top_k_float16": _by_each(
    compress.TopK(0.05, wire_dtype=jnp.float16),
    sparsifiers.top_k,
    jnp.float16,
  ),
  "threshold": _by_each(
    compress.Threshold(3.0, density=1.0), sparsifiers.threshold(3.0)
  ),
  "random_k": _by_each(compress.RandomK(0.05), sparsifiers.drawn),
  "micro": _partitioned(compress.MiCRO(0.05), sparsifiers.Even),
  "micro_paper": _partitioned(
    compress.MiCRO(0.05, "paper", capacity=5), sparsifiers.Even
  ),
  "micro_bfloat16": _partitioned(
    compress.MiCRO(0.05, "paper", wire_dtype=jnp.bfloat16), sparsifiers.Even
  ),
  "exdyna": _partitioned(
    compress.ExDyna(0.01, capacity=20), sparsifiers.Blocks, LARGE
  ),
  "exdyna_paper": _partitioned(
    compress.ExDyna(0.01, "paper"), sparsifiers.Blocks, LARGE
  ),
}
# The first row of each kind, by its base class. The others run what is general
# on request.
KINDS = {type(row.compressor).__base__: x for x, row in reversed(ROWS.items())}
