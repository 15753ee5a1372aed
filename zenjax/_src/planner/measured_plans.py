"""Measures plans by real steps, which no model has to predict."""

from collections.abc import Callable, Sequence
import gc
from typing import Any

from zenjax._src.machine import measure
from zenjax._src.sync.plans import Plan


def measure_plans(
  step_of: Callable[[Plan], Callable[[], Any]],
  plans: Sequence[Plan],
  *,
  repeats: int = 5,
) -> list[float]:
  """Measures steps of a program with different plans.

  Use it if you have the machine, to choose among a few plans: predictions can't
  know, for example, how long devices wait for each other. MergeComp chooses its
  partition in this way. In a program of several processes, call it in all of
  them, with the same plans. All get the same times.

  Args:
    step_of: Takes a plan, and returns a function that runs one step with it and
      returns arrays to wait for. It may keep its state from call to call. Plans
      are measured one after the other, so only one program needs memory.
    plans: Plans of `zenjax.planner.plan`, for example one for each compressor
      that you allow.
    repeats: How often each step is timed, after one step that isn't.

  Returns:
    The median seconds of a step for each plan, of the slowest process.

  Raises:
    ValueError: `repeats` is not a positive integer.
    TypeError: `plans` holds something else.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> w = jnp.ones((256, 256))
    >>> loss = lambda w: jnp.mean(w ** 2)
    >>> plans = [
    ...   zenjax.planner.plan(
    ...     jax.value_and_grad(loss), w, allow=allow,
    ...     topology=zenjax.planner.Topology.network("1 Gbit/s", 4),
    ...   )
    ...   for allow in ("lossless", "int4")
    ... ]
    >>> def step_of(plan):
    ...   tx = zenjax.compress.all_reduce(plan, "data")
    ...   devices = jnp.ones((4, 256, 256))
    ...   state = jax.vmap(tx.init, axis_name="data")(devices)
    ...   step = jax.jit(jax.vmap(tx.update, axis_name="data"))
    ...   return lambda: step(devices, state)
    >>> seconds = zenjax.planner.measure_plans(step_of, plans, repeats=1)
    >>> best = plans[seconds.index(min(seconds))]

  References:
    Wang et al., [MergeComp](https://arxiv.org/abs/2103.15195), 2021.
  """
  measure.require_positive("`repeats`", repeats)
  for plan in plans:
    if not isinstance(plan, Plan):
      raise TypeError(
        f"`plans` must hold plans of `zenjax.planner.plan`, got {plan!r}."
      )
  seconds = []
  for plan in plans:
    seconds.append(float(measure.medians([step_of(plan)], repeats)[0]))
    gc.collect()  # Functions that JAX compiles are often in cycles.
  return seconds
