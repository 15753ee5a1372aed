"""Optimizers of optax on rows, beside the same on arrays of these rows.

Each takes six steps at three sizes of gradients, one of which holds a NaN and
one an Inf. A step on arrays is taken back in rows without a gradient: that is
what `lazy_rows` and `sharded_optimizer` promise of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_table
from optax_table import EXTRA
from optax_table import OPTAX
from optax_table import SHAPES
from optax_table import TABLES
import pytest
from usual import usual

import zenjax
from zenjax import SparseRows

pytestmark = [
  pytest.mark.usefixtures("as_optax_computes"),
  pytest.mark.filterwarnings("ignore:weight decay"),
  # Optax's own.
  pytest.mark.filterwarnings("ignore:.*deprecated"),
  pytest.mark.filterwarnings("ignore:Specifying a key"),
]

SCALES = (1e-4, 1.0, 1e4)
STEPS = 6
ROOM = {"a": 40, "b": 6}
DEVICES = 3
THEN = {
  "alone": lambda tx: tx,
  "sgd": lambda tx: optax.chain(tx, optax.sgd(0.1, momentum=0.9)),
  "adam": lambda tx: optax.chain(tx, optax.adam(0.1)),
}


def test_the_table_holds_all_that_optax_has():
  left = set(optax_table.PUBLIC) - set(OPTAX) - set(optax_table.LEFT_OUT)
  assert not left


def gradients(scale):
  """Of some steps: ids and values of tables, arrays of all else."""
  rng = np.random.default_rng(0)
  kind = jnp.zeros(()).dtype
  normal = lambda *shape: (scale * rng.standard_normal(shape)).astype(kind)
  for step in range(STEPS):
    rows = {}
    for table, room in ROOM.items():
      count = room if step == 1 else rng.integers(1, room)
      ids = np.full(room, SHAPES[table][0], np.int32)
      ids[:count] = rng.choice(SHAPES[table][0], count, replace=False)
      values = normal(room, SHAPES[table][1])
      values[count:] = 0
      rows[table] = ids, values
    if step == 2:
      rows["a"][1][0, 1] = np.nan
    if step == 4:
      rows["b"][1][0, 2] = np.inf
    dense = {k: normal(*SHAPES[k]) for k in SHAPES if k not in TABLES}
    yield rows, dense


def as_rows(rows, dense):
  return dense | {
    t: SparseRows(rows[t][0], rows[t][1], SHAPES[t][0]).as_unique()
    for t in TABLES
  }


def as_arrays(rows, dense):
  return dense | {
    t: SparseRows(rows[t][0], rows[t][1], SHAPES[t][0]).to_dense()
    for t in TABLES
  }


def taken_back(new, old, rows):
  """`new` where rows have a gradient, and where there are none."""
  hit = {}
  for table in TABLES:
    number = SHAPES[table][0]
    at = jnp.zeros(number, bool)
    hit[number] = at.at[rows[table][0]].set(True, mode="drop")

  def one(n, o):
    if jnp.ndim(n) and jnp.shape(n)[0] in hit:
      at = hit[jnp.shape(n)[0]].reshape(-1, *[1] * (jnp.ndim(n) - 1))
      return jnp.where(at, n, o)
    return n

  return jax.tree.map(one, new, old)


def dense_step(tx, extra, params, state, rows, dense):
  updates, new = tx.update(as_arrays(rows, dense), state, params, **extra)
  after = optax.apply_updates(params, updates)
  return taken_back((after, new), (params, state), rows)


def lazy_step(tx, extra, params, state, rows, dense):
  updates, state = tx.update(as_rows(rows, dense), state, params, **extra)
  return zenjax.apply_updates(params, updates), state


def extra_of(name):
  return {key: jnp.float32(1.5) for key in EXTRA.get(name, ())}


def refused(make, name):
  """Whether a state cannot be made; says whether the error is as promised."""
  try:
    make()
  except ValueError as error:
    message = str(error)
    wanted = {
      "must update a row by that row alone": "`optax.partition`",
      "must update rows without sums over all": "`clip_norm=`",
      "must not be `optax.": "inside the loss",
    }
    assert any(
      words in message and remedy in message for words, remedy in wanted.items()
    ), message
    return True
  return False


def wants_more(tx, params, rows, dense):
  """What optax itself cannot run so: no step of rows runs either."""
  with pytest.raises(ValueError, match="cannot be traced with these arguments"):
    tx.update(as_rows(rows, dense), tx.init(params), params)
  return "wants more"


def compare(got, want, scale, name):
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
    finite = np.abs(w[np.isfinite(w)])
    size = finite.max(initial=0.0)
    np.testing.assert_allclose(
      g, w, rtol=2e-4, atol=2e-6 * size + 1e-30, err_msg=f"{name} at {scale}"
    )


def precise(run):
  """In a chain in float64: Adam makes rounding of what is almost zero large."""

  @functools.wraps(run)
  def wrapped(name, then):
    with jax.enable_x64(then != "alone"):
      return run(name, then)

  return wrapped


@precise
def run_lazy(name, then):
  """Says "refused" or "right"; anything else fails."""
  make = lambda: THEN[then](OPTAX[name]())
  extra, params = extra_of(name), optax_table.parameters()
  try:
    inner = optax.with_extra_args_support(make())
    state = inner.init(params)
  except (AttributeError, TypeError, ValueError) as error:
    with pytest.raises(type(error)):
      zenjax.lazy_rows(make()).init(params)
    return "refused"
  if refused(lambda: zenjax.lazy_rows(make()).init(params), name):
    return "refused"
  tx = zenjax.lazy_rows(make())
  dense = jax.jit(functools.partial(dense_step, inner, extra))
  sparse = jax.jit(functools.partial(lazy_step, tx, extra))
  for scale in SCALES:
    got = want = params, state
    for grads in gradients(scale):
      try:
        want = dense(*want, *grads)
      except (AttributeError, TypeError, ValueError):
        return wants_more(tx, params, *grads)
      # An optimizer that takes arguments is analysed in its first step.
      first = functools.partial(jax.eval_shape, sparse, *got, *grads)
      if extra and refused(first, name):
        return "refused"
      got = sparse(*got, *grads)
      compare(got, want, scale, f"{name} {then}")
  return "right"


def split(rows, dense):
  """Gradients of devices whose sums these are."""
  rng = np.random.default_rng(1)
  parts: list[Any] = []
  left = {t: rng.integers(0, DEVICES, len(ids)) for t, (ids, _) in rows.items()}
  for device in range(DEVICES):
    mine: dict[str, Any] = {k: x / DEVICES for k, x in dense.items()}
    for table, (ids, values) in rows.items():
      here = left[table] == device
      own = np.where(here, ids, SHAPES[table][0]).astype(np.int32)
      own_values = np.where(here[:, None], values, 0)
      mine[table] = SparseRows(own, own_values, SHAPES[table][0])
    parts.append(mine)
  return jax.tree.map(lambda *x: jnp.stack(x), *parts)


# Of each kind one: all others by `-m more`.
_OWNED = (
  "adam",
  "apply_if_finite",
  "named_chain",
  "novograd",
  "lamb",
  "multi_transform",
  "schedule_free",
)


@precise
def run_owners(name, then):
  """As `run_lazy`, of devices that own rows; for some in rounds of a few."""
  make = lambda: THEN[then](OPTAX[name]())
  extra, params = extra_of(name), optax_table.parameters()
  tx = zenjax.sharded_optimizer(
    make(),
    "data",
    op="sum",
    sparse={k: k in TABLES for k in SHAPES},
    capacities=(3, 5) if name in _OWNED else (64, 64),
  )
  mapped = functools.partial(
    jax.vmap, axis_name="data", axis_size=DEVICES, in_axes=None
  )
  try:
    inner = optax.with_extra_args_support(make())
    dense_state = inner.init(params)
    jax.eval_shape(lambda: inner.update(params, dense_state, params, **extra))
  except (AttributeError, TypeError, ValueError):
    with pytest.raises((AttributeError, TypeError, ValueError)):
      jax.eval_shape(mapped(tx.init), params)
    return "wants more"
  if extra or refused(lambda: jax.eval_shape(mapped(tx.init), params), name):
    return "refused"
  state = jax.jit(mapped(tx.init))(params)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  sparse = jax.jit(jax.vmap(step, axis_name="data"))
  dense = jax.jit(functools.partial(dense_step, inner, extra))
  for scale in SCALES:
    want = params, dense_state
    every = lambda x: jnp.stack([x] * DEVICES)
    got = jax.tree.map(every, params), state
    for grads in gradients(scale):
      got = sparse(*got, split(*grads))
      want = dense(*want, *grads)
      on_host = jax.tree.map(np.asarray, got[0])
      for device in range(DEVICES):
        mine = jax.tree.map(lambda x, d=device: x[d], on_host)
        compare(mine, want[0], scale, f"{name} {then} owner {device}")
      whole = [x for x in jax.tree.leaves(want[1]) if not jnp.ndim(x)]
      mine = [x[0] for x in jax.tree.leaves(got[1].inner) if jnp.ndim(x) == 1]
      compare(mine, whole, scale, f"{name} {then} state")
  return "right"


@pytest.mark.parametrize(
  "name", usual(_OWNED, "adam", "lamb", "multi_transform")
)
def test_sharded_optimizer(name):
  run_owners(name, "alone")


USUAL = (
  "adam", "sgd", "adagrad", "apply_if_finite", "inject_hyperparams",
  "clip_by_block_rms", "clip_by_global_norm", "adaptive_grad_clip",
  "partition", "masked", "chain", "lamb", "adafactor", "schedule_free",
  "apply_every", "zero_nans", "novograd", "fromage", "add_noise",
  "normalize", "muon", "lars", "rowwise_adagrad",
)  # fmt: skip


# Those of them that sum nothing, or a norm, over rows.
RIGHT = (
  "adam", "sgd", "adagrad", "apply_if_finite", "inject_hyperparams",
  "clip_by_global_norm", "partition", "masked", "chain", "zero_nans",
  "rowwise_adagrad", "clip",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(OPTAX, *USUAL))
def test_lazy_rows(name):
  verdict = run_lazy(name, "alone")
  assert verdict == "right" or name not in RIGHT
