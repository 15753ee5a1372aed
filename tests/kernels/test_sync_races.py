"""A whole update by TPU kernels under a detector of races, on two devices.

Each kernel is interpreted with a memory and a detector of its own: what one
leaves is the next one's argument. Racy twins, which must be found, are with the
kernels: `test_kernels_races.py`, `test_kernel_exchange.py`.
"""

import dataclasses
from typing import Any

import jax

# What the detector found is told by nothing public on JAX 0.10.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest
import runners

import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels.operations import EXCHANGES
from zenjax.kernels.operations import OPERATIONS

N, ROWS, WIDTH = 2, 250, 128
KERNELS = {*OPERATIONS, *EXCHANGES}


@pytest.fixture
def detectors(monkeypatch):
  """Of all kernels that are interpreted, in order."""
  made = []

  class Kept(race_detection_state.RaceDetectionState):
    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      made.append(self)

  monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", Kept)
  return made


def params() -> pltpu.InterpretParams:
  names = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
  # Newer ones raise, which leaves the other device waiting.
  warn: dict[str, Any] = {"on_race": "warn"} if "on_race" in names else {}
  return pltpu.InterpretParams(detect_races=True, **warn)


def sync(exchange: Any) -> Any:
  """An update of one table, of which not all rows fit in the first round."""

  def body(grad):
    tx = zenjax.zen_sync(
      runners.AXIS,
      sparse=True,
      partition="hash",
      capacities=(8, 16),
      tuning=zenjax.Tuning(exchange=exchange),
    )
    updates: Any = tx.update(grad[0], tx.init(grad[0]))[0]
    return updates[None]

  spec = P(runners.AXIS)
  # Under check_vma the interpreter fails on a kernel's arithmetic.
  return jax.jit(
    jax.shard_map(
      body,
      mesh=runners.mesh(N),
      in_specs=spec,
      out_specs=spec,
      check_vma=False,
    )
  )


def gradients() -> jax.Array:
  rng = np.random.default_rng(0)
  there = rng.random((N, ROWS, 1)) < 0.1
  values = rng.standard_normal((N, ROWS, WIDTH), np.float32)
  return jnp.asarray(np.where(there, values, np.float32(0)))


@pytest.mark.filterwarnings("ignore:`capacities` of leaf:UserWarning")
def test_whole_update_has_no_race(detectors):
  grads = gradients()
  with (
    _dispatch.forced("tpu", interpret=params()),
    _dispatch.recording() as calls,
  ):
    got = jax.block_until_ready(sync("remote_copies")(grads))
  assert {call.name for call in calls if call.kernels} == KERNELS
  # One pass over the table, and two rounds, whose kernels are traced apart.
  assert len(detectors) == len(calls) == 2 * len(KERNELS) - 1
  assert all(any(each.writes.values()) for each in detectors)
  assert not any(each.races_found for each in detectors)
  kernel_cases.assert_same_bits(got, sync("collectives")(grads))
