"""State and batches that do not fit the devices, or were placed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from refusals import N
from refusals import refused
import runners

import zenjax

MESH = runners.mesh(N)
TX = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
PARAMS = {"t": jnp.zeros((40, 4))}


def init(tx: Any, params: Any = PARAMS, mesh: Any = MESH, axis="data"):
  """Makes a state, if it is called."""
  return lambda: zenjax.init_state(tx, params, mesh, axis)


def two_axes(*names: str):
  return jax.make_mesh((N, N), names)


def axis_of_a_step():
  tx = zenjax.zen_sync("batch", sparse=True)
  step = lambda state, x: (tx.update(PARAMS, state)[::-1], jnp.sum(x))
  step = zenjax.data_parallel(step, MESH, "data")
  jax.eval_shape(step, tx.init(PARAMS), jnp.arange(N))


def tables(mesh: Any = MESH, axis: str = "data", **options: Any) -> Any:
  table = jnp.ones((600, 4))
  return zenjax.tables.shard(table, mesh, axis, tables=True, **options)


def step_of_copies():
  mesh = two_axes("pod", "chip")
  step = lambda state, x: (state, ())
  step = zenjax.data_parallel(step, mesh, ("pod", "chip"))
  step(tables(mesh, "chip", replicas="pod"), jnp.zeros(N * N))


def unshard_a_part():
  specs = (zenjax.state_specs(tables(), "data"),)
  mapped = jax.shard_map(
    zenjax.tables.unshard,
    mesh=MESH,
    in_specs=specs,
    out_specs=P(),
    check_vma=False,
  )
  jax.eval_shape(mapped, tables())


OWNERS = zenjax.sharded_optimizer(optax.sgd(0.1), "data")
INT8 = zenjax.compress.LowBit(8)
REFUSED = {
  "init over an axis that the mesh lacks": (
    init(zenjax.zen_sync("data", sparse=True), axis="batch"),
    ValueError,
    "`axis_name` ... batch ... data",
  ),
  "reshard to a mesh without the axis": (
    lambda: zenjax.from_checkpoint(TX.init(PARAMS), MESH, "batch"),
    ValueError,
    "`axis_name` ... batch ... data",
  ),
  "axes that are not those of the transformation": (
    init(
      zenjax.compress.all_reduce(INT8, ("host", "data"), leaves=True),
      mesh=two_axes("host", "data"),
    ),
    ValueError,
    "`axis_name` of init_state ... ('data',) ... ('host', 'data')",
  ),
  "parameters as a transformation": (init(jnp.zeros(3)), TypeError, "`tx`"),
  "no mesh": (init(optax.sgd(0.1), mesh=None), TypeError, "`mesh`"),
  "init of saved tables": (
    init(OWNERS, zenjax.to_checkpoint(tables())),
    ValueError,
    "zenjax.from_checkpoint",
  ),
  # Gradients accumulated per device need a dimension to be split along.
  "MultiSteps of a scalar": (
    init(optax.MultiSteps(TX, 2), {"scale": jnp.zeros(())}),
    ValueError,
    "`state` ... MultiSteps ... (1,)",
  ),
  "axis of data_parallel that the mesh lacks": (
    lambda: zenjax.data_parallel(lambda *a: a, MESH, "batch"),
    ValueError,
    "`axis_name` ... batch ... data",
  ),
  "axis of a step that the mesh lacks": (
    axis_of_a_step,
    NameError,
    "`axis_name` ... 'batch' ... Your mesh has ('data',)",
  ),
  "a mesh as an axis": (
    lambda: zenjax.zen_sync(MESH),  # type: ignore[arg-type]
    ValueError,
    "`axis_name` ... name of an axis ... Mesh",
  ),
  "lazy rows of owners": (
    init(zenjax.lazy_rows(OWNERS), jnp.zeros((1000, 64))),
    ValueError,
    "`inner`",
  ),
  "copies of tables in data_parallel": (
    step_of_copies,
    ValueError,
    "`replicas` ('pod',) ... plain jit",
  ),
  "a part of a table": (
    unshard_a_part,
    ValueError,
    "`unshard` ... inside shard_map ... outside",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
  call, kind, words = REFUSED[name]
  with refused(kind, words):
    call()


def test_multisteps_that_were_not_made_by_init():
  """The raw error is of shapes that do not broadcast, deep in optax."""
  tx, params = optax.MultiSteps(TX, 2), PARAMS | {"other": jnp.zeros(6)}
  step = zenjax.data_parallel(lambda state, x: (state, ()), MESH, "data")
  words = "`state`", "MultiSteps", "zenjax.init_state", "(6,)", "other"
  with refused(ValueError, *words):
    step((params, tx.init(params)), jnp.zeros(N))
  for made_by in (tx, optax.flatten(tx.gradient_transformation())):
    step((params, init(made_by, params)()), jnp.zeros(N))


@pytest.mark.parametrize(
  ("argument", "remedy", "remedied"),
  [
    (
      jax.random.split(jax.random.key(0), 3),
      "Give one key, or one key for each example",
      jax.random.split(jax.random.key(0), 4),
    ),
    (jnp.float32(0.5), "`jnp.full(2, x)`, and use `x[0]`", jnp.full(2, 0.5)),
    (jnp.zeros((3, 2)), "to 2 rows. Or pad it to 4", jnp.zeros((4, 2))),
    (jnp.zeros((0, 2)), "Skip the step", jnp.zeros((2, 2))),
    (jnp.zeros((1, 4)), "micro-batches inside `step`", jnp.zeros(4)),
  ],
  ids=["keys", "scalar", "odd", "empty", "micro-batches"],
)
def test_batch_that_cannot_be_split(argument, remedy, remedied):
  """What the message offers works."""

  def step(state, x):
    one = x[0]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      one = jax.random.uniform(one)
    return state, one.sum()

  mapped = zenjax.data_parallel(step, MESH, "data")
  words = "`batch[0]", "2 devices", str(argument.shape), remedy
  with refused(ValueError, *words):
    mapped((), argument)
  assert jnp.isfinite(mapped((), remedied)[1]).all()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("within", [False, True])
def test_a_raw_key_is_no_batch(n, within):
  """One device would draw by it, and two would get a half of it each."""
  key = jax.random.PRNGKey(0)
  step = lambda state, ids, given: (state, ids.sum())
  mapped = zenjax.data_parallel(step, runners.mesh(n), "data", aux_specs="sum")
  given = {"dropout": key, "x": jnp.zeros(4)} if within else key
  for run in (mapped, jax.jit(mapped)):
    with refused(ValueError, "`batch[1]", "raw key", "jax.random.key(seed)"):
      run((), jnp.arange(4), given)
  wrapped = jax.random.wrap_key_data(key)
  assert int(mapped((), jnp.arange(4), wrapped)[1]) == 6
  # Numbers and several raw keys are split.
  for other in (jnp.array([1, 2]), jax.random.split(key, 4)):
    assert int(mapped((), jnp.arange(4), other)[1]) == 6


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (TX.init(PARAMS), ("state of an optimizer", "`(params, opt_state)`")),
    (optax.adam(0.1).init(PARAMS), ("state of an optimizer",)),
    (optax.MultiSteps(TX, 2).init(PARAMS), ("state of an optimizer",)),
    (jnp.tanh, ("2 devices", repr(jnp.tanh), "keep it in the state")),
    ("train", ("'train'", "keep it in the state")),
  ],
  ids=["zen_sync", "adam", "MultiSteps", "function", "text"],
)
def test_what_is_no_batch(given, words):
  step = lambda state, *batch: (state, ())
  mapped = zenjax.data_parallel(step, MESH, "data")
  with refused(ValueError, "`batch[1]", *words):
    mapped(PARAMS, jnp.zeros(4), given)


_AUTOMATIC = jax.sharding.AxisType.Auto
_EXPLICIT = jax.sharding.AxisType.Explicit


def sharded(axis_type, spec):
  """A mesh, and parameters of which the table is sharded."""
  mesh = jax.make_mesh((N, N), ("data", "model"), (axis_type, axis_type))
  params = {"bias": jnp.zeros(4), "table": jnp.zeros((40, 4))}
  placed = jax.sharding.NamedSharding(mesh, spec)
  return mesh, params | {"table": jax.device_put(params["table"], placed)}


_WORDS = ("table'", "(40, 4)", "gathered", "zenjax.tables.shard", "P()")


@pytest.mark.parametrize("axis_type", [_AUTOMATIC, _EXPLICIT])
@pytest.mark.parametrize("spec", [P("data"), P(None, ("model", "data"))])
def test_table_that_is_sharded_over_the_data(axis_type, spec):
  """It would be gathered on every device, in silence."""
  mesh, params = sharded(axis_type, spec)
  step = lambda state, x: (state, x.mean())
  step = zenjax.data_parallel(step, mesh, "data")
  with refused(ValueError, "`params`", "'table'", *_WORDS, str(spec)):
    zenjax.init_state(TX, params, mesh, "data")
  state = optax.EmptyState(), params
  with refused(ValueError, "`state`", "'1.table'", *_WORDS):
    step(state, jnp.zeros(N))
  if axis_type == _EXPLICIT:  # Of others nothing is seen under `jit`.
    with refused(ValueError, "`state`", *_WORDS):
      jax.jit(step).lower(state, jnp.zeros(N))


def test_table_that_is_sharded_over_another_axis():
  """`init` may gather columns, as zen_sync does; a step would keep all."""
  mesh, params = sharded(_AUTOMATIC, P(None, "model"))
  zenjax.init_state(TX, params, mesh, "data")
  step = zenjax.data_parallel(lambda params, x: (params, 0), mesh, "data")
  with refused(ValueError, "`state`", *_WORDS):
    step(params, jnp.zeros(N))
