"""`data_parallel` refuses steps after which devices hold different replicas."""

import traceback
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import N
from refusals import names
import runners
import steps
import transforms

import zenjax

IDS = jnp.arange(4 * N) % 40


def parameters():
  return {"kernel": jnp.ones((4, 4)), "table": jnp.ones((40, 4))}


def loss(params, ids):
  return jnp.sum(params["table"][ids] @ params["kernel"])


def pmean(tree, axis="data"):
  return jax.tree.map(lambda x: lax.pmean(x, axis), tree)


def momentum():
  return optax.sgd(0.1, momentum=0.9)


def step_of(tx, sync=lambda grads: grads, see=lambda value: value):
  """A step that averages gradients by `sync` and its loss by `see`."""

  def step(state, ids):
    params, state = state
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(sync(grads), state, params)
    return (optax.apply_updates(params, updates), state), see(value)

  return step


def trace(step, tx, mesh=None, axis: Any = "data"):
  mesh = mesh or runners.mesh(N)
  state = zenjax.init_state(tx, parameters(), mesh, axis)
  mapped = zenjax.data_parallel(step, mesh, axis)
  return jax.eval_shape(mapped, (parameters(), state), IDS)


def only_the_table(grads):
  return grads | {"table": zenjax.sparse_pmean(grads["table"], "data")}


@pytest.mark.parametrize(
  ("step", "leaf"),
  [
    (step_of(momentum()), "'0.kernel' of it (and 3 more)"),
    (jax.jit(step_of(momentum())), "'0.kernel' of it (and 3 more)"),
    (step_of(momentum(), see=pmean), "'0.kernel' of it (and 3 more)"),
    (step_of(momentum(), only_the_table), "'0.kernel' of it (and 1 more)"),
    (
      lambda state, ids: (
        jax.tree.map(lambda x: x * jnp.float32(ids[0]), state),
        0,
      ),
      "'0.kernel' of it (and 3 more) of the",
    ),
  ],
  ids=["nothing", "jit", "loss", "table", "state"],
)
def test_step_that_lets_replicas_part(step, leaf):
  with pytest.raises(ValueError) as error:
    trace(step, momentum())
  names(error, "`step`", leaf, "'data'", "zenjax.zen_sync('data')", "lax.pmean")


def drawn(key, like):
  return jax.random.normal(key, like.shape)


def noisy_loss(params, ids, key):
  rows = params["table"][ids]
  return jnp.sum((rows + drawn(key, rows)) @ params["kernel"])


@pytest.mark.parametrize("axes", ["data", ("host", "device")])
def test_what_is_drawn_from_an_own_key_after_gradients_are_averaged(axes):
  """A part of the leaf met a collective; the noise in it did not."""
  tx = optax.chain(zenjax.zen_sync(axes), momentum())

  def step(noise):
    def step(state, ids, key):
      params, state = state
      grads = jax.grad(noisy_loss)(params, ids, key)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (noise(params, key), state), ()

    return step

  def noisy(params, key):
    return params | {"kernel": params["kernel"] + drawn(key, params["kernel"])}

  def averaged(params, key):
    noise = lax.pmean(drawn(key, params["kernel"]), axes)
    return params | {"kernel": params["kernel"] + noise}

  mesh = runners.mesh(N)
  if axes != "data":
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, axes)
  state = parameters(), zenjax.init_state(tx, parameters(), mesh, axes)
  given = state, IDS, jax.random.key(0)
  mapped = lambda noise: zenjax.data_parallel(step(noise), mesh, axes)
  jax.eval_shape(mapped(lambda params, key: params), *given)
  jax.eval_shape(mapped(averaged), *given)
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped(noisy), *given)
  names(error, "`step`", "'0.kernel' of it", "a key of its own", "lax.pmean(x")
  one = runners.mesh(1)
  if axes == "data":
    state = parameters(), zenjax.init_state(tx, parameters(), one, axes)
    run = zenjax.data_parallel(step(noisy), one, axes)
    jax.eval_shape(run, state, *given[1:])


def test_an_own_key_is_not_kept():
  def step(state, ids, key):
    return {"key": key, "count": state["count"] + 1}, ids.sum()

  mapped = zenjax.data_parallel(step, runners.mesh(N), "data")
  state = {"key": jax.random.key(0), "count": jnp.zeros(())}
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, state, IDS, jax.random.key(0))
  names(error, "`step`", "leaf 'key' of it", "'data'")


def _averaged_in(loop):
  """Gradients averaged in each turn of a loop."""
  return lambda grads: WITHIN[loop](pmean, grads)


