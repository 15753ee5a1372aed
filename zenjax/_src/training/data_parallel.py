"""`data_parallel`: a training step mapped over the devices of a mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval as pe
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sharded_tables import is_sharded
from zenjax._src.sync import sync_state
from zenjax._src.training import placement
from zenjax._src.training import returned


def data_parallel(
  step: Callable[..., tuple[Any, Any]],
  mesh: Mesh,
  axis_name: AxisName,
  *,
  aux_specs: str | Mapping[str, str] | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """Maps a training step over devices, for users of plain `jit`.

  The step is the one that people write for one device, `step(state, *batch) ->
  (state, aux)`, with any tree as state: `(params, opt_state)`, a dict, Flax's
  `TrainState`, what `nnx.split` returns, a module of Equinox. One call gives
  the `shard_map`, the specs and local gradients: the state is placed by
  `state_specs`, which is to say replicated but for what differs between devices
  by its type; each batch argument is split along its first dimension; and
  gradients taken inside are those of the device's own part until `zen_sync`
  averages them. So neither `unreduced` nor a `pmean` of the loss is needed.

  Row gradients, `zenjax.value_and_grad` for `lazy_rows` or
  `sharded_optimizer`, are taken in a step as any others; the example of
  `sharded_optimizer` shows one. Make the optimizer's state with
  `zenjax.init_state`. `TrainState.create` and `nnx.Optimizer` make it by
  `tx.init`, which serves where all of it is equal on all devices, and is
  refused by name elsewhere. Then write `TrainState(step=0,
  apply_fn=model.apply, params=params, tx=tx,
  opt_state=zenjax.init_state(tx, params, mesh, axis_name))`; of nnx, whose
  `split` leaves no types in the state of an optimizer, take `(params,
  opt_state)` with `graph, params = nnx.split(model, nnx.Param)`.

  The state stays equal on all devices only if gradients are averaged. The
  traced step is looked at: a leaf that it makes of the device's own part of the
  batch with no collective on the way is refused. That the collective averages
  what it should is not seen. What a batch argument says to all alike, as a rate
  in `x[0]`, needs a `lax.pmean` where a state keeps it.

  Leaves of the state that are no arrays, as functions, numbers and flags in a
  module, are handed to the step as they come, and come out as it returns them.
  `jax.jit` takes no functions: wrap the mapped step in `eqx.filter_jit`.

  Inside a step everything is one device's: losses, gradients and their norms,
  masks, statistics of a batch (batch norm), the other examples of a batch
  (in-batch negatives). `zenjax.global_norm(grads, axis_name)` and
  `zenjax.weighted_mean` give those of all devices.

  Random numbers are a device's own where their key is a batch argument, or a
  leaf of one: of one key of `jax.random.key` each device is given
  `jax.random.fold_in(key, i)`, `i` its index, so that dropout masks differ and
  a run repeats. Keys for each example, `[B]`, are split as examples are. A key
  in the state, as `nnx.Rngs` keeps one, or one that the step closes over, is
  the same on all devices: all draw the same masks, each for its own examples.
  Give a key beside the batch instead, as in `model(x, rngs=nnx.Rngs(key))`, or
  fold one in by hand, `jax.random.fold_in(key, lax.axis_index(axis_name))`. In
  the state there can be no key that was made of a device's own, and nothing
  drawn from one that met no collective, as noise added to parameters.

  What `aux` holds comes out of the step by these rules, which are read from
  the traced step:

  - What is equal on all devices comes out as it is: what is not made of the
    batch, and what `lax.pmean`, `psum`, `pmax`, `pmin` or `all_gather` return.
    A length, `x.shape[0]`, is equal, too: that of one device's part.
  - Floating scalars, as the loss, are averaged over devices: sums and maxima,
    too, so that a count in floats comes out an n-th (give it as an integer, or
    `aux_specs={"count": "sum"}`; take `lax.pmax` of a maximum).
  - Integers that are sums over the examples, as the number of right answers,
    are summed.
  - Arrays that are made example by example are joined along their first
    dimension, in the order of the batch: predictions, losses by example.
  - What `Recorder.rows` returns is that of every device.

  Anything else is refused until `aux_specs` says what it is: predictions that
  batch norm or dropout ties to other examples of the device (`"batch"`),
  histograms made by `x.at[i].add` (`"sum"`), integer maxima (`lax.pmax`).

  Args:
    step: `(state, *batch) -> (state, aux)`, written for one device, with
      `zen_sync(axis_name)` in its optimizer chain, or `lax.pmean`,
      `sparse_pmean` in itself. It returns a state of the structure that it was
      given; to evaluate, the same.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.
    aux_specs: What becomes of leaves of `aux`, in the place of the rules: a
      word for all, or a mapping from names, as of `zenjax.report`, to words for
      some. `"mean"` and `"sum"` are over devices and take any shape; `"batch"`
      joins the devices' parts along the first dimension; `"same"` takes the
      value of one device, as the caller knows that all have it.

  Returns:
    A function of the same signature on global arrays. Wrap it in `jax.jit`,
    donating the state. Arrays by example stay on the devices that made them;
    with several processes
    `jax.experimental.multihost_utils.process_allgather(x, tiled=True)` reads
    all of one.

  Raises:
    ValueError: A batch cannot be split evenly, is empty, or holds a raw key of
      `jax.random.PRNGKey` or the state of an optimizer; an axis is not the
      mesh's; the state of `optax.MultiSteps` was not made by
      `zenjax.init_state`; a state was made for another number of devices
      (`zenjax.from_checkpoint` moves it); the step would leave devices with
      different states; a leaf of `aux` is ambiguous; or a leaf of the state is
      sharded that would be gathered on every device. Under `jit` the placement
      over automatic axes cannot be seen; `zenjax.init_state` sees that of
      parameters.
    TypeError: The step does not return two things, or returns a state of
      another structure, or in the place of a leaf an object that is no array,
      no number and not the one that came.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(1.0))
    >>> def step(state, ids):
    ...   table, opt_state = state
    ...   loss, grads = jax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, opt_state = tx.update(grads, opt_state, table)
    ...   return (optax.apply_updates(table, updates), opt_state), loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> table = jnp.zeros((4, 1))
    >>> state = table, zenjax.init_state(tx, table, mesh, "data")
    >>> (table, _), loss = step(state, jnp.array([0, 0, 1, 3]))
    >>> table[:, 0].tolist()
    [-1.0, -0.5, 0.0, -0.5]

    Evaluation, where scores come out in the order of the batch, and each device
    draws noise of its own:

    >>> def evaluate(table, ids, key):
    ...   scores = table[ids].sum(-1)
    ...   aux = {"scores": scores, "mean": scores.mean()}
    ...   return table, aux | {"noise": jax.random.uniform(key, scores.shape)}
    >>> mapped = zenjax.data_parallel(
    ...   evaluate, mesh, "data", aux_specs={"noise": "batch"}
    ... )
    >>> ids = jnp.array([3, 2, 1, 0])
    >>> _, aux = jax.jit(mapped)(table, ids, jax.random.key(0))
    >>> aux["scores"].tolist(), float(aux["mean"])
    ([-0.5, 0.0, -0.5, -1.0], -0.5)
    >>> len(set(aux["noise"].tolist()))
    4
  """
  axes = arguments.mesh_axes(axis_name, mesh)
  aux_specs = returned.check(aux_specs)
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))

  def mapped(state, *batch):
    _check_batch(batch, devices)
    _require_no_copies(state)
    placement.require_devices(state, "state", devices)
    _check_accumulated(state, devices)
    specs = placement.leaf_specs(state, axis_name)
    placement.require_replicated(state, "state", mesh.axis_names, specs)
    leaves, structure = jax.tree.flatten(state)
    arrays = [i for i, x in enumerate(leaves) if leaf_util.is_array(x)]
    arguments = ([leaves[i] for i in arrays], *batch)
    in_specs = ([specs[i] for i in arrays], *batch_specs(batch, axes))
    layouts: list[tuple[returned.Layout, returned.Layout]] = []

    def local_step(given, *batch):
      whole = list(leaves)
      for i, x in zip(arrays, given):
        whole[i] = x
      state = structure.unflatten(whole)
      split = [spec != PartitionSpec() for spec in specs]
      batch = with_own_keys(batch, axes)
      after, aux = _run(step, state, batch, split, devices > 1 and axes)
      kept, of_state = returned.by_specs(after, specs, structure)
      parts, of_aux = returned.parted(aux, aux_specs, axes)
      layouts.append((of_state, of_aux))
      return kept, parts

    # check_vma=False leaves gradients local without a cast in the user's code.
    both = jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=(returned.Outputs.specs(axes),) * 2,
      check_vma=False,
    )(*placement.on_mesh(arguments, mesh, in_specs))
    state, aux = (x.whole(parts) for x, parts in zip(layouts[-1], both))
    return state, aux

  return mapped


def _run(
  step: Callable[..., tuple[Any, Any]],
  state: Any,
  batch: tuple[Any, ...],
  split: Sequence[bool],
  axes: Axes | Literal[False],
) -> tuple[list[Any], Any]:
  """Calls `step`; refuses one that synchronizes nothing.

  Args:
    step: As the user gave it.
    state: Of one device.
    batch: Of one device.
    split: For each leaf of the state, whether it differs between devices.
    axes: Along which devices differ; False for one device.

  Returns:
    The leaves of the new state, and `aux`.
  """
  leaves, structure = jax.tree.flatten(state)
  arrays = [i for i, x in enumerate(leaves) if leaf_util.is_array(x)]
  made: list[tuple[list[int], list[Any], Any]] = []

  def flat(batch, given):
    whole = list(leaves)
    for i, x in zip(arrays, given):
      whole[i] = x
    new, aux = _pair(step(structure.unflatten(whole), *batch))
    _require_structure(new, state)
    after = jax.tree.leaves(new)
    mapped = _mapped(after, state)
    values, of_aux = jax.tree.flatten(aux)
    made.append((mapped, after, of_aux))
    return [*(after[i] for i in mapped), *values]

  # Traced once: the program is looked at, then run in the place of the step.
  given = [leaves[i] for i in arrays]
  program = jax.make_jaxpr(flat)(batch, given)
  ((mapped, after, of_aux),) = made
  number = len(jax.tree.leaves(batch))
  if axes:
    common = [not split[i] for i in mapped]
    common += [False] * (len(program.out_avals) - len(mapped))
    _require_synchronized(program, number, common, axes)
  values = jex_core.jaxpr_as_fun(program)(*jax.tree.leaves((batch, given)))
  # Constants come out as numbers.
  values = [x if leaf_util.is_array(x) else jnp.asarray(x) for x in values]
  for i, x in zip(mapped, values):
    after[i] = x
  return after, of_aux.unflatten(values[len(mapped) :])


def _require_synchronized(
  program: Any, number: int, common: list[bool], axes: Axes
) -> None:
  """Raises if outputs are made of the batch without any collective.

  Args:
    program: A closed jaxpr.
    number: How many of its inputs are the batch.
    common: Which outputs are to be equal on all devices.
    axes: Along which devices differ.
  """
  needed, used = pe.dce_jaxpr(program.jaxpr, common)
  if not any(used[:number]) or _communicates(needed):
    return
  axis_name = axes[0] if len(axes) == 1 else axes
  raise ValueError(
    "`step` changes its state by each device's own part of the batch and"
    " synchronizes nothing, so devices would go different ways. Put"
    f" `zenjax.zen_sync({axis_name!r})` first in the optimizer's chain (right"
    " behind a sparsifier), or average what changes the state by"
    f" `jax.lax.pmean(x, {axis_name!r})`."
  )


_COLLECTIVES = frozenset(
  "all_gather all_gather_invariant all_to_all pmax pmin ppermute psum"
  " psum_invariant ragged_all_to_all reduce_scatter".split()
)


def _communicates(jaxpr: Any) -> bool:
  return any(
    eqn.primitive.name in _COLLECTIVES
    or any(map(_communicates, jex_core.jaxprs_in_params(eqn.params)))
    for eqn in jaxpr.eqns
  )


def _require_no_copies(state: Any) -> None:
  """Raises ValueError for tables with copies along some of the axes."""
  for name, leaf in leaf_util.named_leaves(state, is_sharded):
    if is_sharded(leaf) and leaf.replicas:
      raise ValueError(
        "`state` of data_parallel must hold no table with `replicas`, and leaf"
        f" {name!r} has copies along {leaf.replicas!r}; call the step in plain"
        " jit, without data_parallel, or in a shard_map with specs of"
        " `zenjax.state_specs(state, axis_name)`."
      )


def batch_specs(batch: tuple[Any, ...], axes: Axes) -> tuple[Any, ...]:
  """Specs of batch arguments: all is split but single keys."""
  split = PartitionSpec(axes)
  return jax.tree.map(lambda x: PartitionSpec() if _is_key(x) else split, batch)


def with_own_keys(batch: tuple[Any, ...], axes: Axes) -> tuple[Any, ...]:
  """Batch arguments of a device, single keys folded with its index."""
  own = lambda key: jax.random.fold_in(key, lax.axis_index(axes))
  return jax.tree.map(lambda x: own(x) if _is_key(x) else x, batch)


def _is_key(x: Any) -> bool:
  """Returns True for one key of `jax.random.key`, and not for several."""
  return _holds_keys(x) and not x.shape


def _holds_keys(x: Any) -> bool:
  is_array = leaf_util.is_array(x)
  return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _check_batch(batch: tuple[Any, ...], devices: int) -> None:
  for position, argument in enumerate(batch):
    _require_no_state(argument, position)
    for leaf in jax.tree.leaves(argument):
      shape = np.shape(leaf)
      if _is_key(leaf):
        continue
      if _is_raw_key(leaf):
        raise ValueError(
          f"`batch` argument {position} must hold no raw key of"
          f" `jax.random.PRNGKey`, got uint32 of shape {shape}, which would be"
          " split as a batch is; give `jax.random.key(seed)`, or"
          " `jax.random.wrap_key_data(key)`, of which each device gets its own,"
          " and numbers that are no key in another dtype."
        )
      if shape and not shape[0]:
        raise ValueError(
          f"`batch` argument {position} must have at least one row for each of"
          f" {devices} devices, got shape {shape}; skip the step, for a mean"
          " over no examples is NaN."
        )
      if not shape or shape[0] % devices:
        raise ValueError(
          f"`batch` argument {position} must have a first dimension that"
          f" {devices} devices divide, got {_shown(leaf)};"
          f" {_remedy(leaf, devices)}."
        )


def _require_no_state(argument: Any, position: int) -> None:
  """Refuses what would be split along dimensions that are of no examples."""
  kinds: Any = sync_state.ZenSyncState | optax.MultiStepsState
  if sync_state.nodes(argument, kinds) or placement.own_nodes(argument):
    raise ValueError(
      f"`batch` argument {position} must hold examples, got the state of an"
      " optimizer; give all that goes from step to step in the first argument,"
      " as `(params, opt_state)`."
    )


def _is_raw_key(x: Any) -> bool:
  if not leaf_util.is_array(x) or x.dtype != jnp.uint32 or x.ndim != 1:
    return False
  return x.shape == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def _shown(leaf: Any) -> str:
  number = leaf_util.is_array(leaf) or isinstance(leaf, int | float | complex)
  return f"shape {np.shape(leaf)}" if number else repr(leaf)


def _remedy(leaf: Any, devices: int) -> str:
  if _holds_keys(leaf):
    return (
      "give one key, of which each device gets its own, or one for each example"
    )
  if np.shape(leaf):
    return "pad or trim the batch"
  return (
    f"give every device a copy, `jnp.full({devices}, x)`, and use `x[0]` in"
    " the step, or keep it in the state, which all devices see whole"
  )


def _check_accumulated(state: Any, devices: int) -> None:
  """Refuses gradients accumulated as if by one device for all.

  `state_specs` splits them, and a device would find a part of its own. What
  they are gradients of is found in the rest of the state: leaves whose names
  end alike, of the same shapes but for the number of devices.
  """
  is_own = lambda node: isinstance(node, optax.MultiStepsState)
  nodes = [x for x in jax.tree.leaves(state, is_leaf=is_own) if is_own(x)]
  rest = jax.tree.map(
    lambda node: node._replace(acc_grads=None) if is_own(node) else node,
    state,
    is_leaf=is_own,
  )
  shapes = {
    f".{name}": tuple(leaf.shape)
    for name, leaf in leaf_util.named_leaves(rest)
    if leaf_util.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
  }
  for node in nodes:
    found = _accumulated_of(node.acc_grads, shapes)
    if not found or devices in found:
      continue
    name, got, shape = found[min(found)]
    raise ValueError(
      "`state` must hold what `optax.MultiSteps` accumulates on each of"
      f" {devices} devices, {devices} times the rows of leaf {name!r} of"
      f" shape {shape}, got shape {got}; make the optimizer's state with"
      " `zenjax.init_state(tx, params, mesh, axis_name)` instead of `tx.init`,"
      " which"
      " `TrainState.create` and `nnx.Optimizer` call, too: `TrainState(step=0,"
      " apply_fn=f, params=params, tx=tx, opt_state=zenjax.init_state(...))`."
    )


def _accumulated_of(
  acc_grads: Any, shapes: dict[str, tuple[int, ...]]
) -> dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]]:
  """Finds arrays that may be those whose gradients are accumulated.

  Returns:
    By how many devices accumulate, if it is these: name and shape of the first
    leaf of the gradients, and the shape of the array.
  """
  named = leaf_util.named_leaves(acc_grads)
  alone = jax.tree.structure(acc_grads) == jax.tree.structure(0)
  ends = ["" if alone else f".{name}" for name, _ in named]
  found = {}
  for whole in shapes:
    if not ends or not whole.endswith(ends[0]):
      continue
    begin = whole[: len(whole) - len(ends[0])]
    of = [shapes.get(begin + end, ()) for end in ends]
    times = {_times(acc.shape, shape) for shape, (_, acc) in zip(of, named)}
    if len(times) == 1 and 0 not in times:
      name, acc = named[0]
      found[times.pop()] = name, tuple(acc.shape), of[0]
  return found


def _times(shape: tuple[int, ...], of: tuple[int, ...]) -> int:
  """Returns how many arrays of shape `of` make one of `shape`, 0 if none do."""
  if not of or 0 in of or len(shape) != len(of) or shape[1:] != of[1:]:
    return 0
  return 0 if shape[0] % of[0] else shape[0] // of[0]


def _pair(out: Any) -> tuple[Any, Any]:
  if isinstance(out, tuple) and len(out) == 2:
    return out
  remedy = "return `()` as `aux` if there is nothing to tell"
  shown = type(out).__name__
  if isinstance(out, tuple):
    shown = f"{len(out)} values"
    if len(out) > 2:
      remedy = (
        "make one of all that goes from step to step, `params, opt_state ="
        " state` first in `step` and `return (params, opt_state), aux` last"
      )
  raise TypeError(f"`step` must return `(state, aux)`, got {shown}; {remedy}.")


def _require_structure(out: Any, state: Any) -> None:
  """Refuses another state, as where `aux` or a part of it was forgotten."""
  if jax.tree.structure(out) == jax.tree.structure(state):
    return
  got, want = (
    [name for name, _ in leaf_util.named_leaves(tree)] for tree in (out, state)
  )
  lost = [name for name in want if name not in got]
  new = [name for name in got if name not in want]
  if lost:
    shown = f"without leaf {lost[0]!r}"
  elif new:
    shown = f"with leaf {new[0]!r} besides"
  else:
    shown = f"{type(out).__name__} of other nodes or static fields"
  raise TypeError(
    "`step` must return `(state, aux)`, and a state of the structure that it"
    f" was given, got one {shown}; return all of the state, what does not"
    " change as it came, and anything else in `aux`."
  )


_NUMBERS = (bool, int, float, complex)


def _mapped(after: Sequence[Any], state: Any) -> list[int]:
  """Which leaves of a returned state are arrays; others stay as they are."""
  found = []
  for i, (x, (name, before)) in enumerate(
    zip(after, leaf_util.named_leaves(state))
  ):
    was_array = leaf_util.is_array(before)
    number = isinstance(x, _NUMBERS)
    if leaf_util.is_array(x) or (was_array and number):
      found.append(i)
    elif was_array or not (number or isinstance(x, str) or _same(x, before)):
      raise TypeError(
        f"`step` must return leaf {name!r} of the state as an array, a number"
        " or as it came, got"
        f" {x!r} for {'an array' if was_array else repr(before)}; make it"
        " outside of the step."
      )
  return found


def _same(x: Any, before: Any) -> bool:
  """Returns True for one object, and for methods bound to equal ones."""
  return x is before or (type(x) is type(before) and bool(x == before))
