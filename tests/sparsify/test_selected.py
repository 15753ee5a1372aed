"""A zen_sync behind a sparsifier sends what it selected, by element."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax

PARAMS = {"bias": jnp.zeros(30), "kernel": jnp.zeros((300, 100))}
TABLES = {**PARAMS, "table": jnp.zeros((9_000, 4))}
ALL = {"kernel": True, "table": True}
EF = lambda *a, **k: zenjax.sparsify.error_feedback(
  zenjax.sparsify.top_k(0.01, *a), "data", **k
)
TOP = lambda: zenjax.sparsify.top_k(0.01)
ZEN = lambda **k: zenjax.zen_sync("data", **k)


def made(tx, params: Any = None) -> Any:
  return zenjax.init_state(tx, params or PARAMS, runners.mesh(2), "data")


def in_map(tx, params: Any = None, axes=("data",)) -> Any:
  """The shapes of a state made by `tx.init` where axes are bound."""
  init = lambda params: tx.init(params)
  for axis in axes:
    init = jax.vmap(init, in_axes=None, axis_name=axis, axis_size=2)
  return jax.eval_shape(init, params or PARAMS)


def syncs(state: Any) -> list[zenjax.ZenSyncState]:
  is_sync = lambda node: isinstance(node, zenjax.ZenSyncState)
  return [x for x in jax.tree.leaves(state, is_leaf=is_sync) if is_sync(x)]


def by_element(state: Any) -> list[list[str]]:
  return [sorted(node.selected) for node in syncs(state)]


def program(tx, state, params: Any = None) -> str:
  """What a device does in a step."""
  specs = zenjax.state_specs(state, "data")
  step = jax.shard_map(
    lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
    mesh=runners.mesh(2),
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
  )
  stack = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params or PARAMS
  )
  return str(jax.make_jaxpr(step)(stack, state))


@pytest.mark.parametrize("first", [EF, TOP])
def test_it_is_what_unit_element_does(first):
  auto, said = (
    optax.chain(first(), ZEN(**given)) for given in ({}, {"unit": "element"})
  )
  state = made(auto)
  assert jax.tree.structure(state) == jax.tree.structure(made(said))
  assert sorted(state[1].leaves) == ["kernel"]
  assert program(auto, state) == program(said, state)
  rows = optax.chain(ZEN())
  assert sorted(made(rows)[0].leaves) == [] != sorted(state[1].leaves)


def test_a_step_is_that_of_the_largest():
  tx = optax.chain(EF(), ZEN())
  rng = np.random.default_rng(0)
  stack = jax.tree.map(
    lambda x: rng.normal(size=(2, *x.shape)).astype(np.float32), PARAMS
  )
  step = lambda g: tx.update(g, tx.init(g))
  update, state = jax.jit(jax.vmap(step, axis_name="data"))(stack)
  want = np.zeros(30_000)
  for local in stack["kernel"].reshape(2, -1):
    largest = np.argsort(-np.abs(local))[:300]
    want[largest] += local[largest] / 2
  np.testing.assert_allclose(update["kernel"][0].ravel(), want, rtol=1e-6)
  np.testing.assert_allclose(
    update["bias"][1], stack["bias"].mean(axis=0), rtol=1e-5, atol=1e-6
  )
  assert state[1].leaves["kernel"].sizes[0, :2].tolist() == [30_000, 1]


def test_other_leaves_are_rows():
  only = lambda name, _: name == "kernel"
  tx = optax.chain(
    zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(0.01, sparse=only), "data"
    ),
    ZEN(),
  )
  state = made(tx, TABLES)
  assert by_element(state) == [["kernel"]]
  assert sorted(state[1].leaves) == ["kernel", "table"]
  text = program(tx, state, TABLES)
  assert "f32[30000,1]" in text and "f32[36000,1]" not in text


KERNEL = {"bias": False, "kernel": True}
LABELS = {"bias": "rest", "kernel": "some"}
AROUND = {
  "between": lambda: optax.chain(EF(), optax.scale(2.0), ZEN()),
  "alone": lambda: optax.chain(TOP(), ZEN()),
  "masked": lambda: optax.chain(
    optax.masked(EF(), KERNEL), ZEN(), optax.sgd(0.1)
  ),
  "masked zen": lambda: optax.chain(
    EF(),
    optax.masked(ZEN(), KERNEL),
    optax.masked(ZEN(), {"bias": True, "kernel": False}),
  ),
  "multi_transform": lambda: optax.multi_transform(
    {"some": optax.chain(EF(), ZEN()), "rest": ZEN()}, LABELS
  ),
  "partition": lambda: optax.partition(
    {"some": optax.chain(EF(), ZEN()), "rest": ZEN()}, LABELS
  ),
  "MultiSteps": lambda: optax.MultiSteps(optax.chain(EF(), ZEN()), 2),
  "inject": lambda: optax.inject_hyperparams(
    lambda rate: optax.chain(EF(), ZEN(), optax.sgd(rate))
  )(0.1),
  "if_finite": lambda: optax.chain(
    EF(), ZEN(), optax.apply_if_finite(optax.sgd(0.1), 3)
  ),
  "flatten": lambda: optax.flatten(optax.chain(EF(), ZEN())),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("way", [made, in_map])
@pytest.mark.parametrize("name", AROUND)
def test_inside_of_others(name, way):
  found = by_element(way(AROUND[name]()))
  assert sorted(filter(None, found)) == (
    [["leaf"]] if name == "flatten" else [["kernel"]]
  )


def test_along_one_axis_after_another():
  tx = optax.chain(
    TOP(), zenjax.zen_sync("device"), zenjax.zen_sync("host"), optax.sgd(0.1)
  )
  assert by_element(in_map(tx, axes=("host", "device"))) == [["kernel"]] * 2
  inside = optax.chain(
    zenjax.zen_sync("device", sparse=False), TOP(), zenjax.zen_sync("host")
  )
  state = in_map(inside, axes=("host", "device"))
  assert by_element(state) == [[], ["kernel"]]


@pytest.mark.parametrize(
  "init",
  [
    lambda tx: tx.init(PARAMS),
    lambda tx: jax.jit(tx.init)(PARAMS),
    lambda tx: tx.init(jax.tree.map(np.asarray, PARAMS)),
    lambda tx: tx.init(jax.eval_shape(lambda: PARAMS)),
  ],
  ids=["arrays", "jit", "numpy", "shapes"],
)
def test_where_no_axis_is_needed(init):
  tx = optax.chain(TOP(), ZEN())
  for _ in range(2):  # Of the same chain, and of the same function under jit.
    assert by_element(init(tx)) == [["kernel"]]


def test_chains_of_one_process():
  """The same parameters, arrays and all; and others in between."""
  sparsified, rows = optax.chain(TOP(), ZEN()), optax.chain(ZEN(), optax.sgd(1))
  for tx, want in [
    (rows, []),
    (sparsified, ["kernel"]),
    (rows, []),
    (rows, []),
    (sparsified, ["kernel"]),
  ]:
    assert by_element(tx.init(PARAMS)) == [want]

  def both(params):
    return sparsified.init(params), rows.init(params), sparsified.init(params)

  found = by_element(jax.eval_shape(both, PARAMS))
  assert found == [["kernel"], [], ["kernel"]]


def updated(first, second, state, params: Any = None):
  """A step by two transformations that were made apart."""

  def step(g):
    g, _ = first.update(g, first.init(g))
    return second.update(g, state)[0]

  stack = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params or PARAMS
  )
  return jax.eval_shape(jax.vmap(step, axis_name="data"), stack)


@pytest.mark.parametrize(
  "mapped", [lambda f: f, optax.masked], ids=["plain", "masked"]
)
@pytest.mark.parametrize("first", [EF, TOP])
def test_a_state_that_was_made_apart(first, mapped):
  zen = ZEN() if mapped is not optax.masked else optax.masked(ZEN(), KERNEL)
  with pytest.raises(ValueError) as error:
    updated(first(), zen, zen.init(PARAMS))
  names(
    error, "`state`", "leaf 'kernel'", "zenjax.init_state", "unit='element'"
  )
  said = ZEN(unit="element")
  updated(first(), said, said.init(PARAMS))
  small = ZEN(sparse=False)
  with pytest.raises(ValueError):
    updated(first(), small, small.init(PARAMS))


def test_of_one_array():
  top = zenjax.sparsify.top_k(0.01)

  def step(x, **given):
    x, _ = top.update(x, top.init(x))
    return zenjax.sparse_pmean(x, "data", **given)

  texts = [
    str(
      jax.make_jaxpr(
        jax.vmap(lambda x, g=given: step(x, **g), axis_name="data")
      )(jnp.zeros((2, 300, 100)))
    )
    for given in ({}, {"unit": "element"}, {"unit": "auto"}, {"unit": 7})
  ]
  assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"unit": "row", "sparse": True}, "unit='row'"),
    ({"unit": "row"}, "unit='row'"),
    ({"sparse": False}, "sparse"),
  ],
)
def test_all_is_sent_where_the_user_says_so(options, said):
  tx = optax.chain(TOP(), ZEN(**options))
  with pytest.warns(UserWarning, match=f"'kernel'.*`{said}`.*sends all of it"):
    state: Any = tx.init(PARAMS)
  assert "bias" not in state[1].leaves or options["sparse"] is True


def test_rows_of_what_elements_are_selected_of():
  tx = optax.chain(TOP(), ZEN(output="rows"))
  with pytest.raises(ValueError) as error:
    program(tx, made(tx))
  names(error, "`output='rows'`", "'kernel'", "`unit='row'`")


def test_a_plan_knows_no_sparsifier():
  topology = zenjax.planner.Topology.network("25gbit", 2, machine="h100")
  loss = lambda params: jnp.sum(params["kernel"]) + jnp.sum(params["bias"])
  plan = zenjax.planner.plan(
    jax.value_and_grad(loss), PARAMS, topology=topology
  )
  with pytest.raises(ValueError) as error:
    made(optax.chain(TOP(), ZEN(plan=plan)))
  names(error, "`plan`", "'kernel'", "sparsifier")


def test_what_is_made_of_it_in_between():
  tx = optax.chain(EF(), optax.flatten(ZEN()))
  with pytest.warns(UserWarning, match="error_feedback.*leaf 'kernel'.*unit="):
    made(tx)
  owner = zenjax.sharded_optimizer(optax.sgd(0.1), "data")
  with pytest.warns(UserWarning, match="error_feedback.*leaf 'kernel'"):
    made(optax.chain(EF(), owner))
  made(optax.chain(EF(), optax.stateless(lambda g, _: g)))  # Summed by hand.


def test_float16_of_what_was_rounded_to_it():
  wire = {"wire_dtype": jnp.float16}
  tx = optax.chain(EF(**wire), ZEN(**wire))
  program(tx, made(tx))
  for tx in [
    optax.chain(EF(), ZEN(**wire)),
    optax.chain(EF(wire_dtype=jnp.bfloat16), ZEN(**wire)),
    optax.chain(EF(**wire), ZEN(op="sum", **wire)),
  ]:
    with pytest.raises(ValueError) as error:
      program(tx, made(tx))
    names(error, "`wire_dtype`", "float16", "'kernel'")


@pytest.mark.parametrize(
  ("first", "said"), [(EF, "error_feedback"), (TOP, "top_k")]
)
def test_a_forgotten_zen_sync(first, said):
  tx = optax.chain(first(), optax.sgd(0.1))
  state = made(tx)

  def step(state, x):
    params, state = state
    loss = lambda p: jnp.sum(p["kernel"] * x[0])
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), 0.0

  step = zenjax.data_parallel(step, runners.mesh(2), "data")
  with pytest.raises(ValueError) as error:
    jax.eval_shape(step, (PARAMS, state), jnp.zeros(2))
  names(error, "`zenjax.zen_sync('data')` right behind", said, "selected")
