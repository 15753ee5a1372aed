"""What an owner does with the sums of a push: a step of an optimizer.

An owner holds the optimizer's state of its rows and columns and of no others,
`[S, ceil(D / g)]` where a table is `[R, D]`: as in ZeRO, but by the owners that
sum the gradients anyway.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._plan import TablePlan
from zenjax._rows import _on_rows
from zenjax._schemes.base import Held


class Owned(NamedTuple):
  """A leaf of a state that every device has its own part of."""

  part: jax.Array  # [S, ...] on a device


def is_owned(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, Owned)


def unwrapped(state: Any) -> Any:
  """The state as the optimizer knows it."""
  return jax.tree.map(
    lambda x: x.part if is_owned(x) else x, state, is_leaf=is_owned
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
  """One step of `inner` on the rows that pushes bring.

  Attributes:
    inner: What updates a row by that row's gradient, state and parameters.
    structure: Of parameters and gradients.
    plans: Of the leaves that are tables, by the leaf's number.
    grads: Leaves; of tables anything, of all others the mean over devices.
    params: Leaves, whole; None if the caller gave none.
    extra: Further arguments of `inner.update`.
    axis: Along which owners lie.
    scaled: The mean of a sum, or the sum.
  """

  inner: optax.GradientTransformationExtraArgs
  structure: Any
  plans: dict[int, TablePlan]
  grads: Sequence[Any]
  params: Sequence[Any] | None
  extra: dict[str, Any]
  axis: str
  scaled: Callable[[jax.Array], jax.Array]

  def __call__(
    self, held: Sequence[Held], state: Any
  ) -> tuple[list[Held], Any]:
    """Sums become updates; the state has a step of these rows more."""
    unions = {i: h.union for i, h in zip(self.plans, held)}
    at, grads = {}, {}
    for i, plan in self.plans.items():
      slots = plan.layout.slots
      distinct = _on_rows.distinct(unions[i].slots, slots)
      at[i] = _on_rows.At(distinct, slots)
      rows = self.scaled(unions[i].rows)
      grads[i] = rows.astype(plan.table.dtype)
    out, new, tags = self._step(state, grads, at)
    state = _on_rows.with_rows(state, new, tags)
    found = []
    for (i, plan), own in zip(self.plans.items(), held):
      real = (unions[i].slots < plan.layout.slots)[:, None]
      rows = jnp.where(real, out[i].astype(unions[i].rows.dtype), 0)
      found.append(own._replace(union=unions[i]._replace(rows=rows)))
    return found, state

  def finish(self, state: Any) -> tuple[list[Any], Any]:
    """Updates of what is no table, and the state with all that has no rows."""
    at, grads = {}, {}
    for i, plan in self.plans.items():
      none = jnp.zeros(0, jnp.int32)
      at[i] = _on_rows.At(none, plan.layout.slots)
      grads[i] = jnp.zeros((0, plan.block_width), plan.table.dtype)
    out, rest, tags = self._step(state, grads, at)
    return out, _on_rows.with_rest(state, rest, tags)

  def _step(self, state, grads, at):
    grads = [grads.get(i, x) for i, x in enumerate(self.grads)]
    params = None
    if self.params is not None:
      params = self.structure.unflatten(
        [
          own_rows(x, at[i].ids, self.plans[i], self.axis) if i in at else x
          for i, x in enumerate(self.params)
        ]
      )
    at = [at.get(i, _on_rows.ALL) for i in range(len(grads))]
    out, new, tags = _on_rows.step(
      self.inner,
      self.structure.unflatten(at),
      self.structure.unflatten(grads),
      state,
      params,
      self.extra,
    )
    return self.structure.flatten_up_to(out), new, tags


def own_rows(
  table: jax.Array, slots: jax.Array, plan: TablePlan, axis: str
) -> jax.Array:
  """This owner's columns of its rows at `slots: [k]`, zeros where none is."""
  me, g = lax.axis_index(axis), plan.column_groups
  row = plan.layout.row(me // g, slots)
  rows = table.at[row].get(mode="fill", fill_value=0)
  if g == 1:
    return rows
  missing = plan.block_width * g - table.shape[1]
  rows = jnp.pad(rows, ((0, 0), (0, missing)))
  begin = me % g * plan.block_width
  return lax.dynamic_slice_in_dim(rows, begin, plan.block_width, axis=1)
