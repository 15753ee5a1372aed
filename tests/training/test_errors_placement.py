"""State and batches that do not fit the devices, or were placed by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest
from refusals import N
from refusals import names
import runners

import zenjax


def test_init_over_an_axis_that_the_mesh_lacks():
  tx = zenjax.zen_sync("data", sparse=True)
  params = {"t": jnp.zeros((41, 4))}
  with pytest.raises(ValueError) as error:
    zenjax.init_state(tx, params, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


def test_reshard_to_a_mesh_without_the_axis():
  state = zenjax.zen_sync("data").init({"t": jnp.zeros((41, 4))})
  with pytest.raises(ValueError) as error:
    zenjax.from_checkpoint(state, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


def test_axes_of_init_state_that_are_not_those_of_the_transformation():
  tx = zenjax.compress.all_reduce(
    zenjax.compress.LowBit(8), ("host", "data"), leaves=True
  )
  mesh = jax.make_mesh((1, N), ("host", "data"))
  with pytest.raises(ValueError) as error:
    zenjax.init_state(tx, jnp.zeros((40, 4)), mesh, "data")
  names(error, "`axis_name` of init_state", "('data',)", "('host', 'data')")


@pytest.mark.parametrize(
  ("tx", "mesh", "words"),
  [
    (jnp.zeros(3), runners.mesh(N), "`tx`"),
    (optax.sgd(0.1), None, "`mesh`"),
  ],
)
def test_arguments_of_init_state_in_another_order(tx, mesh, words):
  with pytest.raises(TypeError, match=words):
    zenjax.init_state(tx, jnp.zeros((40, 4)), mesh, "data")


def test_init_state_of_saved_tables():
  mesh = runners.mesh(N)
  table = zenjax.tables.shard(jnp.zeros((4096, 8)), mesh, "data")
  saved = zenjax.to_checkpoint(table)
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), "data")
  with pytest.raises(ValueError, match="zenjax.from_checkpoint"):
    zenjax.init_state(tx, saved, mesh, "data")


def test_multisteps_of_a_scalar():
  """Gradients accumulated per device need a dimension to be split along."""
  tx = optax.MultiSteps(optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1)), 2)
  with pytest.raises(ValueError) as error:
    zenjax.init_state(tx, {"scale": jnp.zeros(())}, runners.mesh(N), "data")
  names(error, "`state`", "MultiSteps", "(1,)")


def test_multisteps_that_were_not_made_by_init():
  """The raw error is of shapes that do not broadcast, deep in optax."""
  tx = optax.MultiSteps(optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1)), 2)
  params = {"t": jnp.zeros((40, 4)), "other": jnp.zeros(6)}
  step = zenjax.data_parallel(
    lambda state, x: (state, ()), runners.mesh(N), "data"
  )
  with pytest.raises(ValueError) as error:
    step((params, tx.init(params)), jnp.zeros(N))
  names(error, "`state`", "MultiSteps", "zenjax.init_state", "(6,)", "other")
  for made_by in (tx, optax.flatten(tx.gradient_transformation())):
    made = zenjax.init_state(made_by, params, runners.mesh(N), "data")
    step((params, made), jnp.zeros(N))


def test_axis_of_data_parallel_that_the_mesh_lacks():
  with pytest.raises(ValueError) as error:
    zenjax.data_parallel(lambda *a: a, runners.mesh(N), "batch")
  names(error, "`axis_name`", "batch", "data")


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

  mapped = zenjax.data_parallel(step, runners.mesh(N), "data")
  with pytest.raises(ValueError) as error:
    mapped((), argument)
  names(error, "`batch[0]", "2 devices", str(argument.shape), remedy)
  assert jnp.isfinite(mapped((), remedied)[1]).all()


RAW = "raw key", "jax.random.key(seed)"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("within", [False, True])
def test_a_raw_key_is_no_batch(n, within):
  """One device would draw by it, and two would get a half of it each."""
  key = jax.random.PRNGKey(0)
  step = lambda state, ids, given: (state, ids.sum())
  mesh = runners.mesh(n)
  mapped = zenjax.data_parallel(step, mesh, "data", aux_specs="sum")
  given = {"dropout": key, "x": jnp.zeros(4)} if within else key
  for run in (mapped, jax.jit(mapped)):
    with pytest.raises(ValueError) as error:
      run((), jnp.arange(4), given)
    names(error, "`batch[1]", *RAW)
  wrapped = jax.random.wrap_key_data(key)
  assert int(mapped((), jnp.arange(4), wrapped)[1]) == 6
  # Numbers and several raw keys are split.
  for other in (jnp.array([1, 2]), jax.random.split(key, 4)):
    assert int(mapped((), jnp.arange(4), other)[1]) == 6


def test_what_is_no_batch():
  tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(0.1))
  params = {"t": jnp.zeros((40, 4))}
  step = lambda state, *batch: (state, ())
  mapped = zenjax.data_parallel(step, runners.mesh(N), "data")
  for given, words in (
    (tx.init(params), ("state of an optimizer", "`(params, opt_state)`")),
    (optax.adam(0.1).init(params), ("state of an optimizer",)),
    (optax.MultiSteps(tx, 2).init(params), ("state of an optimizer",)),
    (jnp.tanh, ("2 devices", repr(jnp.tanh), "keep it in the state")),
    ("train", ("'train'", "keep it in the state")),
  ):
    with pytest.raises(ValueError) as error:
      mapped(params, jnp.zeros(4), given)
    names(error, "`batch[1]", *words)


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
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  step = lambda state, x: (state, x.mean())
  step = zenjax.data_parallel(step, mesh, "data")
  with pytest.raises(ValueError) as error:
    zenjax.init_state(tx, params, mesh, "data")
  names(error, "`params`", "'table'", *_WORDS, str(spec))
  state = optax.EmptyState(), params
  with pytest.raises(ValueError) as error:
    step(state, jnp.zeros(N))
  names(error, "`state`", "'1.table'", *_WORDS)
  if axis_type == _EXPLICIT:  # Of others nothing is seen under `jit`.
    with pytest.raises(ValueError) as error:
      jax.jit(step).lower(state, jnp.zeros(N))
    names(error, "`state`", *_WORDS)


def test_table_that_is_sharded_over_another_axis():
  """`init` may gather columns, as zen_sync does; a step would keep all."""
  mesh, params = sharded(_AUTOMATIC, P(None, "model"))
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  zenjax.init_state(tx, params, mesh, "data")
  step = zenjax.data_parallel(lambda params, x: (params, 0), mesh, "data")
  with pytest.raises(ValueError) as error:
    step(params, jnp.zeros(N))
  names(error, "`state`", *_WORDS)


def test_an_axis_that_the_mesh_of_a_step_lacks():
  tx = zenjax.zen_sync("batch", sparse=True)
  table = jnp.zeros((41, 4))
  state = tx.init(table)

  def step(state, ids):
    table, state = state
    updates, state = tx.update(jnp.ones_like(table), state, table)
    return (table + updates, state), jnp.sum(ids)

  train = zenjax.data_parallel(step, runners.mesh(N), "data")
  with pytest.raises(NameError) as error:
    jax.eval_shape(train, (table, state), jnp.arange(N))
  names(error, "`axis_name`", "'batch'", "Your mesh has ('data',)")


def test_an_axis_name_that_is_a_mesh():
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync(runners.mesh(N))  # type: ignore[arg-type]
  names(error, "`axis_name`", "name of an axis", "Mesh")


def test_rows_of_owners_are_not_made_lazy():
  owners = zenjax.sharded_optimizer(optax.sgd(0.1), "data")
  tx = zenjax.lazy_rows(owners)
  with pytest.raises(ValueError) as error:
    zenjax.init_state(tx, jnp.zeros((1000, 64)), runners.mesh(N), "data")
  names(error, "`inner`")


def test_tables_with_copies_in_data_parallel():
  mesh = jax.make_mesh((N, N), ("pod", "chip"))
  state = zenjax.tables.shard(
    jnp.ones((600, 4)), mesh, "chip", replicas="pod", tables=True
  )
  step = lambda state, x: (state, ())
  with pytest.raises(ValueError) as error:
    zenjax.data_parallel(step, mesh, ("pod", "chip"))(state, jnp.zeros(N * N))
  names(error, "`replicas` ('pod',)", "plain jit")


def test_a_part_of_a_table_is_not_unsharded():
  mesh = runners.mesh(N)
  table = zenjax.tables.shard(jnp.ones((600, 4)), mesh, "data", tables=True)
  mapped = jax.shard_map(
    zenjax.tables.unshard,
    mesh=mesh,
    in_specs=(zenjax.state_specs(table, "data"),),
    out_specs=P(),
    check_vma=False,
  )
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, table)
  names(error, "`unshard`", "inside shard_map", "outside")
