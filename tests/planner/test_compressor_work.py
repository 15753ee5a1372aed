"""Measured times of compressors, and plans that use them."""

from typing import Any

import jax.numpy as jnp
from planned import shape
import pytest
import runners

import zenjax
from zenjax import compress
from zenjax import planner

LAYERS = {"a": (512, 512), "b": (512, 256), "bias": (512,)}
BOTH = [compress.LowBit(8), compress.ExDyna(0.01)]


def grads(params):
  return jnp.float32(0), params


def shapes(layers):
  return {name: shape(*size) for name, size in layers.items()}


def measured(*args, of=grads, **options):
  options = {"mesh": runners.mesh(2), "repeats": 1} | options
  return planner.measure_compressors(of, *args, **options)


def planned(allow: Any = BOTH, **options) -> planner.Plan:
  return planner.plan(
    grads,
    shapes(LAYERS),
    topology=planner.Topology.network("1 Gbit/s", 4),
    allow=allow,
    **options,
  )


def test_each_compressor_that_fits_is_timed():
  found = measured(shapes(LAYERS), compressors=BOTH)
  assert list(found) == [str(x) for x in BOTH]
  assert all(0 < seconds < 10 for seconds in found.values())
  # ExDyna needs more blocks.
  few = measured(shapes({"small": (160, 128)}), compressors=BOTH)
  assert list(few) == ["LowBit(8)"]


def test_tables_are_not_compressed():
  loss = lambda params, ids: jnp.sum(params["t"][ids] ** 2)
  assert not measured(
    shapes({"t": (5000, 64)}),
    jnp.zeros(8, jnp.int32),
    of=zenjax.value_and_grad(loss),
    compressors=BOTH,
  )


def test_plans_take_what_was_measured():
  fast, slow = (str(x) for x in BOTH)
  chosen = {x.name: x for x in planned(local_seconds={fast: 3e-4}).leaves}
  assert chosen["a"].choice == chosen["b"].choice == slow
  exchange = chosen["a"].seconds
  plan = planned(local_seconds={slow: 3.0})
  chosen = {x.name: x for x in plan.leaves}
  assert chosen["a"].choice == chosen["b"].choice == fast
  # Each layer takes its share of the elements.
  ways = {x.choice: x.seconds for x in chosen["a"].others}
  assert ways[slow] == pytest.approx(exchange + 3.0 * 2 / 3)
  assert chosen["bias"].choice == "pmean"


_WORD: Any = ["int8"]


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: planned(local_seconds={"Sign()": 1.0}), "`local_seconds`.*Sign"),
    (lambda: planned(["ExDyna(1e-9)"]), "`density` 1e-09 selects none of"),
    (
      lambda: planned(local_seconds={"LowBit(8)": float("nan")}),
      "must be a finite time of 0 or more, got nan",
    ),
    (
      lambda: measured(shapes(LAYERS), compressors=BOTH, repeats=0),
      "`repeats` must be a positive",
    ),
    (
      lambda: measured(shapes(LAYERS), compressors=_WORD),
      "`compressors` must be",
    ),
  ],
)
def test_refused(call, words):
  with pytest.raises((TypeError, ValueError), match=words):
    call()
