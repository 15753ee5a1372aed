"""A tree of gradients: which leaves share the sparse exchange, which psum."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _compat
from zenjax import _parts
from zenjax import _select
from zenjax import _state
from zenjax import _totals
from zenjax._collectives import Axes
from zenjax._options import Options
from zenjax._planner._plan import require_tree
from zenjax._rows._sparse_rows import is_rows
from zenjax._schemes import _after
from zenjax._schemes import DENSE
from zenjax._schemes.base import Context


def as_varying(tree: Any, axes: Axes) -> Any:
  """Casts leaves to vary over those of `axes` that types record."""
  recorded = frozenset(a for a in axes if _compat.records_varying(a))

  def cast(x):
    missing = tuple(recorded - _compat.varying_axes(jnp.asarray(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def sync_tree(
  tree: Any, state: _state.ZenSyncState | None, options: Options
) -> tuple[Any, dict[str, _state.LeafState]]:
  """Synchronizes every leaf; `state=None` is without memory.

  Returns:
    The tree, synced, and the new state of its sparse leaves.
  """
  context = context_of(options)
  leaves = local_leaves(tree, context)
  if options.plan:
    require_tree(options.plan, _select.shapes(leaves))
  chosen = _select.select(tree, options.sparse, options.unit)
  # One device has nothing to exchange, unless rows wait in a residual.
  alone = context.devices == 1 and options.exact and not options.rows_out
  if alone:
    chosen = [False] * len(leaves)
  elif options.scheme not in DENSE:
    check_state(leaves, chosen, state)
  whole = {i: leaf for i, (_, leaf) in enumerate(leaves) if not chosen[i]}
  summed = _totals.totals(whole, options, context)
  out = [summed.get(i) for i in range(len(leaves))]
  at = [i for i, sparse in enumerate(chosen) if sparse]
  new_leaves = dict(state.leaves) if state else {}
  parts = _parts.split([leaves[i] for i in at], options, context)
  for part, begun, after in _begun(parts, state, options, context):
    synced, new = _parts.finish(part, begun, state, options, context, after)
    new_leaves |= new
    for i, value in zip(part.at, synced):
      out[at[i]] = value
  structure = jax.tree.structure(tree, is_leaf=is_rows)
  return jax.tree.unflatten(structure, out), new_leaves


def _begun(
  parts: Sequence[_parts.Part],
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> Iterator[tuple[_parts.Part, _parts.Begun | None, jax.Array | None]]:
  """Each part with what was sent of it, and what its sums wait for.

  Where exchanges run beside the backward pass, all pushes of zen.
  """
  if len(parts) == 1 or not options.overlaps:
    for part in parts:
      yield part, _parts.begin(part, state, options, context), None
    return
  begun = [_parts.begin(part, state, options, context) for part in parts]
  marks = [x.mark for x in begun if x]
  known = [mark for mark in marks if mark is not None]
  after = _after.of_all(known) if len(known) > 1 else None
  for part, sent in zip(parts, begun):
    yield part, sent, after


def context_of(options: Options) -> Context:
  """Axes with their sizes; raises NameError where one is not bound."""
  sizes = []
  for axis in options.axes:
    try:
      sizes.append(int(lax.axis_size(axis)))
    except NameError as error:
      raise NameError(
        "`axis_name` must be bound where gradients are synchronized, and"
        f" {axis!r} is not; {_way_to_bind(axis)}."
      ) from error
  return options.context(sizes)


def _way_to_bind(axis: str) -> str:
  known = jax.sharding.get_abstract_mesh().axis_names
  if axis in known:
    return (
      "the mesh has it, but nothing is mapped over it here; call update inside"
      " shard_map, or wrap the step in `zenjax.data_parallel`"
    )
  if known:
    return f"give a name that the mesh has, of {known}"
  return (
    f"call update inside shard_map, pmap or vmap over {axis!r}, or wrap the"
    " step in `zenjax.data_parallel`"
  )


def local_leaves(tree: Any, context: Context) -> list[tuple[str, Any]]:
  """`(name, leaf)` of each gradient; ValueError where one is not local."""
  leaves = _select.named_leaves(tree, is_rows)
  for name, leaf in leaves:
    _check_local(name, leaf, context.axes)
  return leaves


def _check_local(name: str, leaf: Any, axes: Axes) -> None:
  """Refuses a gradient that autodiff has summed already.

  Types tell only under check_vma; elsewhere gradients are local anyway.
  """
  if leaf.dtype == jax.dtypes.float0:
    return
  varying = _compat.varying_axes(leaf.values if is_rows(leaf) else leaf)
  for axis in axes:
    if axis not in varying and _compat.records_varying(axis):
      raise ValueError(
        f"`updates` must be local gradients, and leaf {name!r} does not vary"
        f" over axis {axis!r}: under shard_map(check_vma=True) autodiff sums"
        " gradients of replicated parameters by itself. Differentiate with"
        f" respect to `zenjax.as_varying(params, {_as_given(axes)})`, or pass"
        " check_vma=False to shard_map."
      )


def _as_given(axes: Axes) -> str:
  return repr(axes[0] if len(axes) == 1 else axes)


def check_state(
  leaves: Sequence[tuple[str, Any]],
  chosen: Sequence[bool],
  state: _state.ZenSyncState | None,
) -> None:
  """Raises ValueError where a state remembers other leaves than these."""
  names = {name for (name, _), sparse in zip(leaves, chosen) if sparse}
  if state is not None and names != set(state.leaves):
    raise ValueError(
      "`state` must be made for these gradients: it remembers sparse leaves"
      f" {sorted(state.leaves)}, these have {sorted(names)}; call init with"
      " parameters of the same structure and shapes."
    )
