"""`data_parallel`: a training step mapped over the devices of a mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core import jaxprs
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sync_state
from zenjax._src.tables.sharded_table import is_sharded
from zenjax._src.training import placement
from zenjax._src.training import returned


def data_parallel(
  step: Callable[..., tuple[Any, Any]],
  mesh: Mesh,
  axis_name: AxisName,
  *,
  aux_specs: str | Mapping[str, str] | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """Maps a training step for one device over the devices of a mesh.

  Use it to turn `step(state, *batch) -> (state, aux)` into data-parallel
  training without writing a `shard_map`. The state can be any tree, such as
  `(params, opt_state)`, Flax's `TrainState`, what `nnx.split` returns or a
  module of Equinox. It is replicated, except for what differs between devices
  by its type (`zenjax.state_specs`). Batch arguments are split along their
  first dimension. Gradients are those of the device's own part until `zen_sync`
  averages them, so you need neither `unreduced` nor a `pmean` of the loss.

  The state stays equal on all devices only if everything that changes it is
  synchronized. A step that synchronizes nothing is refused. Nothing more is
  looked at: run `zenjax.check_step` once, which compares many devices with one.

  Everything inside a step is one device's: losses, norms, batch norm, in-batch
  negatives. `zenjax.global_norm(grads, axis_name)` and `zenjax.weighted_mean`
  give numbers of the whole batch.

  A single key of `jax.random.key` in a batch argument is folded with the
  device's index, so dropout masks differ between devices and a run repeats.
  Keys with a dimension are split like examples. A key in the state, as in
  `nnx.Rngs`, is the same on all devices, so all draw the same masks; give a key
  as a batch argument instead.

  Make optimizer states that differ between devices with `zenjax.init_state`.
  `TrainState.create` and `nnx.Optimizer` call `tx.init`, which refuses them.

  Args:
    step: `(state, *batch) -> (state, aux)`, with `zen_sync(axis_name)` in its
      optimizer chain or `lax.pmean` in itself. It returns a state of the
      structure that it was given. Functions, numbers and flags in the state,
      as modules hold them, pass through; wrap the result in `eqx.filter_jit`
      then. To evaluate, return the state as it came.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.
    aux_specs: What becomes of the leaves of `aux`. Floating scalars are
      averaged over devices; all others must be declared. Give one word for
      all, or a mapping from names to words: `"mean"` and `"sum"` are over
      devices, `"batch"` joins the devices' parts along the first dimension, in
      the order of the batch, and `"same"` takes one device's value because all
      have the same. `Recorder.rows` needs no word.

  Returns:
    A function of the same signature on global arrays. Wrap it in `jax.jit`,
    donating the state. Joined arrays stay on the devices that made them; with
    several processes `multihost_utils.process_allgather(x, tiled=True)` reads
    all of one.

  Raises:
    ValueError: A batch cannot be split evenly, is empty, or holds a raw key of
      `jax.random.PRNGKey` or an optimizer state; an axis is not the mesh's; a
      state was made for another number of devices (`zenjax.from_checkpoint`
      moves it), or by `tx.init` for `optax.MultiSteps`; the step synchronizes
      nothing; a leaf of `aux` is not declared; or a leaf of the state is
      sharded that would be gathered on every device.
    TypeError: The step does not return two things, or returns a state of
      another structure, or an object in place of an array of the state.

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
    ...   evaluate,
    ...   mesh,
    ...   "data",
    ...   aux_specs={"scores": "batch", "noise": "batch"},
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
    specs = jax.tree.leaves(placement.state_specs(state, axis_name))
    _check_accumulated(state, devices)
    placement.require_replicated(state, "state", mesh.axis_names, specs)
    leaves, structure = jax.tree.flatten(state)
    arrays, with_arrays = leaf_util.arrays_of(state, leaf_util.is_array)
    of_arrays = [s for x, s in zip(leaves, specs) if leaf_util.is_array(x)]
    in_specs = (of_arrays, *batch_specs(batch, axes))
    same, split = PartitionSpec(), PartitionSpec(axes)
    left: list[tuple[dict[int, Any], Any]] = []

    def parts_of(given, batch):
      """What a step returns, by its number, and by what becomes of it."""
      new, aux = _pair(step(with_arrays(given), *batch))
      _require_structure(new, state)
      values, words, of_aux = returned.of_all(aux, aux_specs, axes)
      parts = {"state": {}, "same": {}, "batch": {}, "object": {}}
      for i, (x, spec) in enumerate(zip(_checked(new, state), specs)):
        word = "state" if spec == same else "batch"
        parts[word if leaf_util.is_array(x) else "object"][i] = x
      for i, (x, word) in enumerate(zip(values, words), len(leaves)):
        parts[word][i] = x
      left.append((parts.pop("object"), of_aux))  # Objects do not leave.
      return parts

    def local_step(given, *batch):
      given = given, with_own_keys(batch, axes)
      # Traced once: the program is looked at, then run in place of the step.
      program, like = jax.make_jaxpr(parts_of, return_shape=True)(*given)
      if devices > 1:
        # Outputs are in the order of their keys: the common state comes last.
        after, number = len(program.out_avals), len(like["state"])
        common = [False] * (after - number) + [True] * number
        _require_synchronized(program, len(arrays), common, axes)
      values = jex_core.jaxpr_as_fun(program)(*jax.tree.leaves(given))
      # Constants come out as numbers.
      return jax.tree.unflatten(jax.tree.structure(like), map(_array, values))

    # check_vma=False leaves gradients local without a cast in the user's code.
    parts = jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=in_specs,
      out_specs={"state": same, "same": same, "batch": split},
      check_vma=False,
    )(*placement.on_mesh((arrays, *batch), mesh, in_specs))
    objects, of_aux = left[-1]
    found = parts["state"] | parts["same"] | parts["batch"] | objects
    out = [found[i] for i in range(len(found))]
    state = structure.unflatten(out[: len(leaves)])
    return state, of_aux.unflatten(out[len(leaves) :])

  return mapped


