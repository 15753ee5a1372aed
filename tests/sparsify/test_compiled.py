"""What sparsifiers send and touch, in lowered and compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest
import runners
from stablehlo import collectives

import zenjax

SIZE = 100_003
DENSITY = 0.01


def lowered(n: int, **options: Any):
  """A step on `n` devices that gives its parameters and state away."""
  mesh = runners.mesh(n)
  tx = zenjax.sparsify.micro("data", DENSITY, **options)
  params = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
  state = jax.eval_shape(
    lambda p: zenjax.init_state(tx, p, mesh, "data"), params
  )
  specs = zenjax.state_specs(state, "data")

  def step(params, state, gradients):
    update, state = tx.update(gradients[0], state)
    return params - update, state

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
  )
  gradients = jax.ShapeDtypeStruct((n, SIZE), jnp.float32)
  jitted = jax.jit(mapped, donate_argnums=(0, 1))
  return jitted.lower(params, state, gradients)


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_what_is_sent_is_what_is_declared(wire):
  n = 4
  found = collectives(lowered(n, wire_dtype=wire))
  capacity = int(1.25 * int(DENSITY * SIZE) / n) + 1
  assert capacity > 256  # The default for smaller ones.
  # A 16-bit pair is a word, of rows padded to whole words.
  words = -(-capacity // 2)
  values = [("all_reduce", n * capacity, "f32")]
  if wire:
    values = [("all_to_all", n * words, "ui32"), ("all_gather", words, "ui32")]
  every = [("all_gather", capacity, "i32"), *values]
  outside = [x[:3] for x in found if not x.inside]
  count = ("all_reduce", 1, "f32")
  assert outside == [count, ("all_gather", capacity + 2, "i32"), *values]
  # The sample of a threshold, and further rounds.
  rest = [x[:3] for x in found if x.inside]
  assert rest[1:] == [count, *every]
  assert rest[0][0] == "all_reduce" and rest[0][1] < SIZE / 4