@pytest.mark.parametrize(
  "sync",
  [
    lambda grads: jax.tree.map(lambda x: zenjax.sparse_pmean(x, "data"), grads),
    lambda grads: jax.tree.map(
      lambda x: lax.pmean(x, "data") / zenjax.global_norm(grads, "data"), grads
    ),
    lambda grads: _averaged_in("scan")(grads),
    lambda grads: _averaged_in("fori")(grads),
    lambda grads: _averaged_in("cond")(pmean(grads)),
  ],
  ids=["sparse_pmean", "global_norm", "scan", "fori", "cond"],
)
def test_gradients_by_own_keys_that_are_averaged_pass(sync):
  _trace_drawn(momentum(), sync)


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("name", transforms.TRANSFORMS)
def test_transformations_average_what_was_drawn(name):
  tx = transforms.TRANSFORMS[name](transforms.zen_for)
  _trace_drawn(tx, params=transforms.make_params(), n=4)


TABLE: Any = dict(sparse={"kernel": False, "table": True})
KEEPS: dict[str, Any] = {
  "carry": zenjax.zen_sync("data", on_overflow="carry", **TABLE),
  "micro": zenjax.sparsify.micro("data", 0.5),
  "error_feedback": optax.chain(
    zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(0.5, sparse=True), "data", momentum=0.9
    ),
    zenjax.zen_sync("data", sparse=True, unit="element"),
  ),
  "sharded_optimizer": zenjax.sharded_optimizer(
    optax.adam(0.1), "data", **TABLE
  ),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_parts_averages_what_was_drawn(name):
  _trace_drawn(KEEPS[name])


def _trace_drawn(tx, sync=lambda grads: grads, params=None, n=N):
  """Traces a step of which all gradients hold noise of each device's own."""
  params, mesh = params or parameters(), runners.mesh(n)

  def step(state, ids, key):
    params, state = state
    keys = jax.random.split(key, len(jax.tree.leaves(params)))
    keys = jax.tree.unflatten(jax.tree.structure(params), keys)
    noise = lambda x, key: jax.random.normal(key, x.shape).astype(x.dtype)
    grads = jax.tree.map(noise, params, keys)
    updates, state = tx.update(sync(grads), state, params)
    return (optax.apply_updates(params, updates), state), ids.sum()

  state = params, zenjax.init_state(tx, params, mesh, "data")
  mapped = zenjax.data_parallel(step, mesh, "data")
  jax.eval_shape(mapped, state, IDS, jax.random.key(0))


def test_zen_sync_that_is_last():
  """Parameters would stay equal; what the optimizer keeps would not."""
  tx = optax.chain(momentum(), zenjax.zen_sync("data"))
  with pytest.raises(ValueError) as error:
    trace(step_of(tx), tx)
  names(error, "`zen_sync`", "stands after", "first")


@pytest.mark.parametrize("jit", [True, False])
def test_step_that_is_run_without_jit_is_looked_at_too(jit):
  step = zenjax.data_parallel(step_of(momentum()), runners.mesh(N), "data")
  step = jax.jit(step) if jit else step
  with pytest.raises(ValueError) as error:
    step((parameters(), momentum().init(parameters())), IDS)
  names(error, "`step`", "'data'")


@pytest.mark.parametrize(
  ("axis", "missing"), [("host", "device"), ("device", "host")]
)
def test_step_that_averages_over_some_axes(axis, missing):
  axes = ("host", "device")
  devices = np.array(jax.devices()[:4])
  mesh = jax.sharding.Mesh(devices.reshape(2, 2), axes)
  tx = optax.chain(zenjax.zen_sync(axis), momentum())
  with pytest.raises(ValueError) as error:
    trace(step_of(tx), tx, mesh, axes)
  names(
    error,
    f"no collective over '{missing}' on",
    f"zenjax.zen_sync({axes!r})",
    f"lax.pmean(x, '{missing}')",
  )
  trace(step_of(tx, lambda grads: pmean(grads, missing)), tx, mesh, axes)
  shape = [2 if name == axis else 1 for name in axes]
  one = jax.sharding.Mesh(devices[:2].reshape(shape), axes)
  trace(step_of(tx), tx, one, axes)


def _vjp():
  """An identity of which a gradient is made as it goes backward."""
  same = jax.custom_vjp(lambda x: x)
  same.defvjp(lambda x: (x, None), lambda _, grad: (grad,))
  return same


