"""`data_parallel`: a training step mapped over the devices of a mesh."""

from collections.abc import Callable, Mapping, Sequence
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
from zenjax._src.tables import sharded_table
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
  `(params, opt_state)`, Flax's `TrainState`, a result of `nnx.split` or a
  module of Equinox. It is replicated, except for parts that differ between
  devices by their type (`zenjax.state_specs`). Batch arguments are split along
  their first dimension. Each device takes gradients of its own part of the
  batch, and `zen_sync` averages them, so you need neither `unreduced` nor a
  `pmean` of the loss.

  Inside the step, losses, norms, batch norm and in-batch negatives belong to
  one device. `zenjax.global_norm(grads, axis_name)` and `zenjax.weighted_mean`
  give numbers of the whole batch. A step that synchronizes nothing is refused,
  but other mistakes are not seen: run `zenjax.check_step` once.

  A single key of `jax.random.key` in a batch argument is folded with the
  device's index, so dropout masks differ between devices and a run repeats.
  Keys with a dimension are split like examples. A key in the state, as in
  `nnx.Rngs`, is the same on all devices, so all draw the same masks.

  Make optimizer states that differ between devices with `zenjax.init_state`.
  `TrainState.create` and `nnx.Optimizer` call `tx.init`, which refuses them.

  Args:
    step: `(state, *batch) -> (state, aux)`, with `zen_sync(axis_name)` in its
      optimizer chain or its own `lax.pmean`. It must return a state of the same
      structure. Leaves that are not arrays, as modules hold them, pass through;
      wrap the result in `eqx.filter_jit` then. To evaluate, return the state
      unchanged.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.
    aux_specs: How to combine the leaves of `aux` over devices. Floating scalars
      are averaged; all others must be declared. Give one word for all, or a
      mapping from names to words: `"mean"` and `"sum"` are over devices,
      `"batch"` joins the devices' parts along the first dimension, in the order
      of the batch, and `"same"` takes one device's value because all have the
      same. `Recorder.rows` needs no word.

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
      nothing, or only if a device's own data say so; a leaf of `aux` is not
      declared; or a leaf of the state is sharded that would be gathered on
      every device.
    TypeError: The step does not return two things, or returns a state of
      another structure.

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

    For evaluation, scores come out in the order of the batch. Each device draws
    different noise:

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
    _check_state(state, devices)
    specs = jax.tree.leaves(placement.state_specs(state, axis_name))
    _check_accumulated(state, devices)
    placement.require_replicated(state, "state", mesh.axis_names, specs)
    leaves, structure = jax.tree.flatten(state)
    arrays, with_arrays = leaf_util.arrays_of(state, leaf_util.is_array)
    of_arrays = [s for x, s in zip(leaves, specs) if leaf_util.is_array(x)]
    same, split = PartitionSpec(), PartitionSpec(axes)
    of_batch = jax.tree.map(lambda x: same if _is_key(x) else split, batch)
    in_specs = (of_arrays, *of_batch)
    left: list[tuple[dict[int, Any], Any]] = []

    def parts_of(given, batch):
      """Returns the results of a step by kind, and by their number."""
      new, aux = _pair(step(with_arrays(given), *batch))
      _require_structure(new, state)
      parts = {"state": {}, "same": {}, "batch": {}, "object": {}}
      for i, (x, old) in enumerate(zip(jax.tree.leaves(new), leaves)):
        x = returned.as_array(x) if leaf_util.is_array(old) else x
        kind = "state" if specs[i] == same else "batch"
        parts[kind if leaf_util.is_array(x) else "object"][i] = x
      values, kinds, of_aux = returned.of_all(aux, aux_specs, axes)
      for i, (x, kind) in enumerate(zip(values, kinds), len(leaves)):
        parts[kind][i] = x
      left.append((parts.pop("object"), of_aux))  # Objects stay outside.
      return parts

    def local_step(given, *batch):
      fold = lambda key: jax.random.fold_in(key, lax.axis_index(axes))
      batch = jax.tree.map(lambda x: fold(x) if _is_key(x) else x, batch)
      # The step is traced once, analysed, and then run as a jaxpr.
      program, like = jax.make_jaxpr(parts_of, return_shape=True)(given, batch)
      if devices > 1:
        outputs = jax.tree_util.tree_leaves_with_path(like)
        common = [path[0].key == "state" for path, _ in outputs]
        own = [spec != same for spec in of_arrays]
        own += [True] * (len(program.in_avals) - len(own))
        _require_synchronized(program, own, common, axes)
      values = jex_core.jaxpr_as_fun(program)(*jax.tree.leaves((given, batch)))
      # Constants come out as numbers.
      return jax.tree.unflatten(
        jax.tree.structure(like), map(returned.as_array, values)
      )

    # check_vma=False leaves gradients local without a cast in the user's code.
    parts = jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=in_specs,
      out_specs={"state": same, "same": same, "batch": split},
      check_vma=False,
    )(*placement.on_mesh((arrays, *batch), mesh, in_specs))
    objects, of_aux = left[-1]
    results = parts["state"] | parts["same"] | parts["batch"] | objects
    out = [results[i] for i in range(len(results))]
    state = structure.unflatten(out[: len(leaves)])
    return state, of_aux.unflatten(out[len(leaves) :])

  return mapped


