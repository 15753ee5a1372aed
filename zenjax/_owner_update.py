"""`owner_update`: owners of rows update them, and hold the state alone."""

from typing import Any

import optax

from zenjax import _options
from zenjax._arguments import Capacities
from zenjax._arguments import Partition
from zenjax._arguments import SparseSpec
from zenjax._owners import Owners


def owner_update(
  tx: optax.GradientTransformation,
  axis_name: str,
  *,
  sparse: SparseSpec = None,
  op: str = "mean",
  partition: Partition = "auto",
  wire_dtype: Any = None,
  capacities: Capacities = None,
  hash_seed: int = 0,
  ids_first: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Synchronizes gradients and runs `tx` at the owner of each row.

  In the place of `chain(zen_sync(axis_name), lazy_rows(tx))`. There every
  device gets all sums and updates all of them, with a state of its own of every
  table. Here the owner of a row, who sums its gradients, also updates it, and
  sends the update back in the place of the sum: as many bytes, an n-th of the
  optimizer's work and of its memory on each of `n` devices, as in ZeRO. Losses
  are the same. Leaves that do not travel sparse take `pmean` and `tx` on every
  device. A zen_sync of the same axis before it would be a second: `zenjax.init`
  refuses that.

  The state differs between devices: make it with `zenjax.init`, and place it by
  `zenjax.state_specs`. It says for which owners it was made, and a step refuses
  it where rows have others; `zenjax.reshard` moves it to another number of
  devices, and to the form to save, in the order of rows. Rows that no device
  touched keep state and parameters, as in `lazy_rows`.

  Args:
    tx: What updates a row by that row's gradient, state and parameters, and
      by values of all gradients, as for `lazy_rows`. For such values, a norm
      say, owners reduce the rows of every push before the first is updated, and
      exchange the results: one small collective for each norm that needs
      another, and pushes of a further round are sent once more.
    axis_name: One axis that devices are mapped over.
    sparse: As for `zen_sync`, like all that follow.
    op: See there.
    partition: See there. What is no business of single elements, as
      `row_adagrad`, needs whole rows: then `"auto"` is `"hash"`.
    wire_dtype: See there; updates are cast too.
    capacities: See there.
    hash_seed: See there.
    ids_first: See there.

  Returns:
    A transformation from local gradients, arrays or SparseRows, to updates that
    are equal on all devices, for `zenjax.apply_updates`.

  Raises:
    ValueError: An argument is out of range; `axis_name` is more than one axis;
      `tx` updates rows by others (see `lazy_rows`), accumulates gradients
      (`optax.MultiSteps`), needs whole rows with a `partition` by columns or
      of a leaf that has not two dimensions; the state was not made by
      `zenjax.init`, or for other owners.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> adagrad = optax.adagrad(1.0, initial_accumulator_value=0.0)
    >>> tx = zenjax.owner_update(adagrad, "data", sparse=True)
    >>> table = jnp.zeros((1000, 8))
    >>> state = zenjax.init(tx, table, mesh, "data")
    >>> squares = state.inner[0].sum_of_squares.part
    >>> squares.addressable_shards[0].data.size, table.size  # half, padded
    (4096, 8000)
    >>> def step(table, state, ids):
    ...   loss, grads = zenjax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, state = tx.update(grads, state, table)
    ...   return zenjax.apply_updates(table, updates), state, loss
    >>> step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    >>> table, state, _ = step(table, state, jnp.array([3, 3, 5, 9]))
    >>> table[jnp.array([3, 4, 5]), 0].round(3).tolist()
    [-1.0, 0.0, -1.0]

  References:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020, stage 1.
  """
  options = _options.check(
    axis_name,
    **_options.DEFAULTS
    | dict(
      sparse=sparse,
      op=op,
      partition=partition,
      wire_dtype=wire_dtype,
      capacities=capacities,
      hash_seed=hash_seed,
      ids_first=ids_first,
    ),
  )
  if len(options.axes) > 1:
    raise ValueError(
      f"`axis_name` must be one axis for owner_update, got {axis_name!r}; give"
      " the axis of the fastest links, and average over the others before, or"
      " use `zen_sync` and `lazy_rows`."
    )
  owners = Owners(optax.with_extra_args_support(tx), options)
  return optax.GradientTransformationExtraArgs(owners.init, owners.update)
