"""Measures what compressors compute, for predictions of a machine at hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from zenjax._src.compress.compressor import Compressor
from zenjax._src.machine import measure
from zenjax._src.planner import predictions
from zenjax._src.planner import questions
from zenjax._src.schemes.base import Context

# Compressors exchange over an axis of one device.
_ALONE = "zenjax_alone"


def measure_compressors(
  value_and_grad: Callable[..., Any],
  *args: Any,
  compressors: Sequence[Compressor],
  mesh: Mesh | None = None,
  repeats: int = 5,
) -> dict[str, float]:
  """Measures how long compressors take to encode and decode your gradients.

  Use it if you have the machine that you plan for. Pass the result as
  `local_seconds=` to `planner.plan` or `planner.utility`, which otherwise
  predict these times from the memory bandwidth of the topology. Gradients are
  random numbers of the same shapes. A device compresses by itself, so work that
  grows with the number of devices is left out: `TopK` and `Threshold` add up
  what all devices send. In a program of several processes, call it in all of
  them.

  Args:
    value_and_grad: As for `planner.plan`.
    *args: Its arguments on one device: arrays or shapes.
    compressors: The compressors to measure.
    mesh: The devices to time, which must be idle otherwise; by default all.
    repeats: How often each compressor is timed.

  Returns:
    Seconds to compress all dense gradients of a step, by `str(compressor)`. A
    compressor that none of the gradients can take is left out.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: `repeats` is not a positive integer.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> loss = lambda w: jnp.mean(w ** 2)
    >>> found = zenjax.planner.measure_compressors(
    ...   jax.value_and_grad(loss), w, repeats=1,
    ...   compressors=[zenjax.compress.LowBit(8)],
    ... )
    >>> list(found), found["LowBit(8)"] > 0
    (['LowBit(8)'], True)
  """
  measure.require_positive("`repeats`", repeats)
  compressors = questions.compressors_of(compressors)
  gradients = questions.gradients_of(value_and_grad, args)
  mesh = mesh or Mesh(np.array(jax.devices()), ("device",))
  context = Context(axes=(_ALONE,), sizes=(1,), mean=True)
  programs = {}
  for compressor in compressors:
    if mine := predictions.fitting(compressor, gradients, context):
      shapes = {gradient.name: gradient.shape for gradient in mine}
      programs[str(compressor)] = _program(compressor, shapes, context, mesh)
  seconds = measure.medians([*programs.values()], repeats)
  return dict(zip(programs, seconds.tolist()))


def _program(
  compressor: Compressor,
  shapes: Mapping[str, tuple[int, ...]],
  context: Context,
  mesh: Mesh,
) -> Callable[[], Any]:
  """Returns a program that compresses on all devices, each for itself."""
  key = jax.random.key(0)

  def draw():
    return {
      name: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
      for i, (name, shape) in enumerate(shapes.items())
    }

  def reduce(leaves, kept):
    given = {name: x + kept[name] for name, x in leaves.items()}
    memory = compressor.init(shapes, context)
    out = compressor.reduce(given, memory, key, context)
    return out.sums, out.kept

  alone = jax.vmap(reduce, axis_name=_ALONE)
  on_each = measure.on_each(
    lambda *trees: alone(*jax.tree.map(lambda x: x[None], trees)), mesh
  )
  leaves = measure.on_each(draw, mesh)()
  zeros = jax.tree.map(jnp.zeros_like, leaves)
  return lambda: on_each(leaves, zeros)
