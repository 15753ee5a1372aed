"""The transformation that lets rows catch up."""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._rows import _behind
from zenjax._rows import _by_rows
from zenjax._rows import _catch_up_state
from zenjax._rows import _idle
from zenjax._rows import _law
from zenjax._rows import _on_rows
from zenjax._rows import _transitions
from zenjax._rows import _trees
from zenjax._rows._catch_up_state import CatchUpState
from zenjax._rows._sparse_rows import is_rows


def catching_up(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """See `zenjax.lazy_rows`."""
  owner = Owner(inner)

  def init(params):
    _by_rows.require_row_by_row(inner, params, catches_up=True)
    owner.laws(params)
    state = CatchUpState(
      inner=inner.init(params),
      current=jax.tree.map(_none_taken, params),
      steps=jnp.zeros((), jnp.int32),
      late=jnp.zeros((), jnp.int32),
    )
    asked = _found.get()
    if asked is not None:
      asked.append((state, owner))
    return state

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `lazy_rows(..., catch_up=True)`,"
        " got None: rows that missed steps are moved; call `tx.update(grads,"
        " state, params)`."
      )
    return owner.update(_trees.combined(updates), state, params, extra)

  return optax.GradientTransformationExtraArgs(init, update)


class Owner:
  """What `catch_up=True` knows of an optimizer.

  Attributes:
    asked: Whether `zenjax.catch_up` was called, or the user told that it must.
  """

  def __init__(self, inner: optax.GradientTransformationExtraArgs):
    self.asked = False
    self._inner = inner
    self._laws: dict[Any, dict[int, _law.Law]] = {}
    self._programs = _by_rows.Programs(inner)

  def laws(self, params: Any) -> dict[int, _law.Law]:
    """Of tables that missed steps would change, by the leaf's number."""
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((jnp.ndim(x), jnp.result_type(x)) for x in leaves)
    key = structure, kinds
    if key not in self._laws:
      with jax.ensure_compile_time_eval():
        self._laws[key] = _law.laws(self._inner, params)
    return self._laws[key]

  def update(self, merged, state, params, extra):
    """Of `inner` on rows that are brought up to date first."""
    laws = self.laws(params)
    current, current_structure = jax.tree.flatten(state.current)
    gone: dict[int, jax.Array] = {}
    left: dict[int, jax.Array] = {}
    late: dict[int, jax.Array] = {}

    def before(few, few_params, touched):
      new, structure = jax.tree.flatten(few_params)
      for i, at in enumerate(jax.tree.leaves(touched)):
        if i in laws and at.ids is not None:
          old = new[i]
          missed = _missed(current[i], at, state.steps)
          few, new[i], left[i], late[i] = _brought(
            laws[i], few, old, None, missed, state.steps
          )
          gone[i] = _difference(new[i], old)
      return few, structure.unflatten(new)

    _on_rows.require_shapes(merged, params)
    program = _by_rows.of_rows(
      self._programs, merged, state.inner, params, extra
    )
    if program is None:
      out, inner = self._inner.update(merged, state.inner, params, **extra)
    elif program.knows_size and laws:
      raise ValueError(
        "`inner` of `lazy_rows(..., catch_up=True)` must do the same whatever"
        " size a table has, but it reads sizes in Python, of tables of shapes"
        f" {[*program.tables.values()]}; give masks, labels and rates by name,"
        " as trees, or leave `catch_up` out."
      )
    else:
      merged = _trees.with_room(merged, program.fewest)
      out, inner = _on_rows.update(
        self._inner, program, merged, state.inner, params, extra, before
      )
    if late and not self.asked:
      self.asked = True
      _catch_up_state.warn_of_no_call()
    leaves, structure = jax.tree.flatten(_trees.values(out))
    leaves = [
      _sum(x, gone[i]) if i in gone else x for i, x in enumerate(leaves)
    ]
    out = _trees.with_values(merged, structure.unflatten(leaves))
    steps = state.steps + 1
    for i, leaf in enumerate(jax.tree.leaves(merged, is_leaf=is_rows)):
      if is_rows(leaf):
        at = _on_rows.touched(leaf)
        current[i] = _taken(current[i], at, steps, left.get(i))
      elif current[i].ndim:
        # All rows take a step. That none is behind is the caller's to see to:
        # to ask would cost a pass through tables that never are.
        current[i] = current[i] + 1
    current = current_structure.unflatten(current)
    total = _catch_up_state.later(state.late, list(late.values()))
    return out, CatchUpState(inner, current, steps, total)

  def bring(self, leaves, state, wanted):
    """All leaves of the parameters and the state after `catch_up`."""
    current, structure = jax.tree.flatten(
      state.current, is_leaf=_trees.is_masked
    )
    mine = [i for i, x in enumerate(current) if not _trees.is_masked(x)]
    params = jax.tree.unflatten(
      jax.tree.structure(state.current), [leaves[i] for i in mine]
    )
    laws, inner, leaves = self.laws(params), state.inner, list(leaves)
    for number, i in enumerate(mine):
      if not _idle.is_table(leaves[i]) or wanted[i] is None:
        continue
      at, left = wanted[i], None
      if number in laws:
        missed = _missed(current[i], at, state.steps)
        inner, leaves[i], left, _ = _brought(
          laws[number], inner, leaves[i], at.ids, missed, state.steps
        )
      current[i] = _taken(current[i], at, state.steps, left)
    current = structure.unflatten(current)
    return leaves, state._replace(inner=inner, current=current)


def _brought(law, state, table, ids, missed, end):
  """State and parameters of one table after the steps that rows missed.

  And how many each row misses then: none; and how many rows were late.
  """
  leaves, structure = jax.tree.flatten(state)
  counts = [leaves[i] for i in law.idle.counters]
  own = [leaves[i] for i in law.idle.own]
  (*own, table), left, late = _behind.caught_up(
    law, [*own, table], ids, missed, end, counts
  )
  for i, x in zip(law.idle.own, own):
    leaves[i] = x
  return structure.unflatten(leaves), table, left, late


def _none_taken(leaf):
  return jnp.zeros(leaf.shape[:1] if _idle.is_table(leaf) else (), jnp.int32)


def _missed(current, at, steps):
  """How many steps; none where `at` pads."""
  missed = steps - _on_rows.gather(current, at)
  return missed if at.ids is None else jnp.where(at.pads, 0, missed)


def _taken(current, at, steps, left):
  """`current` where rows have taken all steps but those `left`."""
  # Zeros, but known only after `current` was read: were that read in several
  # places while it is written, XLA would copy all of it.
  left = 0 if left is None else left
  if at.ids is None:
    return jnp.zeros_like(current) + (steps - left)
  now = jnp.zeros_like(at.ids) + (steps - left)
  return current.at[at.ids].set(now, mode="drop", unique_indices=True)


def _difference(new, old):
  return new.astype(_transitions.precision()) - old.astype(
    _transitions.precision()
  )


def _sum(update, gone):
  return (_transitions.precise(update) + gone).astype(update.dtype)


# States that `init` makes, and who made them, while somebody asks.
_found: contextvars.ContextVar[list | None] = contextvars.ContextVar(
  "found", default=None
)


@contextlib.contextmanager
def asking() -> Iterator[list[tuple[CatchUpState, "Owner"]]]:
  """Collects states that `init` makes meanwhile, and who made them."""
  found: list = []
  token = _found.set(found)
  try:
    yield found
  finally:
    _found.reset(token)
