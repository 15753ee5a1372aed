"""A plan: what zen_sync does by it, and where it refuses one."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from refusals import names

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


def gradients():
  rng = np.random.default_rng(0)
  found = {}
  for name, shape in SHAPES.items():
    rows = rng.random((N, shape[0], 1)) < (1 if name == "w" else 0.03)
    values = rng.integers(-8, 9, (N, *shape))
    found[name] = (rows * values).astype(np.float32)
  return found


def synced(tx):
  step = lambda g: tx.update(g, tx.init(PARAMS))
  return jax.jit(jax.vmap(step, axis_name="data"))


@pytest.fixture(scope="module")
def ran():
  stack = gradients()
  out, state = synced(zenjax.zen_sync("data", plan=PLAN))(stack)
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
  leaves = tuple(
    dataclasses.replace(x, group=group, scheme="zen", wire_dtype=None)
    for x, group in zip(PLAN.leaves, groups)
  )
  leaves += (leaf("c", scheme="dense"), leaf("w", scheme="dense"))
  plan = dataclasses.replace(PLAN, leaves=leaves)
  tx = zenjax.zen_sync("data", plan=plan)
  shapes = jax.tree.map(lambda x: jnp.zeros((N, *x.shape)), PARAMS)
  mesh = jax.sharding.Mesh(jax.devices()[:N], ("data",))
  split, same = jax.P("data"), jax.P()
  step = lambda g: tx.update(jax.tree.map(lambda x: x[0], g), tx.init(PARAMS))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=same)
  text = jax.jit(mapped).lower(shapes).as_text()
  # The first push of each, and that of its loop.
  assert len(re.findall(r"stablehlo\.all_to_all", text)) == 2 * exchanges


def test_comparison_with_what_a_run_showed(ran):
  _, _, state = ran
  measured = zenjax.stats(state)
  text = PLAN.compare(measured, seconds=0.012)
  union = measured["a"]["union_density"] * 640
  assert f"{union / 80:.2f}" in text and "ratio 1.20" in text
  text = dataclasses.replace(PLAN, compute_seconds=0.0).compare(measured, 0.012)
  assert "12 ms seen" in text and "exchanges were planned, 10 ms" in text
  with pytest.raises(ValueError) as error:
    PLAN.compare({"a": measured["a"]})
  names(error, "`measured`", "'b'", "'c'", "zenjax.stats")
  with pytest.raises(ValueError, match="`seconds`"):
    PLAN.compare(measured, seconds=0.0)


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


PLAN_JSON = PLAN.to_json()
_JSON_SHAPE = '"shape": [\n        640,\n        8\n      ]'


def test_json():
  assert zenjax.planner.Plan.from_json(PLAN.to_json()) == PLAN
  assert hash(zenjax.planner.Plan.from_json(PLAN.to_json())) == hash(PLAN)


@pytest.mark.parametrize(
  "old, new, words",
  [
    (
      '"zenjax_plan": 3',
      '"zenjax_plan": 9',
      ["version 3", "zenjax.planner.plan"],
    ),
    ('"scheme": "zen"', '"sheme": "zen"', ["leaves[0]", "'sheme'", "'scheme'"]),
    (
      '"group": 0',
      '"group": "0"',
      ["`leaves[0].group` of the plan", "whole number", "'0'", "Make it anew"],
    ),
    ('"data"', "7", ["`mesh[0][0]`", "string", "got 7"]),
    ('"group": 0', '"group": true', ["`leaves[0].group`", "whole", "True"]),
    ('"seconds": 0.01', '"seconds": NaN', ["`seconds`", "finite", "nan"]),
    (_JSON_SHAPE, '"shape": 5', ["`leaves[0].shape`", "a list", "5"]),
    (_JSON_SHAPE, '"shape": "abc"', ["`leaves[0].shape`", "a list", "'abc'"]),
    (_JSON_SHAPE, '"shape": [640, 8.5]', ["`leaves[0].shape[1]`", "8.5"]),
    (_JSON_SHAPE, '"shape": [-1]', ["`leaves[0].shape[0]`", "0 or more"]),
    (_JSON_SHAPE, '"shape": null', ["`leaves[0].shape`", "a list", "None"]),
    ('"capacities": null', '"capacities": [1]', ["capacities`", "list of 2"]),
    ('"name": "b"', '"name": "a"', ["the plan is refused", "once each"]),
    ("}\n  ],", "", ["truncated"]),
    (PLAN_JSON, "plan.json", ["JSON of the plan", "plan.json", "read_text"]),
    (
      PLAN_JSON,
      zenjax.planner.Topology.network("1gbit", 2).to_json(),
      ["lacks 'zenjax_plan'", "another kind of file"],
    ),
  ],
)
def test_json_that_is_no_plan(old, new, words):
  text = PLAN.to_json().replace(old, new)
  assert text != PLAN.to_json()
  with pytest.raises(ValueError) as error:
    zenjax.planner.Plan.from_json(text)
  names(error, *words)


def _synced(plan, params=PARAMS, n=N):
  tx = zenjax.zen_sync("data", plan=plan)
  grads = jax.tree.map(lambda x: jnp.zeros((n, *x.shape)), params)
  step = lambda g: tx.update(g, tx.init(params))
  return jax.eval_shape(jax.vmap(step, axis_name="data"), grads)


@pytest.mark.parametrize(
  "call, words",
  [
    (
      lambda: _synced(
        dataclasses.replace(PLAN, leaves=(leaf("a", scheme="sharded"),))
      ),
      ["`plan` shards ['a']", "zenjax.planner.set_up"],
    ),
    (
      lambda: _synced(dataclasses.replace(PLAN, clip_norm=1.0)),
      ["`plan` clips gradients", "zenjax.planner.set_up"],
    ),
    (
      lambda: _synced(PLAN, {"a": PARAMS["a"]}),
      ["`plan`", "'b'", "3 such leaves"],
    ),
    (
      lambda: _synced(PLAN, PARAMS | {"x": jnp.zeros(3)}),
      ["'x' is none there", "Make a new plan"],
    ),
    (
      lambda: _synced(PLAN, PARAMS | {"w": jnp.zeros((8, 4))}),
      ["'w'", "float32[16,4] there", "float32[8,4] here"],
    ),
    (lambda: _synced(PLAN, n=2), ["{'data': 4}", "{'data': 2}"]),
    (
      lambda: _synced(dataclasses.replace(PLAN, jax_version="0.1")),
      ["0.1", jax.__version__],
    ),
    (
      lambda: zenjax.zen_sync("data", plan=PLAN, scheme="all_gather"),
      ["`scheme`", "'all_gather'", "Leave one of them out"],
    ),
    (
      lambda: zenjax.zen_sync("data", plan=PLAN, sparse=True),
      ["`sparse`", "Leave one of them out"],
    ),
    (
      lambda: zenjax.zen_sync(
        "data",
        plan=dataclasses.replace(PLAN, leaves=(leaf("a", scheme="fast"),)),
      ),
      ["plan.leaves['a'].scheme", "'fast'"],
    ),
    (
      lambda: dataclasses.replace(PLAN, leaves=PLAN.leaves * 2),
      ["`leaves`", "once"],
    ),
  ],
)
def test_refused(call, words):
  with pytest.raises(ValueError) as error:
    call()
  names(error, *words)


@pytest.mark.parametrize("groups", [0, -1, 3])
def test_column_groups_that_do_not_divide_the_devices(groups):
  first = dataclasses.replace(PLAN.leaves[0], column_groups=groups)
  plan = dataclasses.replace(PLAN, leaves=(first, *PLAN.leaves[1:]))
  with pytest.raises(ValueError) as error:
    zenjax.zen_sync("data", plan=plan)
  names(error, "plan.leaves['a'].column_groups", "4 devices", str(groups))


@pytest.mark.parametrize("dtype", ["bogus", "int16"])
def test_wire_dtypes_that_are_none(dtype):
  first = dataclasses.replace(PLAN.leaves[0], wire_dtype=dtype)
  plan = dataclasses.replace(PLAN, leaves=(first, *PLAN.leaves[1:]))
  with pytest.raises(TypeError) as error:
    zenjax.zen_sync("data", plan=plan)
  names(error, "plan.leaves['a'].wire_dtype", "floating dtype", dtype)


def test_no_plan():
  text: Any = PLAN.to_json()
  with pytest.raises(TypeError, match="`plan` must be a zenjax.planner.Plan"):
    zenjax.zen_sync("data", plan=text)
