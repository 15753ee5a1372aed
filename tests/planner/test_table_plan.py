"""Plans with an optimizer: the choice of forms, and programs set up by it."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from planned import ids
from planned import plan_of_tables
from planned import shape
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


def pods_of(network):
  """Two hosts of two devices."""
  return Topology.preset("h100", 2, hosts=2, network=network)


def batches(mesh, axes):
  rng = np.random.default_rng(1)
  split = jax.NamedSharding(mesh, jax.P(axes))
  for _ in range(STEPS):
    ids = (rng.zipf(1.2, (N * BATCH, 2)) % 4096).astype(np.int32)
    yield jax.device_put((ids, np.sin(ids[:, 0]).astype(np.float32)), split)


ADAGRAD = optax.adagrad(0.1)


def plan(
  tx: Any = ADAGRAD, *, of=(loss, first_params), topology=HOSTS, **options
):
  loss, init = of
  batch = ids(BATCH, 2), shape(BATCH)
  return zenjax.planner.plan(
    zenjax.value_and_grad(loss),
    *(jax.eval_shape(init), *batch),
    tx=tx,
    topology=topology,
    **options,
  )


def mesh_of(*shape):
  axes = ("pod", "chip")[-len(shape) :]
  kinds = (jax.sharding.AxisType.Auto,) * len(shape)
  return jax.make_mesh(shape, axes, axis_types=kinds), axes


def trained(program, mesh, axes, *, placed=True):
  """Parameters after some steps: in the order of their rows, and as placed."""
  run: Any = jax.jit(step_of(program))
  state = program.params, program.opt_state
  for batch in batches(mesh, axes):
    state, _ = run(state, *batch)
  # `set_up` places everything as steps return it.
  assert run._cache_size() == 1 or not placed
  return zenjax.tables.unshard(state[0]), state[0]


def step_of(program, loss=loss):
  """Returns `(state, *batch) -> (state, value)` of a program."""

  def step(state, *batch):
    params, opt_state = state
    value, grads = program.value_and_grad(loss)(params, *batch)
    updates, opt_state = program.tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return step


def check_same(got, want, rtol=2e-5, atol=2e-6):
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol=rtol, atol=atol)


def rows_on_one(x):
  """How many rows the first device holds."""
  return x.addressable_shards[0].data.shape[0]


@functools.cache
def plain(optimizer, clip_norm=None):
  """Parameters of the plain program, on one device."""
  tx, params, both = OPTIMIZERS[optimizer], first_params(), jax.value_and_grad
  if clip_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
  if optimizer == "adam":
    tables = {k: k in SHAPES for k in params}
    both = functools.partial(zenjax.value_and_grad, tables=tables)
    tx = zenjax.lazy_rows(tx)
  program = zenjax.planner.Program(
    params, tx.init(params), optax.with_extra_args_support(tx), both
  )
  return trained(program, *mesh_of(1), placed=False)[0]


OPTIMIZERS = {
  "adagrad": ADAGRAD,
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), ADAGRAD),
  "adam": optax.adam(0.01),
  "sgd": optax.sgd(0.1),
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
  made = plan(axis_name=axes, forms=dict(zip(SHAPES, forms)))
  assert [made.by_name[k].form for k in SHAPES] == list(forms)
  program = set_up(made, first_params, ADAGRAD, mesh)
  got, params = trained(program, mesh, axes)
  check_same(got, plain("adagrad"))
  for tree in (program.params, params):
    for name, form in zip(SHAPES, forms):
      rows = jax.tree.leaves(tree[name])[0]
      parts = N if form in (XLA, SHARDED) else 1
      assert rows_on_one(rows) == len(rows) // parts


def test_tables_of_one_shape_may_have_different_forms():
  """The state of each is placed like its own table, whatever shape it has."""
  mesh, axes = mesh_of(N)
  ones = functools.partial(jnp.ones, (4096, 16))
  first = lambda: {"t": ones(), "emb": {"t": ones()}}
  look_up = lambda p, ids: (p["t"][ids] * p["emb"]["t"][ids]).sum(1).mean()
  made = zenjax.planner.plan(
    zenjax.value_and_grad(look_up),
    *(jax.eval_shape(first), ids(BATCH)),
    tx=ADAGRAD,
    topology=HOSTS,
    axis_name=axes,
    forms={"t": XLA, "emb.t": DENSE},
  )
  program = set_up(made, first, ADAGRAD, mesh)
  run: Any = jax.jit(step_of(program, look_up))
  state = program.params, program.opt_state
  split = jax.NamedSharding(mesh, jax.P(axes))
  for _ in range(2):
    state, _ = run(state, jax.device_put(jnp.arange(N * BATCH), split))
  assert run._cache_size() == 1
  for tree in (state[0], state[1][0].sum_of_squares):
    assert rows_on_one(tree["t"]) == 1024
    assert rows_on_one(tree["emb"]["t"]) == 4096


def test_one_exchange_needs_no_further_gain():
  """A fifth is enough for the first, as predictions may be wrong by that."""
  hosts = Topology.network("1 Gbit/s", 64)
  made = plan_of_tables({"t": (12_352, 64)}, 16_000, topology=hosts)
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
  rows = SHAPES["a"][0]
  state = [x for x in jax.tree.leaves(program.opt_state) if jnp.ndim(x) == 2]
  found = [rows_on_one(x) for x in state if len(x) == rows]
  assert found and set(found) == {rows // N}


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
  check_same(got, plain(optimizer, clip_norm))


@pytest.mark.usefixtures("as_optax_computes")
def test_groups_of_devices_have_copies():
  mesh, axes = mesh_of(2, 2)
  pods = pods_of("10 Gbit/s")
  forms = {"a": SHARDED, "b": SHARDED, "c": DENSE}
  made = plan(topology=pods, axis_name=axes, forms=forms, clip_norm=0.5)
  program = set_up(made, first_params, ADAGRAD, mesh)
  got, params = trained(program, mesh, axes)
  check_same(got, plain("adagrad", 0.5))
  value = params["a"].value
  assert rows_on_one(value) == len(value) // 2


def wide_loss(params, ids, y):
  rows = [params[k][ids % SHAPES[k][0]].mean(1) for k in SHAPES]
  return optax.l2_loss(
    (jnp.concatenate(rows, -1) @ params["w"]).sum(-1), y
  ).mean()


def wide_params():
  return first_params() | {"w": jnp.full((32, 1024), 0.01)}


WIDE = wide_loss, wide_params
PODS = {"topology": pods_of("1 Gbit/s"), "axis_name": ("pod", "chip")}


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
  made = plan(
    of=WIDE,
    topology=HOSTS if len(axes) == 1 else pods_of("1 Gbit/s"),
    axis_name=axes,
    forms=dict(zip(SHAPES, forms)),
    allow=["LowBit(8)"],
  )
  assert [made.by_name[k].form for k in SHAPES] == list(forms)
  assert made.per_device and made.by_name["w"].compressor == "LowBit(8)"
  program = set_up(made, wide_params, ADAGRAD, mesh)
  step = step_of(program, wide_loss)
  run = jax.jit(zenjax.data_parallel(step, mesh, axes))
  state: Any = program.params, program.opt_state
  want: Any = wide_params()
  want_state = ADAGRAD.init(want)
  for batch in batches(mesh, axes):
    state, _ = run(state, *batch)
    grads = jax.grad(wide_loss)(want, *batch)
    updates, want_state = ADAGRAD.update(grads, want_state, want)
    want = optax.apply_updates(want, updates)
  check_same(zenjax.tables.unshard(state[0]), want, rtol=1e-3, atol=1e-4)
  # Eight bits and a scale for each block, in place of 32 bits.
  sent = zenjax.stats(state[1])["compressed"]
  fewer = sent["dense_bytes"] / sent["wire_bytes"]
  assert fewer > (3.5 if len(axes) == 1 else 1.5), fewer


def test_a_plan_that_compresses():
  made, plain = plan(of=WIDE, allow=["LowBit(8)"]), plan(of=WIDE)
  assert zenjax.planner.Plan.from_json(made.to_json()) == made
  assert made.by_name["w"].seconds < plain.by_name["w"].seconds / 2
  assert "LowBit(8)" in str(made) and "LowBit(8)" not in str(plain)
  # Each device keeps its errors.
  held = lambda plan: (
    plan.memory_bytes - sum(leaf.memory_bytes or 0 for leaf in plan.leaves)
  )
  assert held(made) == held(plain) + 4 * 32 * 1024
  assert plan(of=WIDE, allow="lossless") == plain


def test_a_plan_that_compresses_on_fewer_devices():
  """A new plan could have another number of parts, and so another state."""
  slow = optax.adagrad(1e-3)
  made = plan(slow, of=WIDE, allow=["LowBit(8)"])

  def losses_on(*devices):
    before: Any = None
    losses = []
    for n in devices:
      mesh, axes = mesh_of(n)
      same = dataclasses.replace(made, mesh=tuple(mesh.shape.items()))
      program = set_up(same, wide_params, slow, mesh)
      run = zenjax.data_parallel(step_of(program, wide_loss), mesh, axes)
      state: Any = program.params, program.opt_state
      if before is not None:
        saved = zenjax.to_checkpoint(before)
        state = zenjax.from_checkpoint(saved, mesh, axes, like=state)
      before, loss = jax.jit(run)(state, *next(batches(mesh, axes)))
      losses.append(float(loss))
    return losses

  stayed = losses_on(N, N, N)
  assert stayed[-1] < stayed[0]
  np.testing.assert_allclose(losses_on(N, N // 2, 1), stayed, rtol=1e-3)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"forms": {"a": XLA}}, "XLA shards no tables"),
    ({"forms": {"a": SHARDED}, **PODS}, "no copies of sharded tables"),
    (
      {"clip_norm": 0.5, "forms": {"a": SHARDED}},
      "owners of rows do not see compressed gradients",
    ),
  ],
)
def test_forms_that_were_demanded_may_rule_out_compression(options, words):
  found = plan(of=WIDE, allow="int8", **options)
  assert not found.per_device and words in found.by_name["w"].reason


def test_rows_are_rounded_where_a_dtype_is_allowed():
  mesh, axes = mesh_of(N)
  tx, forms = OPTIMIZERS["sgd"], {"a": ROWS, "b": ROWS, "c": SHARDED}
  made = plan(tx, axis_name=axes, forms=forms, allow=["bfloat16"])
  assert {leaf.wire_dtype for leaf in made.leaves[:3]} == {"bfloat16"}
  assert not made.per_device  # There is no gradient to compress.
  got, _ = trained(set_up(made, first_params, tx, mesh), mesh, axes)
  exact = plain("sgd")
  check_same(got, exact, rtol=2e-2, atol=2e-4)
  # More than the order of additions makes of it.
  for name in SHAPES:
    assert not np.allclose(got[name], exact[name], rtol=0, atol=1e-6)


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
  made = plan(
    axis_name=axes,
    topology=HOSTS if len(shape) == 1 else pods_of("1 Gbit/s"),
    forms=dict.fromkeys(SHAPES, SHARDED),
    profile={name: counted(mesh, axes, name) for name in SHAPES},
    allow=allow,
  )
  program = set_up(made, first_params, ADAGRAD, mesh)
  state = program.params, program.opt_state
  state, _ = jax.jit(step_of(program))(state, *next(batches(mesh, axes)))
  seen = zenjax.stats(state[1])
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
  made = plan(
    axis_name=axes,
    forms=dict(zip(SHAPES, forms)),
    profile=dict.fromkeys(SHAPES, seen),
  )
  program = set_up(made, first_params, ADAGRAD, mesh)
  run: Any = jax.jit(step_of(program))
  state: Any = program.params, program.opt_state
  for i, batch in enumerate(batches(mesh, axes)):
    if i == STEPS // 2:
      overflows = zenjax.stats(state[1])
      assert all(f"\n{x} " in made.compare(overflows) for x in SHAPES)
      assert any(leaf["rounds"] > 1 for leaf in overflows.values())
      state = zenjax.tune(state)
    state, _ = run(state, *batch)
  assert run._cache_size() == 2
  assert all(leaf["rounds"] == 1 for leaf in zenjax.stats(state[1]).values())
  assert zenjax.tune(state) is state
  check_same(zenjax.tables.unshard(state[0]), plain("adagrad"))


def test_a_plan_without_an_optimizer_is_set_up_with_its_compressor():
  mesh, axes = mesh_of(N)
  loss = lambda w, x: jnp.mean((x @ w) ** 2)
  made = zenjax.planner.plan(
    zenjax.value_and_grad(loss),
    *(shape(256, 256), shape(8, 256)),
    topology=Topology.network("100 Mbit/s", N),
    axis_name=axes,
    allow=["LowBit(8)"],
  )
  program = set_up(made, jnp.ones((256, 256)), optax.sgd(0.1), mesh)
  step = step_of(program, loss)
  run = jax.jit(zenjax.data_parallel(step, mesh, axes))
  split = jax.NamedSharding(mesh, jax.P(axes))
  x = jax.device_put(jnp.ones((8 * N, 256)), split)
  state, _ = run((program.params, program.opt_state), x)
  sent = zenjax.stats(state[1])["compressed"]
  assert made.per_device and sent["dense_bytes"] > 3.5 * sent["wire_bytes"]


def test_what_is_allowed_makes_no_plan_slower():
  """With a clip, no table is sharded if gradients are compressed."""
  params = {"a": shape(12_000_000, 64), "w": shape(4096, 2048)}
  loss = lambda p, ids, x: p["a"][ids].mean() + jnp.mean(x @ p["w"])
  make = lambda **options: zenjax.planner.plan(
    zenjax.value_and_grad(loss),
    *(params, ids(2048, 120), shape(2048, 4096)),
    tx=ADAGRAD,
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
  made = plan_of_tables(
    {"a": (512, 64)}, 60_000, tx=ADAGRAD, topology=HOSTS, forms={"a": XLA}
  )
  assert made.gain < 0.2 and made.better == "pmean"
  assert "no difference" not in str(made)


def test_a_plan_compares_with_tables_that_xla_shards():
  make = functools.partial(
    plan_of_tables, {"a": (80_000, 64)}, 4096, tx=ADAGRAD, topology=HOSTS
  )
  by_xla = make(forms={"a": XLA})
  for made in (make(), by_xla):
    (ms,) = re.findall(r"with tables sharded by XLA ([\d.]+) ms", str(made))
    assert float(ms) == pytest.approx(1e3 * by_xla.seconds, rel=0.01)
  assert "sharded by XLA" not in str(make(tx=optax.adam(0.1)))


def test_one_small_table_saves_the_latency_of_an_all_reduce():
  hosts = Topology.network("25 Gbit/s", 8)
  made = plan_of_tables({"t": (4096, 8)}, 4096, tx=ADAGRAD, topology=hosts)
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
  rows = dict.fromkeys(SHAPES, ROWS)
  for part, forms in ((0.1, None), (0.75, rows)):
    with pytest.raises(ValueError, match="must hold the tables, at least"):
      plan(memory_bytes=part * held, forms=forms)


def test_the_limit_is_the_memory_of_the_machine():
  """Three quarters of it: activations need the rest."""
  made = lambda **options: plan_of_tables(
    {"users": (300_000_000, 128)},
    1024,
    tx=ADAGRAD,
    topology=Topology.preset("h100", 8, hosts=16, network="100 Gbit/s"),
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
  mean = lambda params, ids: (params["t"][ids].mean(1) ** 2).mean()
  init = lambda: {"t": jnp.ones((65536, 16))}
  made = zenjax.planner.plan(
    zenjax.value_and_grad(mean),
    *(jax.eval_shape(init), ids(BATCH, 2)),
    tx=ADAGRAD,
    topology=HOSTS,
    axis_name=axes,
    forms={"t": form},
  )
  program = set_up(made, init, ADAGRAD, mesh)
  step = jax.jit(step_of(program, mean), donate_argnums=0)
  split = jax.NamedSharding(mesh, jax.P(axes))
  batch = jax.ShapeDtypeStruct((N * BATCH, 2), jnp.int32, sharding=split)
  lowered = step.lower((program.params, program.opt_state), batch)
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
    distinct, hosts = facts["distinct"], options["hosts"]
    seen = Profile(
      rows=distinct, fullest=distinct, union=facts["union"], devices=hosts
    )
    found = plan_of_tables(
      {"table": (options["rows"], options["width"])},
      options["tokens"],
      tx=ADAGRAD,
      topology=Topology.network(options["rate"], hosts),
      profile={"table": seen},
    )
    (table,) = found.leaves
    predicted = {table.form: table.seconds}
    for other in table.others:
      predicted.setdefault(other.form, other.seconds)
    order = sorted(results, key=lambda k: np.median(results[k]["times_s"]))
    assert table.form == order[0]
    assert sorted(results, key=lambda k: predicted[k]) == order


def test_arrays_are_left_out_where_the_optimizer_moves_all_rows():
  for tx in (OPTIMIZERS["adam"], SCHEDULED):
    assert DENSE not in {x.form for x in plan(tx).by_name["a"].others}
  # A clip by a norm moves none, and leaves no rows to owners.
  kept = plan(OPTIMIZERS["clipped"], forms={"a": DENSE})
  assert kept.by_name["a"].form == DENSE
  assert "clip_norm=" in kept.by_name["b"].reason


def test_gradients_that_are_not_of_tables_cost_what_pmean_costs():
  """A full softmax costs the same in every form, and the plan says so."""
  params = {"in": shape(4096, 16), "out": shape(16, 9000)}
  loss = lambda params, ids: jnp.mean(params["in"][ids] @ params["out"])
  make = functools.partial(
    zenjax.planner.plan,
    zenjax.value_and_grad(loss),
    *(params, ids(64)),
    topology=HOSTS,
  )
  made, every = make(tx=ADAGRAD), make()
  assert made.by_name["out"] == every.by_name["out"]
  assert made.dense_seconds >= every.dense_seconds > 0  # With updates.


def test_many_tables_of_one_width_are_to_be_joined():
  tables = {f"t{i}": (9000 + i, 8) for i in range(5)}
  said = lambda form: str(
    plan_of_tables(
      tables,
      64,
      tx=ADAGRAD,
      topology=HOSTS,
      forms=dict.fromkeys(tables, form),
    )
  )
  assert "5 sharded tables have 8 columns" in said(SHARDED)
  assert "joined" not in said(ROWS)


def test_text_and_json():
  """Also of numbers of NumPy."""
  made = plan(memory_bytes=1e9, clip_norm=np.float32(0.5))
  assert zenjax.planner.Plan.from_json(made.to_json()) == made
  text = str(made)
  for name in SHAPES:
    assert f"\n{name} " in text
  assert "the limit is 1 GB" in text and "densities assumed" in text


def planned(tx: Any = ADAGRAD, **options):
  return lambda: plan(tx, **options)


def set_up_with(
  form=ROWS, others=ROWS, *, tx: Any = ADAGRAD, mesh: Any = mesh_of, **options
):
  """Sets up a plan, which has one table in a form and two in another."""
  params = options.pop("params", first_params)
  forms = {"a": others, "b": form, "c": others}

  def call():
    made = plan(**{"axis_name": "chip", "forms": forms} | options)
    set_up(made, params(), tx, mesh and mesh(N)[0])

  return call


def sharded():
  return zenjax.tables.shard(first_params(), mesh_of(N)[0], "chip")


def shapes():
  return jax.eval_shape(first_params)


ONE = jnp.zeros((4096, 8))
MIXED = {"a": SHARDED, "b": ROWS}
UNREAD = lambda params, *_: (params["t"] ** 2).sum(), lambda: {"t": ONE}
SCHEDULED = optax.adam(optax.linear_schedule(0.0, 0.1, 10_000))
SYNCED = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
ADAM, CLIPPED = OPTIMIZERS["adam"], OPTIMIZERS["clipped"]
MULTI_STEPS = optax.MultiSteps(optax.sgd(0.1), 2)
REFUSED = [
  # Forms that an optimizer rules out.
  (planned(ADAM, forms={"a": DENSE}), ValueError, "may change rows that have"),
  (planned(SCHEDULED, forms={"a": DENSE}), ValueError, "may change rows that"),
  (set_up_with(DENSE, ROWS, tx=ADAM), ValueError, "`tx` does not fit the plan"),
  (planned(optax.lamb(0.1)), ValueError, "update a row by that row alone.*'a'"),
  # A norm of all gradients has one transformation.
  (planned(forms=MIXED, clip_norm=0.5), ValueError, "depend on a sum over all"),
  (planned(CLIPPED, forms=MIXED), ValueError, "only some of them.*clip_norm"),
  (set_up_with(SHARDED, ROWS, tx=CLIPPED), ValueError, "only some.*clip_norm"),
  (set_up_with(XLA, ROWS, tx=CLIPPED), ValueError, "sums over all gradients"),
  # The plan adds the synchronization, and shards the tables.
  (planned(SYNCED), ValueError, "`tx` must be the optimizer as for one"),
  (planned(MULTI_STEPS), ValueError, "`tx` must not be `optax.MultiSteps`"),
  (set_up_with(params=sharded), ValueError, "hold a ShardedTable, but 'a'"),
  # Arguments of `plan`.
  (planned(forms={"w": DENSE}), ValueError, "`forms` must name tables"),
  (planned(forms={"a": "split"}), ValueError, "'a'.* one of 'replicated'"),
  (planned(forms={"a": None}), ValueError, "'a'.* one of 'replicated'"),
  (planned(forms={"a": ZERO1}, **PODS), ValueError, "with one level"),
  (planned(forms="sharded"), TypeError, "`forms` must"),
  (planned("adam"), TypeError, "`tx` must"),
  (planned(clip_norm="1"), TypeError, "`clip_norm` must"),
  (planned(clip_norm=-1.0), ValueError, "`clip_norm` must be positive"),
  (planned(clip_norm=np.nan), ValueError, "`clip_norm` must be positive"),
  (planned(allow=["tiny"]), TypeError, "`allow` must hold 'lossless'"),
  (planned(of=UNREAD), ValueError, "`value_and_grad` must return rows"),
  # Arguments of `set_up`.
  (set_up_with(axis_name="data"), ValueError, "`mesh` must have the axes of"),
  (set_up_with(mesh=None), TypeError, "`mesh` must be"),
  (set_up_with(tx=optax.adam), TypeError, "`tx` must be"),
  (set_up_with(params=lambda: {"a": ONE}), ValueError, "as in the plan"),
  (set_up_with(params=shapes), TypeError, "'a' is a shape"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
  with pytest.raises(error, match=words):
    call()
