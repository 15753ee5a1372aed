"""`data_parallel`: a training step mapped over the devices of a mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import optax

from zenjax._src.core.arguments import AxisName
from zenjax._src.rows import leaf_util
from zenjax._src.training import placement
from zenjax._src.training import replicas
from zenjax._src.training import returned


def data_parallel(
  step: Callable[..., tuple[Any, Any, Any]],
  mesh: Mesh,
  axis_name: AxisName,
  *,
  aux_specs: str | Mapping[str, str] | None = None,
) -> Callable[..., tuple[Any, Any, Any]]:
  """Maps a training step over devices, for users of plain `jit`.

  One call gives the `shard_map`, the specs and local gradients: parameters
  are replicated, the optimizer state is placed by `state_specs`, each batch
  argument is split along its first dimension, and gradients taken inside are
  those of the device's own part until `zen_sync` averages them. So neither
  `unsummed` nor a `pmean` of the loss is needed.

  Row gradients, `zenjax.value_and_grad` for `lazy_rows` or `owner_update`, are
  taken in a step as any others; the example of `owner_update` shows one. Make
  the state with `zenjax.init`.

  Parameters and state stay equal on all devices only if gradients are averaged.
  The traced step is looked at: a leaf that it makes of the device's own part of
  the batch with no collective on the way is refused. That the collective
  averages what it should is not seen. What a batch argument says to all alike,
  as a rate in `x[0]`, needs a `lax.pmean` where a state keeps it.

  Inside a step everything is one device's: losses, gradients and their norms,
  masks, statistics of a batch (batch norm), the other examples of a batch
  (in-batch negatives), random numbers. `zenjax.global_norm(grads, axis_name)`
  and `zenjax.weighted_mean` give those of all devices.

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
    step: `(params, opt_state, *batch) -> (params, opt_state, aux)`, written
      for one device, with `zen_sync(axis_name)` in its optimizer chain, or
      `lax.pmean`, `sparse_pmean` in itself. It may return parameters and state
      as they came, to evaluate.
    mesh: A mesh that has the axes.
    axis_name: The axis or axes of `mesh` that batches are split over.
    aux_specs: What becomes of leaves of `aux`, in the place of the rules: a
      word for all, or a mapping from names, as of `zenjax.report`, to words for
      some. `"mean"` and `"sum"` are over devices and take any shape; `"batch"`
      joins the devices' parts along the first dimension; `"same"` takes the
      value of one device, as the caller knows that all have it.

  Returns:
    A function of the same signature on global arrays. Wrap it in `jax.jit`,
    donating parameters and state. Arrays by example stay on the devices that
    made them; with several processes
    `jax.experimental.multihost_utils.process_allgather(x, tiled=True)` reads
    all of one.

  Raises:
    ValueError: A batch cannot be split evenly or is empty, an axis is not the
      mesh's, the state of `optax.MultiSteps` was not made by `zenjax.init`, a
      state was made for another number of devices (`zenjax.reshard` moves it),
      the step would leave devices with different parameters or states, a leaf
      of `aux` is ambiguous, or parameters are sharded, which would be gathered
      on every device. Under `jit` the placement over automatic axes cannot be
      seen; `zenjax.init` sees it.
    TypeError: The step does not return three things.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(1.0))
    >>> def step(table, state, ids):
    ...   loss, grads = jax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, state = tx.update(grads, state, table)
    ...   return optax.apply_updates(table, updates), state, loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> table = jnp.zeros((4, 1))
    >>> table, _, _ = step(table, tx.init(table), jnp.array([0, 0, 1, 3]))
    >>> table[:, 0].tolist()
    [-1.0, -0.5, 0.0, -0.5]

    Evaluation, where scores come out in the order of the batch:

    >>> def evaluate(table, state, ids):
    ...   scores = table[ids].sum(-1)
    ...   return table, state, {"scores": scores, "mean": scores.mean()}
    >>> evaluate = jax.jit(zenjax.data_parallel(evaluate, mesh, "data"))
    >>> _, _, aux = evaluate(table, (), jnp.array([3, 2, 1, 0]))
    >>> aux["scores"].tolist(), float(aux["mean"])
    ([-0.5, 0.0, -0.5, -1.0], -0.5)
  """
  axes = placement.mesh_axes(axis_name, mesh)
  aux_specs = returned.check(aux_specs)
  devices = int(np.prod([mesh.shape[axis] for axis in axes]))

  def mapped(params, opt_state, *batch):
    _check_batch(batch, devices)
    placement.require_devices(opt_state, "opt_state", devices)
    placement.require_replicated(params, "params", mesh.axis_names)
    _check_accumulated(opt_state, params, devices)
    same, split = PartitionSpec(), PartitionSpec(axes)
    specs = placement.state_specs(opt_state, axis_name)
    in_specs = (same, specs, *[split] * len(batch))
    arguments = (params, opt_state, *batch)
    looked_at = replicas.checked(step, specs, mesh, axes)
    layouts: list[returned.Layout] = []

    def local_step(params, opt_state, *batch):
      params, opt_state, aux, flows = looked_at(params, opt_state, *batch)
      parts, layout = returned.parted(aux, flows, aux_specs, axes, devices > 1)
      layouts.append(layout)
      return params, opt_state, parts

    # check_vma=False leaves gradients local without a cast in the user's code.
    params, opt_state, parts = jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=(same, specs, returned.Parts.specs(axes)),
      check_vma=False,
    )(*placement.on_mesh(arguments, mesh, in_specs))
    return params, opt_state, layouts[-1].whole(parts)

  return mapped


def _check_batch(batch: tuple[Any, ...], devices: int) -> None:
  for position, argument in enumerate(batch):
    for leaf in jax.tree.leaves(argument):
      shape = np.shape(leaf)
      if shape and not shape[0]:
        raise ValueError(
          f"`batch` argument {position} must have at least one row for each of"
          f" {devices} devices, got shape {shape}; skip the step, for a mean"
          " over no examples is NaN."
        )
      if not shape or shape[0] % devices:
        raise ValueError(
          f"`batch` argument {position} must have a first dimension that"
          f" {devices} devices divide, got shape {shape};"
          f" {_remedy(leaf, devices)}."
        )


def _remedy(leaf: Any, devices: int) -> str:
  if np.shape(leaf):
    return "pad or trim the batch"
  if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
    return (
      f"give every device its own, `jax.random.split(key, {devices})`, and use"
      " `key[0]` in the step"
    )
  return (
    f"give every device a copy, `jnp.full({devices}, x)`, and use `x[0]` in"
    " the step (a step number is best kept in the state: `(opt_state, n)`)"
  )


def _check_accumulated(state: Any, params: Any, devices: int) -> None:
  """Refuses gradients accumulated as if by one device for all.

  `state_specs` splits them, and a device would find a part of its own.
  """
  shapes = {name: np.shape(x) for name, x in leaf_util.named_leaves(params)}
  is_own = lambda node: isinstance(node, optax.MultiStepsState)
  for node in filter(is_own, jax.tree.leaves(state, is_leaf=is_own)):
    for name, leaf in leaf_util.named_leaves(node.acc_grads):
      shape = shapes.get(name)
      if not shape or leaf.shape == (devices * shape[0], *shape[1:]):
        continue
      raise ValueError(
        "`opt_state` must hold what `optax.MultiSteps` accumulates on each of"
        f" {devices} devices, {devices} times the rows of leaf {name!r} of"
        f" shape {shape}, got shape {leaf.shape}; make the state with"
        " `zenjax.init(tx, params, mesh, axis_name)` instead of `tx.init`."
      )
