"""`all_reduce`: averages dense gradients in few bytes, in an optax chain."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._src.compress import registry
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.compress.compress_state import Residual
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.compressor import left
from zenjax._src.compress.compressor import Reduced
from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch
from zenjax._src.sync import zen_sync
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.sync_options import Options

_BY = "compress.all_reduce"


def all_reduce(
  compressor: Compressor | Plan,
  axis_name: AxisName,
  *,
  leaves: SparseSpec = None,
  others: optax.GradientTransformation | None = None,
  op: str | None = None,
  error_feedback: bool | None = None,
  dense_steps: int = 0,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Averages dense gradients over devices in few bytes.

  Use it in place of `zenjax.zen_sync` if your devices send mostly gradients of
  dense layers over slow links. Put it first in the chain: inside `shard_map`,
  `pmap` or `vmap` on *local* gradients, or in plain `jit` on gradients that you
  took with `zenjax.unreduced`. Make its state with `zenjax.init_state`, because
  each device keeps what it has to send later::

    optax.chain(
      zenjax.compress.all_reduce(zenjax.compress.LowBit(bits=8), "data"),
      optax.adamw(1e-3),
    )

  It compresses floating arrays of at least 16,384 elements, except for tables
  that `zen_sync` sends by rows. `zen_sync` synchronizes all other leaves.
  Numbers are sent with at most the digits and the range of float32.

  The result is an approximation of `lax.pmean`, bit-identical on all devices.
  With error feedback, a device adds to its gradient what it has not sent yet,
  and so does a device that adds up for others with its own errors: nothing is
  lost, and errors are made good in later steps. A NaN arrives as NaN, with most
  compressors together with its block or matrix, and leaves no trace in what is
  kept.

  Args:
    compressor: For example `zenjax.compress.LowBit(bits=8)`. Or a plan of
      `zenjax.planner.plan(.., compressors=..)`, which decides for every leaf,
      so that `leaves` and `others` must be left out.
    axis_name: The axis that devices are mapped over. With a tuple, from the
      slowest link to the fastest (`("host", "device")`), gradients are first
      added up in float32 along the last axis, and compressed along the others;
      `PowerSGD` sends its factors along all of them.
    leaves: The leaves to compress: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool` with the names that `zenjax.report` shows.
    others: Synchronizes all other leaves. By default `zen_sync(axis_name)`.
    op: `"mean"` or `"sum"`. The default is the mean, and in plain `jit` the
      sum, since the loss there is taken over the whole batch.
    error_feedback: Whether devices keep their errors and send them later, in
      float32. By default the compressor says so.
    dense_steps: The number of first steps that average whole gradients, as
      gradients change the most in the beginning.
    seed: An integer in [0, 2**32) for stochastic rounding.

  Returns:
    A transformation whose state is a `zenjax.compress.CompressState`.

  Raises:
    ValueError: An argument is out of range; the state was not made by
      `zenjax.init_state` for these gradients; or, in `update`, a gradient was
      already summed by autodiff.
    TypeError: `compressor` is something else, or a leaf that you chose is not
      an array of floating numbers.
    NameError: In `update`, no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.compress.all_reduce(
    ...   zenjax.compress.LowBit(bits=2, block=32), "data", leaves=True
    ... )
    >>> grads = jnp.array([[4.0, 1.0, 0.0, -4.0], [8.0, 1.0, 6.0, 0.0]])
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> update[0].tolist()  # 2 bits: -1, 0 or 1 times the largest magnitude
    [6.0, 0.0, 6.0, 0.0]
    >>> state.residuals["leaf"].value[:, 0].tolist()
    [[0.0, 1.0, -4.0, -4.0], [0.0, 1.0, -2.0, 0.0]]

  References:
    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014. Zheng,
    Huang and Kwok, [Communication-Efficient Distributed Blockwise Momentum SGD
    with Error-Feedback](https://arxiv.org/abs/1905.10936), NeurIPS 2019.
  """
  if isinstance(compressor, Plan):
    if leaves is not None or others is not None:
      raise ValueError(
        "`leaves` and `others` are decided by a plan. Leave them out."
      )
    rest = [x for x in compressor.leaves if not x.compressor]
    plan = dataclasses.replace(compressor, leaves=tuple(rest))
    tx: Any = zen_sync.zen_sync(axis_name, op=op, plan=plan)
    for name in sorted(
      {x.compressor for x in compressor.leaves if x.compressor}
    ):
      named = {x.name for x in compressor.leaves if x.compressor == name}
      tx = all_reduce(
        registry.named(name),
        axis_name,
        leaves=lambda name, _, named=named: name in named,
        others=tx,
        op=op,
        error_feedback=error_feedback,
        dense_steps=dense_steps,
        seed=seed,
      )
    return tx
  if not isinstance(compressor, Compressor):
    raise TypeError(
      "`compressor` must be one of `zenjax.compress`, such as"
      f" `zenjax.compress.LowBit(bits=8)`, got {compressor!r}."
    )
  if isinstance(dense_steps, bool) or not isinstance(dense_steps, int):
    raise TypeError(f"`dense_steps` must be an integer, got {dense_steps!r}.")
  if not isinstance(error_feedback, bool | None):
    raise TypeError(f"`error_feedback` must be a bool, got {error_feedback!r}.")
  if dense_steps < 0:
    raise ValueError(f"`dense_steps` must not be negative, got {dense_steps}.")
  feedback = (
    compressor.error_feedback if error_feedback is None else error_feedback
  )
  if not compressor.approximates and (feedback or dense_steps):
    name = "error_feedback" if feedback else "dense_steps"
    raise ValueError(
      f"`{name}` must be left out with {compressor}, whose results do not"
      " approximate gradients."
    )
  options = sync_options.check(axis_name, sparse=leaves, op=op)
  settings = _Settings(
    compressor=compressor,
    options=options,
    error_feedback=feedback,
    dense_steps=dense_steps,
    seed=arguments.hash_seed(seed, "seed"),
  )
  if others is None:
    others = zen_sync.zen_sync(axis_name, op=op)
  return _transformation(settings, optax.with_extra_args_support(others))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
  """Checked arguments of `all_reduce`."""

  compressor: Compressor
  options: Options
  error_feedback: bool
  dense_steps: int
  seed: int