def _array(x: Any) -> Any:
  return x if leaf_util.is_array(x) else jnp.asarray(x)


def _require_synchronized(
  program: Any, before: int, common: list[bool], axes: Axes
) -> None:
  """Raises if outputs are made of the batch without any collective.

  Args:
    program: A closed jaxpr.
    before: How many of its inputs come before the batch.
    common: Which outputs are to be equal on all devices.
    axes: Along which devices differ.
  """
  needed, used = jaxprs.needed(program, common)
  if not any(used[before:]) or _communicates(needed):
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
  states: Any = sync_state.ZenSyncState | optax.MultiStepsState
  for position, argument in enumerate(batch):
    this = f"`batch` argument {position}"
    if sync_state.nodes(argument, states) or placement.own_nodes(argument):
      raise ValueError(
        f"{this} must hold examples, got the state of an optimizer; give all"
        " that goes from step to step in the first argument, as `(params,"
        " opt_state)`."
      )
    for leaf in jax.tree.leaves(argument):
      shape = np.shape(leaf)
      if _is_key(leaf):
        continue
      if _is_raw_key(leaf):
        raise ValueError(
          f"{this} must hold no raw key of `jax.random.PRNGKey`, got uint32 of"
          f" shape {shape}, which would be split as a batch is; give"
          " `jax.random.key(seed)`, or `jax.random.wrap_key_data(key)`, of"
          " which each device gets its own, and numbers that are no key in"
          " another dtype."
        )
      if shape and not shape[0]:
        raise ValueError(
          f"{this} must have at least one row for each of {devices} devices,"
          f" got shape {shape}; skip the step, for a mean over no examples is"
          " NaN."
        )
      if not shape or shape[0] % devices:
        raise ValueError(
          f"{this} must have a first dimension that {devices} devices divide,"
          f" got {_shown(leaf)}; {_remedy(leaf, devices)}."
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

  `state_specs` splits them, and a device would find a part of its own, which
  must have the shape of a parameter: these are in the rest of the state.
  """
  is_own = lambda node: isinstance(node, optax.MultiStepsState)
  rest = jax.tree.map(lambda x: () if is_own(x) else x, state, is_leaf=is_own)
  shapes = {np.shape(leaf) for leaf in jax.tree.leaves(rest)}
  nodes = sync_state.nodes(state, optax.MultiStepsState)
  for node in filter(placement.accumulates_local, nodes):
    for name, leaf in leaf_util.named_leaves(node.acc_grads):
      got = np.shape(leaf)
      part = (got[0] / devices, *got[1:])
      alike = [x for x in shapes if len(x) == len(got) and x[1:] == got[1:]]
      if alike and part not in alike:
        raise ValueError(
          "`state` must hold what `optax.MultiSteps` accumulates on each of"
          f" {devices} devices, {devices} times the rows of leaf {name!r}, got"
          f" shape {got}; make the optimizer's state with"
          " `zenjax.init_state(tx, params, mesh, axis_name)` instead of"
          " `tx.init`, which `TrainState.create` and `nnx.Optimizer` call, too:"
          " `TrainState(step=0, apply_fn=f, params=params, tx=tx,"
          " opt_state=zenjax.init_state(...))`."
        )


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


def _checked(new: Any, state: Any) -> list[Any]:
  """Returns the leaves of a new state; what was an array is one."""
  found = []
  for x, (name, before) in zip(
    jax.tree.leaves(new), leaf_util.named_leaves(state)
  ):
    was_array = leaf_util.is_array(before)
    number = isinstance(x, (bool, int, float, complex))
    if was_array and number:
      x = jnp.asarray(x)
    stays = leaf_util.is_array(x) or (
      not was_array and (number or isinstance(x, str) or _same(x, before))
    )
    if not stays:
      raise TypeError(
        f"`step` must return leaf {name!r} of the state as an array, a number"
        " or as it came, got"
        f" {x!r} for {'an array' if was_array else repr(before)}; make it"
        " outside of the step."
      )
    found.append(x)
  return found


def _same(x: Any, before: Any) -> bool:
  """Returns True for one object, and for methods bound to equal ones."""
  return x is before or (type(x) is type(before) and bool(x == before))
