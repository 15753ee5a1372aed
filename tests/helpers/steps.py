"""A transformation stepped inside `shard_map`, its state placed as users do.

The local gradients of a step are a stack, `[n, ...]` a leaf, so that the test
decides what each device holds. What every device got back can be read.
"""

from collections.abc import Iterator
import contextlib
import logging
import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import oracle
import runners

import zenjax

COLLECTIVES = re.compile(
  r"^(psum|pmax|pmin|all_gather|all_to_all|reduce_scatter|ppermute)"
)


class Trainer:
  """Parameters and optimizer state on a mesh, and one compiled step.

  Args:
    tx: a transformation that takes local gradients.
    params: a tree of arrays, copied to every device.
    mesh: a mesh of the axes in `axis`.
    axis: the name, or the names, that gradients are averaged over.
    check_vma: as in `jax.shard_map`.
    donate: whether parameters and state are given up to each step.
  """

  def __init__(
    self,
    tx,
    params,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    check_vma: bool = True,
    donate: bool = False,
  ):
    self.mesh, self.axis = mesh, axis
    self.params = jax.device_put(params, NamedSharding(mesh, P()))
    self.state = zenjax.init_state(tx, self.params, mesh, axis)
    self.specs = zenjax.state_specs(self.state, axis)

    def body(params, state, stack):
      grads = jax.tree.map(lambda x: x[0], stack)
      updates, state = tx.update(grads, state, params)
      with jax.numpy_dtype_promotion("standard"):
        params = optax.apply_updates(params, updates)
      return params, state, updates

    self.step = jax.jit(
      jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), self.specs, P(axis)),
        out_specs=(P(), self.specs, P()),
        check_vma=check_vma,
      ),
      donate_argnums=(0, 1) if donate else (),
    )

  def place(self, stack):
    """Gives each device its own gradients."""
    return jax.device_put(stack, NamedSharding(self.mesh, P(self.axis)))

  def __call__(self, stack) -> Any:
    """Takes one step; returns the updates on every device, `[n, ...]`."""
    self.params, self.state, updates = self.step(
      self.params, self.state, self.place(stack)
    )
    return jax.tree.map(runners.shards, updates)

  def check_replicas(self) -> None:
    """What is not per device has the same bits everywhere."""
    for leaf in jax.tree.leaves(self.params):
      oracle.check_replicas(runners.shards(leaf), "params")
    is_spec = lambda x: isinstance(x, P)
    for spec, leaf in zip(
      jax.tree.leaves(self.specs, is_leaf=is_spec),
      jax.tree.leaves(self.state),
      strict=True,
    ):
      if spec == P():
        oracle.check_replicas(runners.shards(leaf), "state")


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """Collects a line for each program that XLA compiles meanwhile."""
  lines: list[str] = []

  class Collector(logging.Handler):
    def emit(self, record):
      message = record.getMessage()
      if message.startswith("Finished XLA compilation"):
        lines.append(message)

  collector, logger = Collector(), logging.getLogger("jax")
  logger.addHandler(collector)
  try:
    with jax.log_compiles(True):
      yield lines
  finally:
    logger.removeHandler(collector)


def lenient(tx) -> optax.GradientTransformationExtraArgs:
  """`tx` traced under standard promotion: optax itself is not strict."""
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    with jax.numpy_dtype_promotion("standard"):
      return tx.init(params)

  def update_fn(updates, state, params=None, **extra_args):
    with jax.numpy_dtype_promotion("standard"):
      return tx.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def pmean(axis) -> optax.GradientTransformation:
  """What `zen_sync` replaces: `lax.pmean` that sums 16 bits in float32."""

  def mean(x):
    wide = x if x.dtype.itemsize > 2 else x.astype(jnp.float32)
    return lax.pmean(wide, axis).astype(x.dtype)

  return optax.stateless(lambda g, _: jax.tree.map(mean, g))


def collectives(jaxpr) -> list[str]:
  """Names of all collectives, those of every branch included."""
  found = []
  for eqn in jaxpr.eqns:
    if COLLECTIVES.match(eqn.primitive.name):
      found.append(eqn.primitive.name)
    for sub in _jaxprs_in(eqn.params):
      found += collectives(sub)
  return found


def _jaxprs_in(params) -> list:
  """Jaxprs among an equation's parameters, open or closed."""
  values = jax.tree.leaves(
    list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")
  )
  jaxprs = [getattr(value, "jaxpr", value) for value in values]
  return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def lower_sync(
  tables: Any, mesh: Mesh, platform: str | None = None, **kwargs: Any
):
  """A step that only synchronizes `tables`, lowered for `mesh`.

  As if its devices were of `platform`, if one is given.
  """
  tx = zenjax.zen_sync("data", sparse=True, **kwargs)
  replicated = NamedSharding(mesh, P())
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    (tables, jax.eval_shape(tx.init, tables)),
  )
  step = jax.shard_map(
    lambda g, s: tx.update(zenjax.unreduced(g, "data"), s),
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
  )
  traced = jax.jit(step).trace(*args)
  return traced.lower(lowering_platforms=(platform,) if platform else None)