def _require_synchronized(
  program: Any, own: list[bool], common: list[bool], axes: Axes
) -> None:
  """Raises if common outputs depend on inputs that no device exchanges.

  Args:
    program: A closed jaxpr.
    own: For each input, whether it differs between devices: the batch, and
      states such as residuals.
    common: For each output, whether it must be equal on all devices.
    axes: The axes that devices are mapped over.
  """
  _may_differ(program, own)  # Only for what it refuses.
  needed, used = jaxprs.needed(program, common)
  local = [x for x, is_used in zip(own, used, strict=True) if is_used]
  if not any(local) or _exchanges(needed, local):
    return
  axis_name = axes[0] if len(axes) == 1 else axes
  raise ValueError(
    "`step` changes its state by each device's own part of the batch, or by a"
    " state that differs between devices, and synchronizes nothing, so devices"
    f" would drift apart. Put `zenjax.zen_sync({axis_name!r})` first in the"
    " optimizer's chain, or, if all gradients are arrays, average them with"
    f" `jax.lax.pmean(grads, {axis_name!r})`. A `pmean` of the loss does not"
    " average gradients here."
  )


_COLLECTIVES = frozenset(
  "all_gather all_gather_invariant all_to_all pmax pmin ppermute psum"
  " psum_invariant ragged_all_to_all reduce_scatter".split()
)


def _communicates(eqn: Any) -> bool:
  nested = jex_core.jaxprs_in_params(eqn.params)
  return eqn.primitive.name in _COLLECTIVES or any(
    _communicates(inner) for jaxpr in nested for inner in jaxpr.eqns
  )


def _exchanges(program: Any, own: Sequence[bool]) -> bool:
  """Returns whether a collective takes what depends on a device's own inputs.

  The cotangent of a loss that is averaged over devices is a collective too, but
  of a constant.
  """
  jaxpr, _ = jaxprs.opened(program)
  local = {x for x, is_own in zip(jaxpr.invars, own, strict=True) if is_own}
  for eqn in jaxpr.eqns:
    read = [isinstance(x, jex_core.Var) and x in local for x in eqn.invars]
    if any(read):
      local.update(eqn.outvars)
      is_call = eqn.primitive.name in jaxprs.CALLS
      if is_call and _exchanges(jaxprs.called(eqn), read):
        return True
      if not is_call and _communicates(eqn):
        return True
  return False


def _may_differ(program: Any, own: Sequence[bool]) -> list[bool]:
  """Returns whether each output may differ between devices.

  Refuses exchanges under a condition that devices may decide differently. What
  an exchange returns is taken to be equal on all devices.

  Args:
    program: A closed jaxpr.
    own: For each input, whether it differs between devices.

  Raises:
    ValueError: A branch with a collective depends on an input that differs.
  """
  jaxpr, _ = jaxprs.opened(program)
  local = {x for x, is_own in zip(jaxpr.invars, own, strict=True) if is_own}
  is_local = lambda x: isinstance(x, jex_core.Var) and x in local
  for eqn in jaxpr.eqns:
    read, name = [*map(is_local, eqn.invars)], eqn.primitive.name
    if name in jaxprs.CALLS:
      differs = _may_differ(jaxprs.called(eqn), read)
      local.update(x for x, yes in zip(eqn.outvars, differs) if yes)
    elif any(read) and not _communicates(eqn):
      local.update(eqn.outvars)
    if name == "cond" and read[0] and _communicates(eqn):
      raise ValueError(
        "`step` synchronizes under a condition that depends on each device's"
        " own part of the batch, so devices may wait for each other forever."
        " Put `optax.apply_if_finite` behind `zen_sync` or `all_reduce`, not"
        " around it."
      )
  return [*map(is_local, jaxpr.outvars)]


def _check_state(state: Any, devices: int) -> None:
  """Raises ValueError for parts of a state that don't fit these devices."""
  for name, node in placement.own_nodes(state):
    if is_sharded(node) and node.replicas:
      raise ValueError(
        f"`state` holds table {name!r} with `replicas` {node.replicas!r}, which"
        " data_parallel does not support. Train in plain jit, with"
        " `zenjax.sharded_optimizer` for all parameters."
      )
    where = f"leaf {name!r} of `state`"
    sharded_table.require_devices(where, node.devices, devices)


def _is_key(x: Any) -> bool:
  """Returns True for a single key of `jax.random.key`."""
  return _holds_keys(x) and not x.shape


