"""A plan: what zen_sync does by it, and where it refuses one."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from refusals import refused
import runners
import stablehlo

import zenjax

N = 4
SHAPES = {"a": (640, 8), "b": (700, 4), "c": (512, 8), "w": (16, 4)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def leaf(name, **choice):
  return zenjax.planner.LeafPlan(
    name=name, shape=SHAPES[name], dtype="float32", **choice
  )


PLAN = zenjax.planner.Plan(
  leaves=(
    leaf("a", scheme="zen", column_groups=1, group=0, union=80.0),
    leaf("b", scheme="zen", column_groups=4, group=1, capacities=(16, 64)),
    leaf("c", scheme="all_gather", group=2, wire_dtype="bfloat16"),
    leaf("w", scheme="dense"),
  ),
  mesh=(("data", N),),
  seconds=0.010,
  dense_seconds=0.030,
  compute_seconds=0.008,
)


def changed(name, **choice):
  """The plan with another choice for one leaf."""
  leaves = [
    dataclasses.replace(x, **choice) if x.name == name else x
    for x in PLAN.leaves
  ]
  return dataclasses.replace(PLAN, leaves=tuple(leaves))


def synced(plan, params=PARAMS):
  """Synchronizes a stack of gradients by a plan."""
  tx = zenjax.zen_sync("data", plan=plan)
  return jax.vmap(lambda g: tx.update(g, tx.init(params)), axis_name="data")


@pytest.fixture(scope="module")
def ran():
  rng = np.random.default_rng(0)
  stack = {}
  for name, shape in SHAPES.items():
    rows = rng.random((N, shape[0], 1)) < (1 if name == "w" else 0.03)
    values = rng.integers(-8, 9, (N, *shape))
    stack[name] = (rows * values).astype(np.float32)
  out, state = jax.jit(synced(PLAN))(stack)
  return stack, out, jax.tree.map(lambda x: x[0], state)


def test_equals_pmean(ran):
  stack, out, _ = ran
  for name in SHAPES:
    oracle.check(np.asarray(out[name]), stack[name], label=name)


def test_leaves_travel_as_planned(ran):
  _, _, state = ran
  assert set(state.leaves) == {"a", "b", "c"}
  known = zenjax.stats(state)
  assert known["a"]["column_groups"] == 1 and known["b"]["column_groups"] == 4
  assert "all_gather" in zenjax.report(state)


@pytest.mark.parametrize("groups, exchanges", [((0, 0), 1), ((0, 1), 2)])
def test_a_group_shares_an_exchange(groups, exchanges):
  choice = {"scheme": "zen", "wire_dtype": None}
  leaves = (
    dataclasses.replace(PLAN.leaves[0], group=groups[0], **choice),
    dataclasses.replace(PLAN.leaves[1], group=groups[1], **choice),
    leaf("c", scheme="dense"),
    leaf("w", scheme="dense"),
  )
  tx = zenjax.zen_sync("data", plan=dataclasses.replace(PLAN, leaves=leaves))
  step = jax.shard_map(
    lambda g: tx.update(zenjax.unreduced(g, "data"), tx.init(PARAMS)),
    mesh=runners.mesh(N),
    in_specs=jax.P(),
    out_specs=jax.P(),
  )
  found = stablehlo.collectives(jax.jit(step).lower(PARAMS))
  pushes = [x for x in found if x.op == "all_to_all" and not x.inside]
  assert len(pushes) == exchanges


def test_comparison_with_what_a_run_showed(ran):
  _, _, state = ran
  measured = zenjax.stats(state)
  text = PLAN.compare(measured, seconds=0.012)
  union = measured["a"]["union_density"] * 640
  assert f"{union / 80:.2f}" in text and "ratio 1.20" in text
  text = dataclasses.replace(PLAN, compute_seconds=0.0).compare(measured, 0.012)
  assert "12 ms seen" in text and "exchanges were planned, 10 ms" in text
  with refused(ValueError, "`measured` ... 'b' ... 'c' ... zenjax.stats"):
    PLAN.compare({"a": measured["a"]})
  with refused(ValueError, "`seconds`"):
    PLAN.compare(measured, 0.0)


def test_printed():
  """Leaves without a choice are summed up."""
  text = str(PLAN)
  assert "zen/4" in text and "all_gather bfloat16" in text
  assert "pmean, the only way: w, 0 kB received" in text
  assert "3.00x as fast" in text
  pmean = leaf("a", scheme="dense", reason="zen/1 takes 2x as long")
  dense = dataclasses.replace(PLAN, leaves=(pmean,))
  assert not dense.pays and "stays with plain pmean" in str(dense)
  assert "zen/1 takes 2x as long" in str(dense)


def test_json():
  again = zenjax.planner.Plan.from_json(PLAN.to_json())
  assert again == PLAN and hash(again) == hash(PLAN)


# Where a value of the JSON is another, and what the message holds.
BROKEN: dict[str, tuple[str, Any, str]] = {
  "version": ("zenjax_plan", 9, "version 3 ... zenjax.planner.plan"),
  "key": ("leaves 0 sheme", "zen", "leaves[0] ... 'sheme' ... 'scheme'"),
  "text": (
    "leaves 0 group",
    "0",
    "`leaves[0].group` of the plan ... whole number ... '0' ... Make it anew",
  ),
  "number": ("mesh 0 0", 7, "`mesh[0][0]` ... string ... got 7"),
  "bool": ("leaves 0 group", True, "`leaves[0].group` ... whole ... True"),
  "nan": ("seconds", float("nan"), "`seconds` ... finite ... nan"),
  "letters": (
    "leaves 0 shape",
    "abc",
    "`leaves[0].shape` ... a list ... 'abc'",
  ),
  "none": ("leaves 0 shape", None, "`leaves[0].shape` ... a list ... None"),
  "half": ("leaves 0 shape", [640, 8.5], "`leaves[0].shape[1]` ... 8.5"),
  "negative": ("leaves 0 shape", [-1], "`leaves[0].shape[0]` ... 0 or more"),
  "short": ("leaves 0 capacities", [1], "capacities` ... list of 2"),
  "twice": ("leaves 1 name", "a", "the plan is refused ... once each"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_values_that_no_plan_has(name):
  where, value, words = BROKEN[name]
  plan = node = json.loads(PLAN.to_json())
  *path, last = [int(x) if x.isdigit() else x for x in where.split()]
  for key in path:
    node = node[key]
  node[last] = value
  with refused(ValueError, words):
    zenjax.planner.Plan.from_json(json.dumps(plan))


TEXTS = {
  PLAN.to_json()[:-50]: "truncated",
  "plan.json": "JSON of the plan ... plan.json ... read_text",
  zenjax.planner.Topology.network("1gbit", 2).to_json(): (
    "lacks 'zenjax_plan' ... another kind of file"
  ),
}


@pytest.mark.parametrize("text", TEXTS, ids=["part", "path", "topology"])
def test_texts_that_are_no_plan(text):
  with refused(ValueError, TEXTS[text]):
    zenjax.planner.Plan.from_json(text)


def traced(plan, params=PARAMS, n=N):
  grads = jax.tree.map(lambda x: jnp.zeros((n, *x.shape)), params)
  return jax.eval_shape(synced(plan, params), grads)


def given(plan=PLAN, **options):
  return lambda: zenjax.zen_sync("data", plan=plan, **options)


FEW = {"a": PARAMS["a"]}
MORE = PARAMS | {"x": jnp.zeros(3)}
LESS = PARAMS | {"w": jnp.zeros((8, 4))}
SHARDED = changed("a", scheme="sharded")
CLIPPED = dataclasses.replace(PLAN, clip_norm=1.0)
OLD = dataclasses.replace(PLAN, jax_version="0.1")
COLUMNS = "plan.leaves['a'].column_groups ... 4 devices"
WIRE = "plan.leaves['a'].wire_dtype ... floating dtype"
REFUSED: dict[str, tuple[Any, str]] = {
  "sharded": (
    lambda: traced(SHARDED),
    "`plan` shards ['a'] ... set_up",
  ),
  "clips": (
    lambda: traced(CLIPPED),
    "`plan` clips gradients ... set_up",
  ),
  "old": (lambda: traced(OLD), f"0.1 ... {jax.__version__}"),
  "other devices": (lambda: traced(PLAN, n=2), "{'data': 4} ... {'data': 2}"),
  "few leaves": (lambda: traced(PLAN, FEW), "`plan` ... 'b' ... 3 such leaves"),
  "another leaf": (
    lambda: traced(PLAN, MORE),
    "'x' is none there ... Make a new plan",
  ),
  "another shape": (
    lambda: traced(PLAN, LESS),
    "'w' ... float32[16,4] there ... float32[8,4] here",
  ),
  "scheme": (
    given(scheme="all_gather"),
    "`scheme` ... 'all_gather' ... Leave one of them out",
  ),
  "sparse": (given(sparse=True), "`sparse` ... Leave one of them out"),
  "no scheme": (
    given(changed("a", scheme="fast")),
    "plan.leaves['a'].scheme ... 'fast'",
  ),
  "no groups": (given(changed("a", column_groups=0)), f"{COLUMNS} ... 0"),
  "negative groups": (
    given(changed("a", column_groups=-1)),
    f"{COLUMNS} ... -1",
  ),
  "three groups": (given(changed("a", column_groups=3)), f"{COLUMNS} ... 3"),
  "no dtype": (given(changed("a", wire_dtype="bogus")), f"{WIRE} ... bogus"),
  "integers": (given(changed("a", wire_dtype="int16")), f"{WIRE} ... int16"),
  "leaves twice": (
    lambda: dataclasses.replace(PLAN, leaves=PLAN.leaves * 2),
    "`leaves` ... once",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
  call, words = REFUSED[name]
  with refused(TypeError if "dtype" in words else ValueError, words):
    call()