def _transformation(
  settings: _Settings, others: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
  options = settings.options

  def init_fn(params: optax.Params) -> Any:
    if settings.error_feedback:
      collectives.size_in_init(options.axes, _BY)
    mine, rest = _split(params, options)
    chosen = [True for _ in jax.tree.leaves(mine)]
    leaf_util.warn_of_none(params, options.sparse, chosen, "leaves")
    return _fresh(mine, settings, others.init(rest))

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, CompressState]:
    mine, rest = _split(updates, options)
    own, other = state._replace(others=()), state.others
    around = collectives.mesh_around(options.axes, updates, None)
    if around is None:
      summed, new = _summed(mine, own, settings, options.mean)
    else:
      whole_batch.refuse_mean(options)
      update = lambda tree, state: _summed(tree, state, settings, False)
      summed, new = whole_batch.select(
        update, mine, own, around, options.axes, by=_BY, sums=True
      )
    # In plain `jit`, XLA may have summed all others.
    if around is None or whole_batch.has_parts(rest):
      if len(options.axes) > 1:
        # Collectives over different groups of devices run in one order.
        rest, _ = lax.optimization_barrier((rest, summed))
      inner = None if params is None else _split(params, options)[1]
      rest, other = others.update(rest, other, inner, **extra_args)
    return _joined(summed, rest), new._replace(others=other)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _split(tree: Any, options: Options) -> tuple[Any, Any]:
  """Returns the leaves to compress, and all others, as trees with gaps."""
  chosen = leaf_util.select(tree, options.sparse, "element", "leaves")
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
  if options.sparse is None:
    tables = leaf_util.select(tree, None, "row")
    chosen = [
      wanted and not table and not is_rows(leaf)
      for wanted, table, leaf in zip(chosen, tables, leaves)
    ]
  for (name, leaf), wanted in zip(
    leaf_util.named_leaves(tree, is_rows), chosen
  ):
    if wanted and is_rows(leaf):
      raise TypeError(
        f"`leaves` chose leaf {name!r}, which is SparseRows. Leave it out, and"
        " `zen_sync` sends its rows."
      )
  part = lambda mine: structure.unflatten(
    [
      leaf if wanted == mine else optax.MaskedNode()
      for leaf, wanted in zip(leaves, chosen)
    ]
  )
  return part(True), part(False)


def _joined(mine: Any, rest: Any) -> Any:
  """Inverse of `_split`."""
  is_gap = lambda x: isinstance(x, optax.MaskedNode) or is_rows(x)
  return jax.tree.map(
    lambda a, b: b if isinstance(a, optax.MaskedNode) else a,
    mine,
    rest,
    is_leaf=is_gap,
  )