def _holds_keys(x: Any) -> bool:
  is_array = leaf_util.is_array(x)
  return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _check_batch(batch: tuple[Any, ...], devices: int) -> None:
  from_optax = lambda x: type(x).__module__.partition(".")[0] == "optax"
  for position, argument in enumerate(batch):
    nodes = jax.tree.leaves(argument, is_leaf=from_optax)
    own = sync_state.find(argument) or placement.own_nodes(argument)
    if own or any(map(from_optax, nodes)):
      raise ValueError(
        f"`batch[{position}]` of `step(state, *batch)` is the state of an"
        " optimizer, but batches are split over devices. Give `(params,"
        " opt_state)` in the first argument, and return `((params, opt_state),"
        " aux)`."
      )
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    this = f"`batch{jax.tree_util.keystr(path)}` of `step(state, *batch)`"
    if _is_raw_key(leaf):
      raise ValueError(
        f"{this} is a raw key of `jax.random.PRNGKey`, which would be split."
        " Give `jax.random.key(seed)` or `jax.random.wrap_key_data(key)`, so"
        " that each device draws different numbers."
      )
    rows = np.shape(leaf)[:1]
    if not _is_key(leaf) and (rows in ((), (0,)) or rows[0] % devices):
      array = leaf_util.is_array(leaf)
      shown = f"shape {leaf.shape}" if array else repr(leaf)
      raise ValueError(
        f"{this} must be split over {devices} devices along its first"
        f" dimension, got {shown}. {_remedy(leaf, devices)}"
      )


def _is_raw_key(x: Any) -> bool:
  key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
  return leaf_util.is_array(x) and (x.shape, x.dtype) == (key.shape, key.dtype)


def _remedy(leaf: Any, devices: int) -> str:
  if _holds_keys(leaf):
    return "Give one key, or one key for each example."
  if not np.shape(leaf):
    return (
      f"Give each device a copy, `jnp.full({devices}, x)`, and use `x[0]` in"
      " the step, or keep it in the state."
    )
  if not len(leaf):
    return "Skip the step: a mean over no examples is NaN."
  fewer = len(leaf) - len(leaf) % devices
  if not fewer:
    return (
      "Its first dimension must be the examples, at least one per device. Split"
      " micro-batches inside `step`."
    )
  return (
    f"Trim it to {fewer} rows. Or pad it to {fewer + devices}, and take the"
    " loss by `zenjax.weighted_mean`, because a plain mean counts padding."
  )


def _check_accumulated(state: Any, devices: int) -> None:
  """Refuses gradients of `MultiSteps` accumulated as if by one device.

  A part of them on each device must have the shape of a parameter. Parameters
  are in the rest of the state.
  """
  is_own = lambda node: isinstance(node, optax.MultiStepsState)
  others = jax.tree.map(lambda x: () if is_own(x) else x, state, is_leaf=is_own)
  shapes = {np.shape(leaf) for leaf in jax.tree.leaves(others)}
  nodes = sync_state.nodes(state, optax.MultiStepsState)
  for node in filter(placement.accumulates_local, nodes):
    for name, leaf in leaf_util.named_leaves(node.acc_grads):
      rows, *columns = np.shape(leaf)
      if name == leaf_util.ONLY and not columns:
        continue  # All parameters in one vector, by `optax.flatten`.
      alike = [x for x in shapes if x and x[1:] == tuple(columns)]
      if alike and (rows / devices, *columns) not in alike:
        raise ValueError(
          f"`state` holds gradients of `optax.MultiSteps` for leaf {name!r} of"
          f" shape {np.shape(leaf)}, and each of {devices} devices needs a part"
          " for itself. Instead of `tx.init` or `TrainState.create`, write"
          " `TrainState(step=0, apply_fn=f, params=params, tx=tx,"
          " opt_state=zenjax.init_state(tx, params, mesh, axis_name))`."
        )


def _pair(out: Any) -> tuple[Any, Any]:
  if isinstance(out, tuple) and len(out) == 2:
    return out
  shown = f"{len(out)} values" if isinstance(out, tuple) else "no tuple"
  raise TypeError(
    f"`step` must return `(state, aux)`, got {shown}. Return the new state, in"
    " the structure that `step` was given, such as `(params, opt_state)`, and"
    " everything else as `aux`, which is `()` if there is nothing else."
  )


def _require_structure(new: Any, state: Any) -> None:
  """Raises if the new state has another structure than the state."""
  if jax.tree.structure(new) == jax.tree.structure(state):
    return
  names = lambda tree: {name for name, _ in leaf_util.named_leaves(tree)}
  difference = "with other nodes or static fields"
  if lost := names(state) - names(new):
    difference = f"without leaf {min(lost)!r}"
  elif added := names(new) - names(state):
    difference = f"with leaf {min(added)!r} besides"
  raise TypeError(
    "`step` must return `(state, aux)` with a state of the structure that it"
    f" was given, got one {difference}. Return all of the state, and anything"
    " else in `aux`."
  )
