"""Plans with an optimizer: the choice of forms, and programs set up by it."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from usual import usual

import zenjax
from zenjax.planner import Profile
from zenjax.planner import set_up
from zenjax.planner import Topology

N, BATCH, STEPS = 4, 64, 8
SHAPES = {"a": (4096, 16), "b": (2048, 8), "c": (1024, 8)}
FORMS = (
  "replicated",
  "replicated-sparse",
  "replicated-zero1",
  "sharded-xla",
  "sharded",
)
HOSTS = Topology.network("1 Gbit/s", N)
_RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def loss(params, ids, y):
  found = [params[k][ids % SHAPES[k][0]].mean(1).sum(-1) for k in SHAPES]
  return optax.l2_loss(sum(found) * params["w"].sum(), y).mean()


def first_params():
  rng = np.random.default_rng(0)
  draw = lambda shape: jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32)
  return {k: draw(shape) for k, shape in SHAPES.items()} | {"w": draw((4,))}


def batches(mesh, axes):
  rng = np.random.default_rng(1)
  split = jax.NamedSharding(mesh, jax.P(axes))
  for _ in range(STEPS):
    ids = (rng.zipf(1.2, (N * BATCH, 2)) % 4096).astype(np.int32)
    yield jax.device_put((ids, np.sin(ids[:, 0]).astype(np.float32)), split)


def plan(tx: Any = None, *, topology=HOSTS, **options):
  shape = jax.ShapeDtypeStruct
  params = jax.eval_shape(first_params)
  local = shape((BATCH, 2), jnp.int32), shape((BATCH,), jnp.float32)
  tx = tx or optax.adagrad(0.1)
  return plan_of(loss, params, *local, tx=tx, topology=topology, **options)


def plan_of(loss, *args, **options):
  return zenjax.planner.plan(zenjax.value_and_grad(loss), *args, **options)


def mesh_of(*shape):
  axes = ("pod", "chip")[-len(shape) :]
  kinds = (jax.sharding.AxisType.Auto,) * len(shape)
  return jax.make_mesh(shape, axes, axis_types=kinds), axes


def trained(program, mesh, axes, *, placed=True):
  """Parameters after some steps, in the order of their rows."""

  def step(params, opt_state, *batch):
    value, grads = program.value_and_grad(loss)(params, *batch)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  run: Any = jax.jit(step)
  params, opt_state = program.params, program.opt_state
  for batch in batches(mesh, axes):
    params, opt_state, _ = run(params, opt_state, *batch)
  # `set_up` places everything as steps return it.
  assert run._cache_size() == 1 or not placed
  return zenjax.tables.unshard(params), params


@functools.cache
def plain(optimizer, clip_norm=None):
  """Parameters of the plain program, on one device."""
  tx, params = OPTIMIZERS[optimizer], first_params()
  rows = optimizer != "adam"
  if clip_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
  both = jax.value_and_grad if rows else zenjax.value_and_grad
  if not rows:
    both = lambda f: zenjax.value_and_grad(
      f, tables={k: k in SHAPES for k in params}
    )
    tx = zenjax.lazy_rows(tx)
  program = zenjax.planner.Program(
    params, tx.init(params), optax.with_extra_args_support(tx), both
  )
  return trained(program, *mesh_of(1), placed=False)[0]


OPTIMIZERS = {
  "adagrad": optax.adagrad(0.1),
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
  "adam": optax.adam(0.01),
}


# Forms of the three tables: each alone, and in company.
DENSE, ROWS, ZERO1, XLA, SHARDED = FORMS
MORE = [
  *[(form,) * 3 for form in FORMS],
  (SHARDED, ROWS, DENSE),
  (ROWS, ZERO1, DENSE),
  (XLA, DENSE, ROWS),
]


@pytest.mark.parametrize(
  "forms",
  [
    (SHARDED, ZERO1, XLA),
    *(pytest.param(forms, marks=pytest.mark.more) for forms in MORE),
  ],
  ids=",".join,
)
def test_every_form_trains_as_the_plain_program(forms):
  mesh, axes = mesh_of(N)
  tx = OPTIMIZERS["adagrad"]
  made = plan(tx, axis_name=axes, forms=dict(zip(SHAPES, forms)))
  assert [made.by_name[k].form for k in SHAPES] == list(forms)
  program = set_up(made, first_params, tx, mesh)
  got, params = trained(program, mesh, axes)
  for name, want in plain("adagrad").items():
    np.testing.assert_allclose(got[name], want, rtol=2e-5, atol=2e-6)
  for tree in (program.params, params):
    for name, form in zip(SHAPES, forms):
      rows = jax.tree.leaves(tree[name])[0]
      on_one = rows.addressable_shards[0].data.shape[0]
      split = form in (XLA, SHARDED)
      assert on_one == rows.shape[0] // (N if split else 1)


def test_tables_of_one_shape_may_have_different_forms():
  """The state of each is placed like its own table, whatever shape it has."""
  mesh, axes = mesh_of(N)
  tx, shape = optax.adagrad(0.1), jax.ShapeDtypeStruct
  first = lambda: {
    "t": jnp.ones((4096, 16)),
    "emb": {"t": jnp.ones((4096, 16))},
  }
  look_up = lambda p, ids: (p["t"][ids] * p["emb"]["t"][ids]).sum(1).mean()
  made = plan_of(
    look_up,
    jax.eval_shape(first),
    shape((BATCH,), jnp.int32),
    tx=tx,
    topology=HOSTS,
    axis_name=axes,
    forms={"t": XLA, "emb.t": DENSE},
  )
  program = set_up(made, first, tx, mesh)

  def step(params, opt_state, ids):
    _, grads = program.value_and_grad(look_up)(params, ids)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  run: Any = jax.jit(step)
  state = program.params, program.opt_state
  split = jax.NamedSharding(mesh, jax.P(axes))
  for _ in range(2):
    state = run(*state, jax.device_put(jnp.arange(N * BATCH), split))
  assert run._cache_size() == 1
  on_one = lambda x: x.addressable_shards[0].data.shape[0]
  for tree in (state[0], state[1][0].sum_of_squares):
    assert (on_one(tree["t"]), on_one(tree["emb"]["t"])) == (1024, 4096)


def test_one_exchange_needs_no_further_gain():
  """A fifth is enough for the first, as predictions may be wrong by that."""
  shape = jax.ShapeDtypeStruct
  made = plan_of(
    lambda p, ids: p["t"][ids].sum(),
    {"t": shape((12_352, 64), jnp.float32)},
    shape((16_000,), jnp.int32),
    topology=Topology.network("1 Gbit/s", 64),
  )
  assert 1.3 < made.gain < 1.4 and made.better == "plan"


def test_a_state_of_zeros_is_placed_like_its_table():
  """Made by `jnp.zeros(shape)`, which is on no mesh."""
  mesh, axes = mesh_of(N)
  init: Any = lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params)
  update: Any = lambda grads, state, params=None: (
    jax.tree.map(lambda x: -0.1 * x, grads),
    state,
  )
  zeros = optax.GradientTransformation(init, update)
  made = plan(zeros, axis_name=axes, forms=dict.fromkeys(SHAPES, XLA))
  program = set_up(made, first_params, zeros, mesh)
  rows = SHAPES[next(iter(SHAPES))][0]
  state = [x for x in jax.tree.leaves(program.opt_state) if jnp.ndim(x) == 2]
  assert any(len(x) == rows for x in state)
  for x in state:
    if len(x) == rows:
      assert len(x.addressable_shards[0].data) == rows // N


@pytest.mark.parametrize(
  ("optimizer", "forms", "clip_norm"),
  [
    pytest.param("clipped", (ROWS,) * 3, None, marks=pytest.mark.more),
    pytest.param("adagrad", (ROWS,) * 3, 0.5, marks=pytest.mark.more),
    ("adam", (SHARDED, ROWS, ZERO1), None),
  ],
)
def test_forms_of_rows_train_as_lazy_rows(
  optimizer, forms, clip_norm, as_optax_computes
):
  del as_optax_computes
  mesh, axes = mesh_of(N)
  tx = OPTIMIZERS[optimizer]
  forms = dict(zip(SHAPES, forms))
  made = plan(tx, axis_name=axes, forms=forms, clip_norm=clip_norm)
  got, _ = trained(set_up(made, first_params(), tx, mesh), mesh, axes)
  for name, want in plain(optimizer, clip_norm).items():
    np.testing.assert_allclose(got[name], want, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("as_optax_computes")
def test_groups_of_devices_have_copies():
  mesh, axes = mesh_of(2, 2)
  pods = Topology.preset("h100", 2, hosts=2, network="10 Gbit/s")
  tx = OPTIMIZERS["adagrad"]
  forms = {"a": SHARDED, "b": SHARDED, "c": DENSE}
  made = plan(tx, topology=pods, axis_name=axes, forms=forms, clip_norm=0.5)
  program = set_up(made, first_params, tx, mesh)
  got, params = trained(program, mesh, axes)
  for name, want in plain("adagrad", 0.5).items():
    np.testing.assert_allclose(got[name], want, rtol=2e-5, atol=2e-6)
  value = params["a"].value
  assert value.addressable_shards[0].data.shape[0] == value.shape[0] // 2
  with pytest.raises(ValueError, match="a topology with one level"):
    plan(tx, topology=pods, axis_name=axes, forms={"a": ZERO1})


def wide_loss(params, ids, y):
  rows = [params[k][ids % SHAPES[k][0]].mean(1) for k in SHAPES]
  return optax.l2_loss(
    (jnp.concatenate(rows, -1) @ params["w"]).sum(-1), y
  ).mean()


def wide_params():
  return first_params() | {"w": jnp.full((32, 1024), 0.01)}


def wide_plan(topology=HOSTS, **options):
  shape = jax.ShapeDtypeStruct
  params = jax.eval_shape(wide_params)
  local = shape((BATCH, 2), jnp.int32), shape((BATCH,), jnp.float32)
  tx = OPTIMIZERS["adagrad"]
  return plan_of(wide_loss, params, *local, tx=tx, topology=topology, **options)


@pytest.mark.parametrize(
  ("mesh_shape", "forms"),
  [
    ((N,), (SHARDED, ZERO1, ROWS)),
    ((N,), (ROWS, DENSE, ROWS)),
    ((2, 2), (ROWS,) * 3),
  ],
)
def test_gradients_of_dense_layers_may_be_compressed(mesh_shape, forms):
  mesh, axes = mesh_of(*mesh_shape)
  topology = HOSTS
  if len(axes) > 1:
    topology = Topology.preset("h100", 2, hosts=2, network="1 Gbit/s")
  made = wide_plan(
    topology,
    axis_name=axes,
    forms=dict(zip(SHAPES, forms)),
    allow=["LowBit(8)"],
  )
  assert [made.by_name[k].form for k in SHAPES] == list(forms)
  assert made.per_device and made.by_name["w"].compressor == "LowBit(8)"
  tx = OPTIMIZERS["adagrad"]
  program = set_up(made, wide_params, tx, mesh)

  def step(state, *batch):
    params, opt_state = state
    value, grads = program.value_and_grad(wide_loss)(params, *batch)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  run = jax.jit(zenjax.data_parallel(step, mesh, axes))
  state: Any = program.params, program.opt_state
  want: Any = wide_params()
  want_state = tx.init(want)
  for batch in batches(mesh, axes):
    state, _ = run(state, *batch)
    grads = jax.grad(wide_loss)(want, *batch)
    updates, want_state = tx.update(grads, want_state, want)
    want = optax.apply_updates(want, updates)
  got = zenjax.tables.unshard(state[0])
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-4)
  # Eight bits and a scale for each block, in place of 32 bits.
  sent = zenjax.stats(state[1])["compressed"]
  fewer = sent["dense_bytes"] / sent["wire_bytes"]
  assert fewer > (3.5 if len(axes) == 1 else 1.5), fewer


def test_a_plan_that_compresses():
  made, plain = wide_plan(allow=["LowBit(8)"]), wide_plan()
  assert zenjax.planner.Plan.from_json(made.to_json()) == made
  assert made.by_name["w"].seconds < plain.by_name["w"].seconds / 2
  assert "LowBit(8)" in str(made) and "LowBit(8)" not in str(plain)
  # Each device keeps its errors.
  held = lambda plan: (
    plan.memory_bytes - sum(leaf.memory_bytes or 0 for leaf in plan.leaves)
  )
  assert held(made) == held(plain) + 4 * 32 * 1024
  assert wide_plan(allow="lossless") == plain
  # Where tables cannot be as they were demanded, nothing is compressed.
  pods = Topology.preset("h100", 2, hosts=2, network="1 Gbit/s")
  axes = ("pod", "chip")
  for found, words in (
    (wide_plan(allow="LowBit(8)", forms={"a": XLA}), "XLA shards no tables"),
    (
      wide_plan(pods, axis_name=axes, allow="int8", forms={"a": SHARDED}),
      "no copies of sharded tables",
    ),
    (
      wide_plan(allow="int8", clip_norm=0.5, forms={"a": SHARDED}),
      "owners of rows do not see compressed gradients",
    ),
  ):
    assert not found.per_device and words in found.by_name["w"].reason
  with pytest.raises(TypeError, match="`allow` must hold 'lossless'"):
    wide_plan(allow=["tiny"])


def test_rows_are_rounded_where_a_dtype_is_allowed():
  mesh, axes = mesh_of(N)
  tx, forms = optax.sgd(0.1), {"a": ROWS, "b": ROWS, "c": SHARDED}
  made = plan(tx, axis_name=axes, forms=forms, allow=["bfloat16"])
  assert {leaf.wire_dtype for leaf in made.leaves[:3]} == {"bfloat16"}
  assert not made.per_device  # There is no gradient to compress.
  got, _ = trained(set_up(made, first_params, tx, mesh), mesh, axes)
  want = first_params()
  for batch in batches(mesh, axes):
    grads = jax.grad(loss)(want, *batch)
    want = jax.tree.map(lambda x, g: x - 0.1 * g, want, grads)
  for name, x in got.items():
    np.testing.assert_allclose(x, want[name], rtol=2e-2, atol=2e-4)
  exact = trained(
    set_up(plan(tx, axis_name=axes, forms=forms), first_params, tx, mesh),
    mesh,
    axes,
  )[0]
  assert all(np.any(got[name] != exact[name]) for name in SHAPES)


def counted(mesh, axes, name) -> Profile:
  """The rows of a table that the batches touch."""
  of_devices = [
    [np.unique(part % SHAPES[name][0]) for part in np.split(ids, N)]
    for ids, _ in jax.device_get([*batches(mesh, axes)])
  ]
  sizes = np.array([[len(ids) for ids in step] for step in of_devices])
  unions = [len(np.unique(np.concatenate(step))) for step in of_devices]
  return Profile(
    rows=sizes.mean(), fullest=sizes.max(), union=max(unions), devices=N
  )


@pytest.mark.parametrize("shape", [(N,), (2, 2)], ids=str)
@pytest.mark.parametrize("allow", [["lossless"], ["int8"]], ids=str)
def test_sharded_tables_begin_with_buffers_for_their_profile(shape, allow):
  """The first step takes one round, and the bytes that were predicted."""
  mesh, axes = mesh_of(*shape)
  network = Topology.preset("h100", 2, hosts=2, network="1 Gbit/s")
  made = plan(
    OPTIMIZERS["adagrad"],
    axis_name=axes,
    topology=network if len(shape) > 1 else HOSTS,
    forms=dict.fromkeys(SHAPES, SHARDED),
    profile={name: counted(mesh, axes, name) for name in SHAPES},
    allow=allow,
  )
  program = set_up(made, first_params, OPTIMIZERS["adagrad"], mesh)

  @jax.jit
  def step(params, opt_state, *batch):
    grads = program.value_and_grad(loss)(params, *batch)[1]
    return program.tx.update(grads, opt_state, params)[1]

  batch = next(batches(mesh, axes))
  seen = zenjax.stats(step(program.params, program.opt_state, *batch))
  for leaf in seen.values():
    assert leaf["rounds"] == leaf["fetch_rounds"] == 1
  predicted = sum(made.by_name[name].wire_bytes for name in SHAPES)
  sent = sum(leaf["wire_bytes"] for leaf in seen.values())
  assert 0.9 < sent / predicted < 1.2
  total = made.compare(seen).splitlines()[-1].split()
  assert total[:2] == ["all", "tables"]
  assert float(total[-1]) == pytest.approx(sent / predicted, abs=0.01)


def test_one_device_has_no_reasons():
  alone = plan(topology=Topology.network("1 Gbit/s", 1))
  assert not any("memory" in leaf.reason for leaf in alone.leaves)


@pytest.mark.parametrize(
  "forms", [(ROWS, ZERO1, ZERO1), (ROWS, SHARDED, SHARDED)], ids=str
)
def test_buffers_of_a_profile_are_tuned(forms):
  """In all forms: one recompilation follows, and then there is one round.

  JAX 0.10 may hang on CPUs with three exchanges in one step.
  """
  mesh, axes = mesh_of(N)
  seen = Profile(rows=20, fullest=20, union=40, devices=N)
  tx = OPTIMIZERS["adagrad"]
  made = plan(
    tx,
    axis_name=axes,
    forms=dict(zip(SHAPES, forms)),
    profile=dict.fromkeys(SHAPES, seen),
  )
  program = set_up(made, first_params, tx, mesh)

  def step(state, *batch):
    params, opt_state = state
    value, grads = program.value_and_grad(loss)(params, *batch)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  run: Any = jax.jit(step)
  state: Any = program.params, program.opt_state
  for i, batch in enumerate(batches(mesh, axes)):
    if i == STEPS // 2:
      compared = made.compare(zenjax.stats(state[1]))
      assert all(f"\n{name} " in compared for name in SHAPES)
      overflows = zenjax.stats(state[1])
      assert any(leaf["rounds"] > 1 for leaf in overflows.values())
      state = zenjax.tune(state)
    state, _ = run(state, *batch)
  assert run._cache_size() == 2
  assert all(leaf["rounds"] == 1 for leaf in zenjax.stats(state[1]).values())
  assert zenjax.tune(state) is state
  for name, want in plain("adagrad").items():
    got = zenjax.tables.unshard(state[0])[name]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_plan_without_an_optimizer_is_set_up_with_its_compressor():
  mesh, axes = mesh_of(N)
  shape = jax.ShapeDtypeStruct
  loss = lambda w, x: jnp.mean((x @ w) ** 2)
  made = plan_of(
    loss,
    shape((256, 256), jnp.float32),
    shape((8, 256), jnp.float32),
    topology=Topology.network("100 Mbit/s", N),
    axis_name=axes,
    allow=["LowBit(8)"],
  )
  program = set_up(made, jnp.ones((256, 256)), optax.sgd(0.1), mesh)

  def step(state, x):
    value, grads = program.value_and_grad(loss)(state[0], x)
    updates, opt_state = program.tx.update(grads, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt_state), value

  run = jax.jit(zenjax.data_parallel(step, mesh, axes))
  split = jax.NamedSharding(mesh, jax.P(axes))
  x = jax.device_put(jnp.ones((8 * N, 256)), split)
  state, _ = run((program.params, program.opt_state), x)
  sent = zenjax.stats(state[1])["compressed"]
  assert made.per_device and sent["dense_bytes"] > 3.5 * sent["wire_bytes"]


def test_what_is_allowed_makes_no_plan_slower():
  """With a clip, no table is sharded if gradients are compressed."""
  shape = jax.ShapeDtypeStruct
  params = {
    "a": shape((12_000_000, 64), jnp.float32),
    "w": shape((4096, 2048), jnp.float32),
  }
  loss = lambda p, ids, x: p["a"][ids].mean() + jnp.mean(x @ p["w"])
  make = lambda **options: plan_of(
    loss,
    params,
    shape((2048, 120), jnp.int32),
    shape((2048, 4096), jnp.float32),
    tx=optax.adagrad(0.1),
    topology=Topology.network("25 Gbit/s", 16, machine="h100"),
    **options,
  )
  low, clip = {"allow": ["LowBit(8)"]}, {"clip_norm": 1.0}
  plain, both, clipped = make(), make(**low, **clip), make(**clip)
  compressed = make(**low)
  assert compressed.per_device and compressed.seconds < plain.seconds
  assert both.seconds == clipped.seconds and not both.per_device
  assert both.by_name["a"].form == SHARDED
  assert "with compression, a step takes 1." in both.by_name["w"].reason
  assert "owners of rows do not see" in both.by_name["w"].reason
  # Owners push twice: first for the norm, and then for their step.
  more = clipped.by_name["a"].wire_bytes / plain.by_name["a"].wire_bytes
  assert 1.4 < more < 1.6
  assert clipped.seconds > plain.seconds


def test_a_demanded_form_may_be_slower_than_pmean():
  shape = jax.ShapeDtypeStruct
  made = plan_of(
    lambda p, ids: p["a"][ids].mean(),
    {"a": shape((512, 64), jnp.float32)},
    shape((60_000,), jnp.int32),
    tx=optax.adagrad(0.1),
    topology=HOSTS,
    forms={"a": XLA},
  )
  assert made.gain < 0.2 and made.better == "pmean"
  assert "no difference" not in str(made)


def test_one_small_table_saves_the_latency_of_an_all_reduce():
  shape = jax.ShapeDtypeStruct
  made = plan_of(
    lambda p, ids: jnp.mean(p["t"][ids] ** 2),
    {"t": shape((4096, 8), jnp.float32)},
    shape((4096,), jnp.int32),
    tx=optax.adagrad(0.1),
    topology=Topology.network("25 Gbit/s", 8),
  )
  (leaf,) = made.leaves
  assert leaf.form == ROWS and leaf.seconds < leaf.dense_seconds / 2
  assert made.better == "plan"


def test_less_memory_takes_other_forms_and_then_says_that_nothing_fits():
  free = plan()
  assert [free.by_name[k].form for k in SHAPES] == [ROWS] * 3
  held = free.memory_bytes or 0
  assert plan(memory_bytes=held).leaves == free.leaves
  for part, form in ((0.75, ZERO1), (0.45, SHARDED)):
    less = plan(memory_bytes=part * held)
    assert (less.memory_bytes or 0) <= part * held
    assert less.seconds > free.seconds
    assert form in {leaf.form for leaf in less.leaves}
  with pytest.raises(ValueError, match="must hold the tables, at least"):
    plan(memory_bytes=0.1 * held)
  with pytest.raises(ValueError, match="must hold the tables, at least"):
    plan(memory_bytes=0.75 * held, forms=dict.fromkeys(SHAPES, ROWS))


def test_the_limit_is_the_memory_of_the_machine():
  """Three quarters of it: activations need the rest."""
  shape = jax.ShapeDtypeStruct
  params = {"users": shape((300_000_000, 128), jnp.float32)}
  pod = Topology.preset("h100", 8, hosts=16, network="100 Gbit/s")
  made = lambda **options: plan_of(
    lambda p, ids: (p["users"][ids] ** 2).mean(),
    params,
    shape((1024,), jnp.int32),
    tx=optax.adagrad(0.1),
    topology=pod,
    axis_name=("host", "device"),
    **options,
  )
  found = made()
  assert found.limit_bytes == 0.75 * 80e9
  (table,) = found.leaves
  assert table.form == SHARDED and (found.memory_bytes or 0) < 60e9
  assert "x as long, but too much memory" in table.reason
  assert "38.4 GB" in str(found) and "the limit is 60 GB" in str(found)
  # 154 GB of rows and as much of state and of a dense gradient.
  assert not found.dense_fits and found.better == "plan"
  assert str(found).endswith("with pmean alone, which does not fit in memory.")
  assert made(memory_bytes=1e12).leaves[0].form == ROWS


@pytest.mark.parametrize("form", usual(FORMS, ROWS, SHARDED))
def test_memory_is_that_of_the_compiled_step(form):
  mesh, axes = mesh_of(N)
  tx, rows = optax.adagrad(0.1), 65536
  mean = lambda params, ids: (params["t"][ids].mean(1) ** 2).mean()
  init = lambda: {"t": jnp.ones((rows, 16))}
  made = plan_of(
    mean,
    jax.eval_shape(init),
    jax.ShapeDtypeStruct((BATCH, 2), jnp.int32),
    tx=tx,
    topology=HOSTS,
    axis_name=axes,
    forms={"t": form},
  )
  program = set_up(made, init, tx, mesh)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, ids):
    _, grads = program.value_and_grad(mean)(params, ids)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  split = jax.NamedSharding(mesh, jax.P(axes))
  ids = jax.ShapeDtypeStruct((N * BATCH, 2), jnp.int32, sharding=split)
  lowered = step.lower(program.params, program.opt_state, ids)
  found: Any = lowered.compile().memory_analysis()
  held = found.argument_size_in_bytes + found.temp_size_in_bytes
  assert made.memory_bytes == pytest.approx(held, rel=0.1)


def test_the_order_of_forms_is_that_which_was_measured():
  """Forms of `results/tables-*.json`, from the densities of these batches."""
  names = {"replicated": DENSE, "row-sharded": XLA}
  names |= {"rows": ROWS, "sharded": SHARDED}
  for path in sorted(_RESULTS.glob("tables-*.json")):
    document = json.loads(path.read_text())
    results = {
      names[r["name"]]: r for r in document["results"] if r["name"] in names
    }
    options, facts = document["options"], results[ROWS]["facts"]
    hosts, rate = options["hosts"], options["rate"]
    seen = Profile(
      rows=facts["distinct"],
      fullest=facts["distinct"],
      union=facts["union"],
      devices=hosts,
    )
    shape = jax.ShapeDtypeStruct
    found = plan_of(
      lambda params, ids: params["table"][ids].sum(),
      {"table": shape((options["rows"], options["width"]), jnp.float32)},
      shape((options["tokens"],), jnp.int32),
      tx=optax.adagrad(0.1),
      topology=Topology.network(rate, hosts),
      profile={"table": seen},
    )
    (table,) = found.leaves
    predicted = {table.form: table.seconds}
    for other in table.others:
      predicted.setdefault(other.form, other.seconds)
    measured = {k: np.median(r["times_s"]) for k, r in results.items()}
    assert table.form == min(measured, key=lambda k: measured[k])
    order = sorted(measured, key=lambda k: measured[k])
    assert sorted(measured, key=lambda k: predicted[k]) == order


def test_arrays_are_left_out_where_the_optimizer_moves_all_rows():
  schedule = optax.linear_schedule(0.0, 0.1, 10_000)
  for tx in (OPTIMIZERS["adam"], optax.adam(schedule)):
    with pytest.raises(ValueError, match="may change rows that have no"):
      plan(tx, forms={"a": DENSE})
    assert DENSE not in {x.form for x in plan(tx).by_name["a"].others}
  # A clip by a norm moves none, and leaves no rows to owners.
  kept = plan(OPTIMIZERS["clipped"], forms={"a": DENSE})
  assert kept.by_name["a"].form == DENSE
  assert "clip_norm=" in kept.by_name["b"].reason
  made = plan(forms=dict.fromkeys(SHAPES, ROWS) | {"a": DENSE})
  mesh, _ = mesh_of(N)
  made = dataclasses.replace(made, mesh=(("chip", N),))
  with pytest.raises(ValueError, match="`tx` does not fit the plan"):
    set_up(made, first_params, OPTIMIZERS["adam"], mesh)


def test_a_norm_of_all_gradients_has_one_transformation():
  forms = {"a": SHARDED, "b": ROWS}
  with pytest.raises(ValueError, match="updates depend on a sum over all"):
    plan(clip_norm=0.5, forms=forms)
  with pytest.raises(ValueError, match="see only some of them.*clip_norm"):
    plan(OPTIMIZERS["clipped"], forms={"a": SHARDED})
  mesh, axes = mesh_of(N)
  for chosen, words in (
    ({"b": SHARDED}, "see only some of them.*clip_norm"),
    ({"b": XLA}, "it sums over all gradients"),
  ):
    made = plan(axis_name=axes, forms={"a": ROWS, "c": ROWS} | chosen)
    with pytest.raises(ValueError, match=words):
      set_up(made, first_params, OPTIMIZERS["clipped"], mesh)


def test_gradients_that_are_not_of_tables_cost_what_pmean_costs():
  """A full softmax costs the same in every form, and the plan says so."""
  shape = jax.ShapeDtypeStruct
  params = {
    "in": shape((4096, 16), "float32"),
    "out": shape((16, 9000), "float32"),
  }
  loss = lambda params, ids: jnp.mean(params["in"][ids] @ params["out"])
  args = params, shape((64,), jnp.int32)
  tx = OPTIMIZERS["adagrad"]
  made = plan_of(loss, *args, tx=tx, topology=HOSTS)
  every = zenjax.planner.plan(
    zenjax.value_and_grad(loss), *args, topology=HOSTS
  )
  assert made.by_name["out"] == every.by_name["out"]
  assert made.dense_seconds >= every.dense_seconds > 0  # With updates.


def test_many_tables_of_one_width_are_to_be_joined():
  shape = jax.ShapeDtypeStruct
  params = {f"t{i}": shape((9000 + i, 8), jnp.float32) for i in range(5)}
  look_up = lambda params, ids: sum(x[ids].sum() for x in params.values())

  def made(form: str):
    return plan_of(
      look_up,
      params,
      shape((64,), jnp.int32),
      tx=optax.adagrad(0.1),
      topology=HOSTS,
      forms=dict.fromkeys(params, form),
    )

  assert "5 sharded tables have 8 columns" in str(made(SHARDED))
  assert "joined" not in str(made(ROWS))


def test_text_and_json():
  made = plan(memory_bytes=1e9)
  assert zenjax.planner.Plan.from_json(made.to_json()) == made
  text = str(made)
  for name in SHAPES:
    assert f"\n{name} " in text
  assert "the limit is 1 GB" in text and "densities assumed" in text


def test_refusals():
  mesh, _ = mesh_of(N)
  with pytest.raises(ValueError, match="`mesh` must have the axes of the plan"):
    set_up(plan(), first_params, optax.adagrad(0.1), mesh)
  made = plan(axis_name="chip")
  with pytest.raises(ValueError, match="`params` must be as in the plan"):
    set_up(made, {"a": jnp.zeros((9, 9))}, optax.adagrad(0.1), mesh)
  with pytest.raises(ValueError, match="`forms` must name tables"):
    plan(forms={"w": DENSE})
  for form in ("split", None):
    with pytest.raises(ValueError, match="'a'.* must be one of 'replicated'"):
      plan(forms={"a": form})
  # The plan adds the synchronization, and shards the tables.
  synced = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  with pytest.raises(ValueError, match="`tx` must be the optimizer as for one"):
    plan(synced)
  with pytest.raises(ValueError, match="`tx` must not be `optax.MultiSteps`"):
    plan(optax.MultiSteps(optax.sgd(0.1), 2))
  sharded = zenjax.tables.shard(first_params(), mesh, "chip")
  with pytest.raises(ValueError, match="must not hold a ShardedTable, but 'a'"):
    set_up(made, sharded, optax.adagrad(0.1), mesh)
  with pytest.raises(TypeError, match="'a' is a shape"):
    set_up(made, jax.eval_shape(first_params), optax.adagrad(0.1), mesh)
  swapped: Any = ((optax.adam, mesh), (optax.adagrad(0.1), None))
  for tx, on in swapped:
    with pytest.raises(TypeError, match="`(tx|mesh)` must be"):
      set_up(made, first_params, tx, on)
  with pytest.raises(ValueError, match="update a row by that row alone.*'a'"):
    plan(optax.lamb(0.1))
  wrong: dict[str, Any] = {"forms": "sharded", "tx": "adam", "clip_norm": "1"}
  for name, value in wrong.items():
    with pytest.raises(TypeError, match=f"`{name}` must"):
      plan(**{name: value})
  for norm in (-1.0, np.nan):
    with pytest.raises(ValueError, match="`clip_norm` must be positive"):
      plan(clip_norm=norm)
  kept = plan(clip_norm=np.float32(0.5))
  assert zenjax.planner.Plan.from_json(kept.to_json()) == kept
  with pytest.raises(ValueError, match="`value_and_grad` must return rows"):
    plan_of(
      lambda p: (p["t"] ** 2).sum(),
      {"t": jnp.zeros((4096, 8))},
      tx=optax.sgd(0.1),
      topology=HOSTS,
    )