# Each applies `f`, which averages or does not, where it is hard to see.
WITHIN = {
  "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
  "outputs of scan": lambda f, x: jax.tree.map(
    lambda x: x[0], lax.map(f, jax.tree.map(lambda x: x[None], x))
  ),
  "fori": lambda f, x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
  "while": lambda f, x: lax.while_loop(
    lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (x, 0)
  )[0],
  "cond": lambda f, x: lax.cond(
    jnp.ones(()) > 0, f, lambda x: jax.tree.map(lambda x: 2 * x, x), x
  ),
  "jit": lambda f, x: jax.jit(f)(x),
  "remat": lambda f, x: jax.checkpoint(f)(x),
  "custom_vjp": lambda f, x: jax.tree.map(_vjp(), f(x)),
  "barrier": lambda f, x: lax.optimization_barrier((f(x), 1))[0],
}


@pytest.mark.parametrize("within", WITHIN)
def test_collectives_are_found_where_they_are(within):
  def step(sync):
    return step_of(momentum(), lambda grads: WITHIN[within](sync, grads))

  trace(step(pmean), momentum())
  with pytest.raises(ValueError, match="no collective"):
    trace(step(lambda grads: grads), momentum())


@pytest.mark.parametrize("within", WITHIN)
def test_what_devices_have_in_common_stays_so(within):
  """A counter beside what is a device's own, and an evaluation."""

  def step(state, ids):
    seen = {"count": state["count"], "own": ids.sum()}
    seen = WITHIN[within](lambda x: x | {"count": x["count"] + 1}, seen)
    return state | {"count": seen["count"]}, seen["own"]

  mapped = zenjax.data_parallel(step, runners.mesh(N), "data")
  state = {"count": jnp.zeros((), jnp.int32)}
  jax.eval_shape(mapped, state | parameters(), IDS)


def test_one_device_has_nothing_to_part_from():
  trace(step_of(momentum()), momentum(), runners.mesh(1))


@pytest.mark.parametrize("name", transforms.TRANSFORMS)
def test_transformations_that_average_pass(name):
  tx = transforms.TRANSFORMS[name](transforms.zen_for)
  params, mesh = transforms.make_params(), runners.mesh(4)

  def step(state, stack):
    params, state = state
    grads = jax.tree.map(lambda x: x[0], stack)
    updates, state = tx.update(grads, state, params)
    with jax.numpy_dtype_promotion("standard"):
      return (optax.apply_updates(params, updates), state), 0

  state = params, zenjax.init_state(tx, params, mesh, "data")
  mapped = zenjax.data_parallel(step, mesh, "data")
  jax.eval_shape(mapped, state, transforms.make_stack(0))


def test_step_that_only_one_branch_averages_is_no_step_of_ours():
  """`apply_if_finite` around zen_sync sends devices down different branches."""
  inner = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  tx = steps.lenient(optax.apply_if_finite(inner, 3))
  with pytest.raises(ValueError) as error:
    trace(step_of(tx), tx)
  names(error, "`zen_sync`", "must not stand inside `optax.apply_if_finite`")


@pytest.mark.parametrize("jit", [True, False])
def test_mistakes_in_a_step_are_shown_where_they_are(jit):
  def mistaken(params, ids):
    return params, params["table"] + params["kernel"]

  step = zenjax.data_parallel(mistaken, runners.mesh(N), "data")
  with pytest.raises(TypeError, match="add got incompatible shapes") as error:
    (jax.jit(step) if jit else step)(parameters(), IDS)
  frames = traceback.extract_tb(error.value.__traceback__)
  assert "mistaken" in [frame.name for frame in frames]


def test_step_is_traced_once_and_keeps_its_places():
  """Names and lines of the user's program are those of the compiled one."""
  times = []
  tx = optax.chain(zenjax.zen_sync("data"), momentum())

  def scoped(state, ids):
    times.append(1)
    with jax.named_scope("mine"):
      return step_of(tx)(state, ids)

  mesh = runners.mesh(N)
  step = jax.jit(zenjax.data_parallel(scoped, mesh, "data"), donate_argnums=0)
  state = parameters(), zenjax.init_state(tx, parameters(), mesh, "data")
  lowered = step.lower(state, IDS)
  text = lowered.as_text(debug_info=True)
  assert len(times) == 1
  for word in ("mine/", "test_replicas.py", "scoped", "loss"):
    assert word in text
  given = sum(np.asarray(x).nbytes for x in jax.tree.leaves(state))
  memory = lowered.compile().memory_analysis()
  assert memory is not None and memory.alias_size_in_bytes == given
