"""`all_reduce`: averages dense gradients in few bytes, in an optax chain."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from zenjax._src.compress import registry
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.compress.compress_state import Residual
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.compressor import in_dtype
from zenjax._src.compress.compressor import Leaves
from zenjax._src.compress.compressor import Reduced
from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import received_bytes
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import plans
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
  momentum: float | None = None,
  nesterov: bool = False,
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
  With error feedback, each device keeps what it could not send, and adds it to
  its next gradient. A device that adds up for others keeps the rounding errors
  of its sums in the same way. So everything arrives, some of it in later steps.

  A NaN arrives as NaN: if a compressor has blocks with scales, in its whole
  block, with `PowerSGD` in the whole matrix, and with `RandomK` in the place of
  some other number. It leaves no trace in what is kept. A sparsifier may send
  it some steps later.

  Args:
    compressor: For example `zenjax.compress.LowBit(bits=8)`. Or a plan of
      `zenjax.planner.plan(.., allow=..)`, which decides for every leaf,
      so that `leaves` and `others` must be left out.
    axis_name: The axis that devices are mapped over. With a tuple, from the
      slowest link to the fastest (`("host", "device")`), gradients are first
      added up in float32 along the last axis, and compressed along the others;
      `PowerSGD` sends its factors along all of them.
    leaves: The leaves to compress: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool`, with names such as `"layers.0.kernel"`.
    others: Synchronizes all other leaves. By default `zen_sync(axis_name)`,
      followed by the same momentum.
    op: `"mean"` or `"sum"`. The default is the mean, and in plain `jit` the
      sum, since the loss there is taken over the whole batch.
    error_feedback: Whether devices keep their errors and send them later, in
      float32. By default the compressor says so.
    momentum: The factor of a momentum that each device applies before the
      compressor, in [0, 1), as in Deep Gradient Compression. Where a sparsifier
      has sent a number, its momentum starts again. All other arrays get the
      same momentum, so follow it with a plain `optax.sgd`. Compare losses with
      `optax.sgd(.., momentum=..)` behind `all_reduce`, which may learn more.
    nesterov: Whether to use Nesterov momentum.
    dense_steps: The number of first steps that average whole gradients, as
      gradients change the most in the beginning.
    seed: An integer in [0, 2**32) for stochastic rounding and `RandomK`.

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
  _check(error_feedback, momentum, nesterov, dense_steps)
  seed = arguments.hash_seed(seed, "seed")
  if isinstance(compressor, Plan):
    if leaves is not None or others is not None:
      raise ValueError(
        "`leaves` and `others` are decided by a plan. Leave them out."
      )
    rest = [x for x in compressor.leaves if not x.compressor]
    plan = dataclasses.replace(compressor, leaves=tuple(rest))
    sync = zen_sync.zen_sync(axis_name, op=op, plan=plan)
    tx: Any = _rest(sync, axis_name, momentum, nesterov)
    exchange_of = {
      x.name: (x.group, x.compressor) for x in compressor.leaves if x.compressor
    }
    # The outermost transformation sums first.
    exchanges = enumerate(sorted({*exchange_of.values()}))
    for number, exchange in reversed([*exchanges]):
      tx = all_reduce(
        registry.named(exchange[1]),
        axis_name,
        leaves=lambda name, _, own=exchange: exchange_of.get(name) == own,
        others=tx,
        op=op,
        error_feedback=error_feedback,
        momentum=momentum,
        nesterov=nesterov,
        dense_steps=dense_steps,
        # Equal leaves of two exchanges must not be rounded alike.
        seed=(seed + number) % 2**32,
      )
    return _checked(tx, compressor, arguments.axes(axis_name))
  if not isinstance(compressor, Compressor):
    raise TypeError(
      "`compressor` must be one of `zenjax.compress`, such as"
      f" `zenjax.compress.LowBit(bits=8)`, got {compressor!r:.60}."
    )
  if error_feedback is None:
    error_feedback = compressor.error_feedback
  if not compressor.approximates and (error_feedback or dense_steps):
    name = "error_feedback" if error_feedback else "dense_steps"
    raise ValueError(
      f"`{name}` must be left out with {compressor}, whose results do not"
      " approximate gradients."
    )
  settings = _Settings(
    compressor=compressor,
    options=sync_options.check(axis_name, sparse=leaves, op=op),
    error_feedback=error_feedback,
    momentum=momentum,
    nesterov=nesterov,
    dense_steps=dense_steps,
    seed=seed,
  )
  if others is None:
    sync = zen_sync.zen_sync(axis_name, op=op)
    others = _rest(sync, axis_name, momentum, nesterov)
  return _transformation(settings, optax.with_extra_args_support(others))


def _check(
  error_feedback: Any, momentum: Any, nesterov: bool, dense_steps: Any
) -> None:
  """Raises an error for options of `all_reduce` that are out of range."""
  if isinstance(dense_steps, bool) or not isinstance(dense_steps, int):
    raise TypeError(f"`dense_steps` must be an integer, got {dense_steps!r}.")
  if not isinstance(error_feedback, bool | None):
    raise TypeError(f"`error_feedback` must be a bool, got {error_feedback!r}.")
  if dense_steps < 0:
    raise ValueError(f"`dense_steps` must not be negative, got {dense_steps}.")
  if momentum is None and nesterov:
    raise ValueError("`nesterov` needs a `momentum`. Give momentum=0.9 too.")
  if momentum is not None and (
    not 0 <= arguments.number("momentum", momentum) < 1
  ):
    raise ValueError(
      f"`momentum` must be in [0, 1), got {momentum!r}. Give 0.9 or None."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
  """Checked arguments of `all_reduce`."""

  compressor: Compressor
  options: Options
  error_feedback: bool
  momentum: float | None
  nesterov: bool
  dense_steps: int
  seed: int

  @property
  def differs(self) -> bool:
    """Whether the state depends on the number of devices."""
    kept = self.error_feedback or self.momentum is not None
    return kept or self.compressor.selects


def _transformation(
  settings: _Settings, others: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
  options = settings.options

  def init_fn(params: optax.Params) -> Any:
    if settings.differs:
      collectives.size_in_init(options.axes, _BY)
    mine, rest = _split(params, options)
    chosen = [True for _ in jax.tree.leaves(mine)]
    leaf_util.warn_of_none(params, options.sparse, chosen, "leaves")
    return _fresh(mine, settings, others.init(rest))

  def update_fn(
    updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[optax.Updates, CompressState]:
    if not isinstance(state, CompressState):
      raise TypeError(
        f"`state` of {_BY} must be a CompressState, got {type(state).__name__}."
        " Make it with `zenjax.init_state(tx, params, mesh, axis_name)`."
      )
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
    if len(options.axes) > 1:
      # Collectives over different groups of devices run in one order. Each leaf
      # waits by itself, so that the next exchange needs no other gradients.
      after = lambda x: lax.optimization_barrier((x, summed))[0]
      rest = jax.tree.map(after, rest)
    inner = None if params is None else _split(params, options)[1]
    rest, other = others.update(rest, other, inner, **extra_args)
    return _joined(summed, rest), new._replace(others=other)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _checked(
  tx: optax.GradientTransformationExtraArgs, plan: Plan, axes: Axes
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx`, and refuses what the plan was not made for."""

  def require(tree: Any) -> None:
    leaves = leaf_util.named_leaves(tree, is_rows)
    plans.require_tree(plan, leaf_util.shapes(leaves))

  def init_fn(params: optax.Params) -> Any:
    require(params)
    return tx.init(params)

  def update_fn(
    updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    require(updates)
    mesh = collectives.mesh_around(axes, updates, None)
    try:
      sizes = [mesh.shape[a] if mesh else lax.axis_size(a) for a in axes]
    except NameError:  # `tx` says what to do.
      return tx.update(updates, state, params, **extra_args)
    plans.require_mesh(plan, tuple(zip(axes, sizes)))
    return tx.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _rest(
  sync: optax.GradientTransformationExtraArgs,
  axis_name: AxisName,
  momentum: float | None,
  nesterov: bool,
) -> optax.GradientTransformationExtraArgs:
  """Returns what averages all other leaves, with the same momentum."""
  axes = arguments.axes(axis_name)

  def update_fn(
    updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    for name, leaf in leaf_util.named_leaves(updates, is_rows):
      if is_rows(leaf) and momentum is not None:
        raise TypeError(
          f"`momentum` of {_BY} is for arrays, but leaf {name!r} is SparseRows."
          " Take all gradients with `jax.value_and_grad`, or give that table an"
          " optimizer of its own by `optax.partition`."
        )
    around = collectives.mesh_around(axes, updates, None)
    if around is None or whole_batch.has_parts(updates):
      return sync.update(updates, state, params, **extra_args)
    return updates, state  # In plain `jit`, XLA has summed all of them.

  tx = optax.GradientTransformationExtraArgs(sync.init, update_fn)
  if momentum is None:
    return tx
  return optax.chain(tx, optax.trace(momentum, nesterov))


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
        " `zen_sync` sends its rows. With `momentum`, take gradients with"
        " `jax.value_and_grad`."
      )
  both = list(zip(leaves, chosen))
  gap = optax.MaskedNode()
  return (
    structure.unflatten([leaf if wanted else gap for leaf, wanted in both]),
    structure.unflatten([gap if wanted else leaf for leaf, wanted in both]),
  )


def _joined(mine: Any, rest: Any) -> Any:
  """Inverse of `_split`."""
  is_gap = lambda x: isinstance(x, optax.MaskedNode)
  either = lambda a, b: b if is_gap(a) else a
  return jax.tree.map(either, mine, rest, is_leaf=is_gap)


def _fresh(tree: Any, settings: _Settings, others: Any) -> CompressState:
  """Returns the state of a device before the first step."""
  options, compressor = settings.options, settings.compressor
  shapes = {name: x.shape for name, x in leaf_util.named_leaves(tree)}
  context = Context(axes=options.axes, sizes=(1,), mean=options.mean)
  if settings.differs:
    context = gradient_tree.context_of(options)

  def nothing() -> dict[str, Residual]:
    zeros = {k: jnp.zeros((1, *x), jnp.float32) for k, x in shapes.items()}
    zeros = gradient_tree.as_varying(zeros, options.axes)
    return {k: Residual(x) for k, x in zeros.items()}

  number = jnp.zeros((), jnp.float32)
  return CompressState(
    step=jnp.zeros((), jnp.int32),
    residuals=nothing() if settings.error_feedback else {},
    momenta={} if settings.momentum is None else nothing(),
    memory=compressor.init(shapes, context) if shapes else (),
    mean=jnp.full((), options.mean),
    leaves={
      name: jnp.full((), math.prod(shape), jnp.int32)
      for name, shape in shapes.items()
    },
    wire_bytes=number,
    dense_bytes=number,
    stats={name: number for name in compressor.stats},
    others=others,
  )


def _facts(state: CompressState) -> dict[str, str]:
  """Describes what a state must have in common with a fresh one."""
  facts = {f"leaf {name!r}": "compressed" for name in state.leaves}
  facts |= {f"statistic {name!r}": "counted" for name in state.stats}
  for path, x in jax.tree_util.tree_leaves_with_path(
    (state.residuals, state.momenta, state.memory)
  ):
    facts[jax.tree_util.keystr(path)] = str(x.shape)
  return facts


def _summed(
  tree: Any, state: CompressState, settings: _Settings, mean: bool
) -> tuple[Any, CompressState]:
  """Sums leaves over devices."""
  options, compressor = settings.options, settings.compressor
  context = dataclasses.replace(gradient_tree.context_of(options), mean=mean)
  leaves = dict(gradient_tree.local_leaves(tree, context))
  got = _facts(state)
  needed = _facts(jax.eval_shape(lambda: _fresh(tree, settings, ())))
  device_state.require_made_for(_BY, context.devices, got, needed)
  by = f"{_BY} by {compressor}, seed {settings.seed}"
  step = processes.compared(state.step + 1, by, options, tree)
  if not leaves:
    return tree, state._replace(step=step, mean=jnp.full((), mean))
  # A per-device step averages residuals, and a step in plain `jit` sums them. A
  # state that comes from the other kind must add the same to the parameters.
  rescaling = jnp.float32(context.devices if mean else 1 / context.devices)
  scale = jnp.where(state.mean == mean, jnp.float32(1), rescaling)
  # A state may have other dtypes, as where everything is in float64.
  own = lambda kept: {
    name: x.value[0].astype(jnp.float32) * scale for name, x in kept.items()
  }
  given = {name: x.astype(jnp.float32) for name, x in leaves.items()}
  momenta, given = _with_momentum(given, own(state.momenta), settings)
  for name, waiting in own(state.residuals).items():
    given[name] += waiting
  narrow = lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x
  memory = jax.tree.map(narrow, state.memory)
  key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
  dense = state.step < settings.dense_steps
  with jax.named_scope("zenjax/compress"):
    if settings.dense_steps:
      out = lax.cond(
        dense,
        lambda: _typed(_whole(given, memory, compressor, context), options),
        lambda: _typed(compressor.reduce(given, memory, key, context), options),
      )
    else:
      out = compressor.reduce(given, memory, key, context)
  wire_bytes, dense_bytes = _bytes([*leaves.values()], compressor, context)
  if out.sent:
    momenta = {k: jnp.where(out.sent[k], 0, x) for k, x in momenta.items()}
  sums, kept = [], dict(out.kept)
  # What 16-bit leaves cannot hold waits as well, the same on each device.
  share = jnp.float32(1 if mean else 1 / context.devices)
  for name, x in leaves.items():
    total, rest = in_dtype(out.sums[name], x.dtype)
    sums.append(total)
    if x.dtype != jnp.float32:
      kept[name] += rest * share
  like = lambda x, y: x.astype(y.dtype)
  stored = lambda new, old: {
    name: Residual(like(new[name][None], x.value)) for name, x in old.items()
  }
  new = state._replace(
    step=step,
    residuals=stored(kept, state.residuals),
    momenta=stored(momenta, state.momenta),
    memory=jax.tree.map(like, out.memory, state.memory),
    mean=jnp.full((), mean),
    wire_bytes=jnp.where(dense, dense_bytes, wire_bytes + out.more_bytes),
    dense_bytes=dense_bytes,
    stats=dict(zip(compressor.stats, out.stats)),
  )
  return jax.tree.structure(tree).unflatten(sums), new


def _whole(
  given: Leaves, memory: Any, compressor: Compressor, context: Context
) -> Reduced:
  """Averages whole leaves, as in the first steps."""
  nothing = {name: jnp.zeros(x.shape, bool) for name, x in given.items()}
  return Reduced(
    sums={k: dense_sum.all_reduce(x, context) for k, x in given.items()},
    kept={k: jnp.zeros_like(x) for k, x in given.items()},
    memory=memory,
    sent=nothing if compressor.selects else None,
    stats=(0.0,) * len(compressor.stats),
  )


def _typed(out: Reduced, options: Options) -> Reduced:
  """Returns a result in the types that all results have."""
  number = lambda x: jnp.asarray(x, jnp.float32)
  return out._replace(
    kept=gradient_tree.as_varying(out.kept, options.axes),
    sent=gradient_tree.as_varying(out.sent, options.axes),
    stats=tuple(map(number, out.stats)),
    more_bytes=number(out.more_bytes),
  )


def _with_momentum(
  gradients: Leaves, momenta: Leaves, settings: _Settings
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Returns new momenta, and what to send in place of gradients."""
  if settings.momentum is None:
    return {}, dict(gradients)
  factor = jnp.float32(settings.momentum)
  new, sent = {}, {}
  for name, x in gradients.items():
    if settings.nesterov:
      new[name] = factor * (momenta[name] + x)
      sent[name] = new[name] + x
    else:
      new[name] = sent[name] = factor * momenta[name] + x
    # NaN and Inf are sent, and would never leave the momentum.
    finite = lax.is_finite(new[name])
    new[name] = jnp.where(finite, new[name], jnp.zeros_like(x))
  return new, sent


def _bytes(
  leaves: Sequence[Any], compressor: Compressor, context: Context
) -> tuple[jax.Array, jax.Array]:
  """Returns the bytes that a device receives, here and in an all-reduce."""
  messages = compressor.messages([x.shape for x in leaves], context)
  wide = [x.size * collectives.accumulator(x.dtype).itemsize for x in leaves]
  dense = Message("all_reduce", context.axes, sum(wide) / 4)
  received = lambda messages: jnp.float32(received_bytes(messages, context))
  return received(messages), received([dense])