def _fresh(tree: Any, settings: _Settings, others: Any) -> CompressState:
  """Returns the state of a device before the first step."""
  named = leaf_util.named_leaves(tree)
  nothing = lambda x: gradient_tree.as_varying(
    jnp.zeros((1, *x.shape), jnp.float32), settings.options.axes
  )
  return CompressState(
    step=jnp.zeros((), jnp.int32),
    residuals={
      name: Residual(nothing(leaf))
      for name, leaf in named
      if settings.error_feedback
    },
    memory={
      name: settings.compressor.init(leaf.shape, number)
      for number, (name, leaf) in enumerate(named)
    },
    mean=jnp.full((), settings.options.mean),
    wire_bytes=jnp.zeros((), jnp.float32),
    dense_bytes=jnp.zeros((), jnp.float32),
    others=others,
  )


def _facts(state: CompressState) -> dict[str, str]:
  """Describes what a state must have in common with a fresh one."""
  facts = {f"leaf {name!r}": "compressed" for name in state.memory}
  for path, x in jax.tree_util.tree_leaves_with_path(
    (state.residuals, state.memory)
  ):
    facts[jax.tree_util.keystr(path)] = str(x.shape)
  return facts


def _summed(
  tree: Any, state: CompressState, settings: _Settings, mean: bool
) -> tuple[Any, CompressState]:
  """Sums the leaves of one device with those of all others."""
  options, compressor = settings.options, settings.compressor
  context = dataclasses.replace(gradient_tree.context_of(options), mean=mean)
  named = gradient_tree.local_leaves(tree, context)
  got = _facts(state)
  needed = _facts(jax.eval_shape(lambda: _fresh(tree, settings, ())))
  device_state.require_made_for(_BY, context.devices, got, needed)
  names = [name for name, _ in named]
  given = [leaf.astype(jnp.float32) for _, leaf in named]
  waiting = []
  # A state may have other dtypes, as where everything is in float64.
  if settings.error_feedback:
    waiting = [state.residuals[name].value[0] for name in names]
    given = [x + y.astype(jnp.float32) for x, y in zip(given, waiting)]
  kept_memory = [state.memory[name] for name in names]
  memory = jax.tree.map(_narrow, kept_memory)
  key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
  key = jax.random.fold_in(key, lax.axis_index(context.axes))
  dense = state.step < settings.dense_steps
  with jax.named_scope("zenjax/compress"):
    compressed = lambda: compressor.reduce(given, memory, key, context)
    if not named:
      out = Reduced([], [], [])
    elif settings.dense_steps:
      whole = lambda: Reduced(
        [dense_sum.all_reduce(x, context) for x in given],
        [jnp.zeros_like(x) for x in given],
        memory,
      )
      out = lax.cond(dense, whole, compressed)
    else:
      out = compressed()
  wire_bytes, dense_bytes = _bytes(
    [leaf for _, leaf in named], compressor, context
  )
  like = lambda x, y: x.astype(y.dtype)
  sums = [like(x, leaf) for x, (_, leaf) in zip(out.sums, named)]
  new = state._replace(
    step=processes.compared(
      state.step + 1, f"{_BY} by {compressor}", options, tree
    ),
    memory=dict(zip(names, jax.tree.map(like, out.memory, kept_memory))),
    mean=jnp.full((), mean),
    wire_bytes=jnp.where(dense, dense_bytes, wire_bytes),
    dense_bytes=dense_bytes,
  )
  if settings.error_feedback:
    # What 16-bit leaves cannot hold waits as well, the same on each device.
    share = jnp.float32(1 if mean else 1 / context.devices)
    kept = [
      x if y.dtype == jnp.float32 else x + left(z, like(y, z)) * share
      for x, y, z in zip(out.kept, sums, out.sums)
    ]
    kept = [Residual(like(x[None], y)) for x, y in zip(kept, waiting)]
    new = new._replace(residuals=dict(zip(names, kept)))
  return jax.tree.structure(tree).unflatten(sums), new


def _narrow(x: jax.Array) -> jax.Array:
  """Casts float64 to float32."""
  return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def _bytes(
  leaves: Sequence[Any], compressor: Compressor, context: Context
) -> tuple[jax.Array, jax.Array]:
  """Returns the bytes that a device receives, and those of an all-reduce."""
  messages = compressor.messages([x.shape for x in leaves], context)
  wide = [x.size * collectives.accumulator(x.dtype).itemsize for x in leaves]
  dense = Message("all_reduce", context.axes, sum(wide) / 4)
  return (
    jnp.float32(received_bytes(messages, context)),
    jnp.float32(received_bytes([dense], context)),
  )
