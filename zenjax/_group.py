"""A tree of gradients: which leaves share the sparse exchange, which psum."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any
import warnings

import jax
from jax import lax
import jax.numpy as jnp

from zenjax import _compat
from zenjax import _derivatives
from zenjax import _parts
from zenjax import _select
from zenjax import _selected
from zenjax import _state
from zenjax import _totals
from zenjax._collectives import Axes
from zenjax._options import Options
from zenjax._planner._plan import require_tree
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import require_one
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
  options = following(options, state.selected if state else {})
  options = _as_noted(leaves, state, options)
  # Numbers that a step only writes stay outside, or they would be read.
  memory = state
  if state:
    arrays = {name for name, leaf in leaves if not is_rows(leaf)}
    memory = _state.read_by_a_step(state, arrays, options.exact)
  synced, new_leaves = _derivatives.as_of_psum(
    lambda tree, state: _exchanged(tree, state, options, context),
    tree,
    memory,
    options,
    context,
  )
  return synced, _state.with_rest(new_leaves, state) if state else {}


def _exchanged(
  tree: Any,
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> tuple[Any, dict[str, _state.LeafState]]:
  """As `sync_tree`, of leaves that were looked at."""
  leaves = _select.named_leaves(tree, is_rows)
  chosen = chosen_leaves(tree, options)
  _check_residuals(leaves, state, options, context)
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


def following(options: Options, selected: Mapping[str, jax.Array]) -> Options:
  """`options` behind a sparsifier that selects from these leaves.

  Args:
    options: Of the transformation.
    selected: As in `ZenSyncState`.
  """
  if not selected:
    return options
  if options.plan:
    raise ValueError(
      "`plan` decides for gradients that no sparsifier has selected from, but"
      f" one before zen_sync selects elements of leaf {next(iter(selected))!r};"
      " leave `plan` out, or the sparsifier."
    )
  dtypes = {name: jnp.dtype(x.dtype) for name, x in selected.items()}
  return dataclasses.replace(options, selected=dtypes)


def chosen_leaves(tree: Any, options: Options) -> list[bool]:
  """For each leaf, in order, whether it travels sparse."""
  return _select.select(tree, options.sparse, options.unit, options.elements)


def warn_of_whole(
  leaves: Sequence[tuple[str, Any]], chosen: Sequence[bool], options: Options
) -> None:
  """Warns where elements were selected and the user has all of a leaf sent."""
  for (name, leaf), sparse in zip(leaves, chosen):
    if name not in options.selected or not _select.is_table(leaf, "element"):
      continue
    if sparse and options.unit_of(name) != "row":
      continue
    given = (
      f"unit={options.unit!r}" if sparse or not options.follows else "sparse"
    )
    warnings.warn(
      f"zen_sync should send of leaf {name!r} only the elements that a"
      f" sparsifier before it selects, and by `{given}` it sends all of it;"
      " leave that out, and it sends elements.",
      stacklevel=3,
    )


def _as_noted(
  leaves: Sequence[tuple[str, Any]],
  state: _state.ZenSyncState | None,
  options: Options,
) -> Options:
  """`options` of gradients that a sparsifier has returned just now.

  Without a state they are taken as they come. A state was made for them.
  """
  notes = {
    name: note
    for name, leaf in leaves
    if (note := _selected.sent(leaf)) and name not in options.selected
  }
  if state is None:
    found = {
      name: jnp.zeros((), notes[name].wire or leaf.dtype)
      for name, leaf in leaves
      if name in notes
    }
    return following(options, found)
  for name, leaf in leaves:
    large = name in notes and _select.is_table(leaf, "element")
    if large and options.follows and options.scheme not in DENSE:
      raise ValueError(
        f"`state` must be made for what {notes[name].by} selects, and this one"
        f" is of a zen_sync that knows of no sparsifier before it: of leaf"
        f" {name!r} all would be sent. Make one state of the whole chain,"
        f" `zenjax.init(optax.chain(zenjax.{notes[name].by}(..),"
        " zenjax.zen_sync(..)), params, mesh, axis_name)`, or give zen_sync"
        " `unit='element'`."
      )
  return options


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
    if is_rows(leaf):
      require_one(f"leaf {name!r} of `updates`", leaf)
    _check_local(name, leaf, context.axes)
  return leaves


def _check_local(name: str, leaf: Any, axes: Axes) -> None:
  """Refuses a gradient that autodiff has summed already.

  Types tell only under check_vma; elsewhere gradients are local anyway.
  """
  if leaf.dtype == jax.dtypes.float0:
    raise TypeError(
      f"`updates` must be gradients, and leaf {name!r} is float0, which"
      " jax.grad(.., allow_int=True) gives for integers: there is nothing to"
      " average; keep it out by `optax.partition`, and apply updates by"
      " `zenjax.apply_updates`, which leaves such a parameter as it is."
    )
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


def _check_residuals(
  leaves: Sequence[tuple[str, Any]],
  state: _state.ZenSyncState | None,
  options: Options,
  context: Context,
) -> None:
  """Raises ValueError where what waits is not that of a device."""
  shapes = {name: tuple(leaf.shape) for name, leaf in leaves}
  for name, leaf in state.leaves.items() if state else ():
    if name not in shapes or (leaf.residual is None and options.exact):
      continue
    if leaf.residual is None or options.exact:
      made, used = ("exact", "carry")[:: 1 if leaf.residual is None else -1]
      raise ValueError(
        f"`state` must be made with `on_overflow={used!r}`, as it is used, got"
        f" one of {made!r} for leaf {name!r}; "
        + (
          "call `zenjax.init(tx, params, mesh, axis_name)`."
          if leaf.residual is None
          else "rows that wait in its residual would be lost; go on with"
          " `on_overflow='carry'`."
        )
      )
    parts, *shape = leaf.residual.shape
    if tuple(shape) != shapes[name]:
      raise ValueError(
        f"`state` must keep a residual of shape {(1, *shapes[name])} of leaf"
        f" {name!r} on a device, got {leaf.residual.shape}; call `zenjax.init("
        "tx, params, mesh, axis_name)` with these parameters."
      )
    if parts != 1:
      raise ValueError(
        "`state` of on_overflow='carry' must keep one residual of leaf"
        f" {name!r} on each of {context.devices} devices, got {parts}, as of"
        f" {parts * context.devices} devices; call `zenjax.reshard(state, mesh,"
        " axis_name)`, and give `zenjax.state_specs(state, axis_name)` to"
        " shard_map."
      )


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
