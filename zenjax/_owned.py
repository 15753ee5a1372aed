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

from zenjax import _collectives
from zenjax import _compat
from zenjax._plan import TablePlan
from zenjax._rows import _on_rows
from zenjax._rows._row_program import RowProgram
from zenjax._rows._row_program import Totals
from zenjax._schemes.base import Held

# Reductions of some rows, and how many rows of each table these are.
Parts = tuple[dict[int, jax.Array], dict[int, jax.Array]]


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
    inner: The optimizer.
    program: Of its update of whole tables.
    structure: Of parameters and gradients.
    plans: Of the leaves that are tables, by the leaf's number.
    grads: Leaves; of tables anything, of all others the mean over devices.
    params: Leaves, whole; None if the caller gave none.
    extra: Further arguments of `inner.update`.
    axis: Along which owners lie.
    scaled: The mean of a sum, or the sum.
    totals: Reductions over the rows of all owners, those that are known.
  """

  inner: optax.GradientTransformationExtraArgs
  program: RowProgram
  structure: Any
  plans: dict[int, TablePlan]
  grads: Sequence[Any]
  params: Sequence[Any] | None
  extra: dict[str, Any]
  axis: str
  scaled: Callable[[jax.Array], jax.Array]
  totals: Totals = dataclasses.field(default_factory=dict)

  @property
  def depth(self) -> int:
    """How often owners must agree on a value of all rows before they step."""
    return self.program.depth

  def nothing(self, level: int) -> Parts:
    """Returns what reductions of a level make of no rows."""
    like = lax.axis_index(self.axis)
    zero = _compat.cast_like(jnp.zeros((), jnp.int32), like)
    return self.program.none(level, like), dict.fromkeys(self.plans, zero)

  def reduced(
    self, level: int, parts: Parts, held: Sequence[Held], state: Any
  ) -> Parts:
    """Joins reductions with those of the rows that a push brought."""
    unions, at, grads = self._pushed(held)
    grads, params, at = self._trees(grads, at)
    more = _on_rows.parts(
      self.program, level, at, grads, state, params, self.extra, self.totals
    )
    before, counts = parts
    real = _on_rows.counted(_on_rows.real_rows(at))
    counts = {i: counts[i] + real[i] for i in self.plans}
    return self.program.joined(before, more), counts

  def agreed(self, parts: Parts) -> "Owner":
    """Returns this with the reductions of a level over the rows of all owners.

    Owners add in one order, so that all have the same bits.
    """
    own, counts = parts
    groups = {i: plan.column_groups for i, plan in self.plans.items()}
    total = _gathered((own, counts), self.axis)
    whole = {i: self.program.reduction_of(i, x) for i, x in total[0].items()}
    counts = {i: jnp.sum(x) // groups[i] for i, x in total[1].items()}
    found = self.program.finished(whole, counts)
    return dataclasses.replace(self, totals={**self.totals, **found})

  def __call__(
    self, held: Sequence[Held], state: Any
  ) -> tuple[list[Held], Any]:
    """Sums become updates; the state has a step of these rows more."""
    unions, at, grads = self._pushed(held)
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
      some, slots = self.program.fewest, plan.layout.slots
      at[i] = _on_rows.At(jnp.full(some, slots, jnp.int32), slots)
      grads[i] = jnp.zeros((some, plan.block_width), plan.table.dtype)
    out, rest, tags = self._step(state, grads, at)
    return out, _on_rows.with_rest(state, rest, tags)

  def _pushed(self, held):
    """Unions, which rows they are, and their gradients, by table."""
    unions = {i: h.union for i, h in zip(self.plans, held)}
    at, grads = {}, {}
    for i, plan in self.plans.items():
      slots = plan.layout.slots
      distinct = _on_rows.distinct(unions[i].slots, slots)
      at[i] = _on_rows.At(distinct, slots)
      rows = self.scaled(unions[i].rows)
      grads[i] = rows.astype(plan.table.dtype)
    return unions, at, grads

  def _trees(self, grads, at):
    """Gradients, parameters, and which rows, in the user's structure."""
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
    back = self.structure.unflatten
    return back(grads), params, back(at)

  def _step(self, state, grads, at):
    grads, params, at = self._trees(grads, at)
    out, new, tags = _on_rows.step(
      self.inner,
      self.program,
      at,
      grads,
      state,
      params,
      self.extra,
      self.totals,
    )
    return self.structure.flatten_up_to(out), new, tags


def _gathered(tree: Any, axis: str) -> Any:
  """Leaves of all owners behind each other, by one collective a dtype."""
  leaves, structure = jax.tree.flatten(tree)
  out: list[Any] = [None] * len(leaves)
  for dtype in sorted({str(x.dtype) for x in leaves}):
    at = [i for i, x in enumerate(leaves) if str(x.dtype) == dtype]
    flat = jnp.concatenate([jnp.ravel(leaves[i]) for i in at])
    whole = _collectives.all_gather(flat, (axis,))
    begin = 0
    for i in at:
      x = leaves[i]
      part = whole[:, begin : begin + x.size]
      out[i] = part.reshape(-1, *x.shape)
      begin += x.size
  return structure.unflatten(out)


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
