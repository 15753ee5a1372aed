"""Plans are chosen by real steps."""

import time

import jax
import jax.numpy as jnp
import pytest

import zenjax
from zenjax import planner


def plans():
  w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  return [
    planner.plan(
      jax.value_and_grad(lambda w: jnp.sum(w**2)),
      w,
      topology=planner.Topology.network("1 Gbit/s", 4),
      allow=[allow],
    )
    for allow in ("lossless", "int8")
  ]


def test_every_plan_is_timed_by_its_own_steps():
  takes = {"pmean": 0.1, "LowBit(8)": 0.02}
  calls = []

  def step_of(plan):
    (leaf,) = plan.leaves

    def step():
      calls.append(leaf.choice)
      time.sleep(takes[leaf.choice])
      return jnp.zeros(())

    return step

  given = plans()
  seconds = planner.measure_plans(step_of, given, repeats=3)
  # A busy machine takes longer, never less.
  assert all(x >= least for x, least in zip(seconds, takes.values()))
  assert min(seconds) == seconds[1]
  # One after the other, so that only one program needs memory.
  assert calls == [x.leaves[0].choice for x in given for _ in range(4)]


@pytest.mark.parametrize(
  ("given", "repeats", "error", "words"),
  [
    ([zenjax.compress.LowBit(8)], 1, TypeError, "`plans` must hold plans"),
    ([], 0, ValueError, "`repeats` must be a positive"),
  ],
)
def test_arguments_are_checked(given, repeats, error, words):
  with pytest.raises(error, match=words):
    planner.measure_plans(lambda plan: lambda: None, given, repeats=repeats)
