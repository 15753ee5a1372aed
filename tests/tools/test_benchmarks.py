"""Benchmarks: answers before times, ids that are what they are said to be."""

import argparse
import dataclasses
import json

import jax
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from benchmarks import harness
from benchmarks import workloads
from benchmarks.cases import compile as compile_time
from benchmarks.cases import kernels
from benchmarks.cases import select
from benchmarks.cases import step
from benchmarks.cases import sync
import zenjax
from zenjax.kernels.operations import OPERATIONS

# Drawn ids are exact where the source says so, else near what it was fitted to.
_DRAWN = [
  name for name, w in workloads.SCALED.items() if name != "criteo1tb-dlrm"
]


# The rest of the sweep is the same distribution, slower to draw.
@pytest.mark.parametrize(
  "name", [*workloads.SCALED, "sweep-0.01", "sweep-5", "sweep-100"]
)
def test_ids_have_the_density_and_union_that_are_stated(name):
  workload = workloads.get(name)
  ids = workloads.ids(workload, n=8, seed=0)
  assert all(0 <= i.min() and i.max() < workload.rows for i in ids)
  local = np.mean([len(np.unique(i)) for i in ids]) / workload.rows
  exact = 1e-4 if name in _DRAWN else 0.05
  assert local == pytest.approx(workload.density, rel=0.02, abs=exact)
  union = len(np.unique(np.concatenate(ids))) / workload.rows
  assert union / local == pytest.approx(workload.union_growth, rel=0.1)
  again = workloads.ids(workload, n=8, seed=0)
  assert all((a == b).all() for a, b in zip(ids, again))


def test_full_size_keeps_density():
  for name, workload in workloads.FULL.items():
    assert workload.density == pytest.approx(
      workloads.SCALED[name].density, rel=0.15
    )


def _case(name, calls, wrong=0):
  built = harness.Built(
    run=lambda: calls.append(name), wrong=wrong, compile_s=0.0, facts={}
  )
  return harness.Case(group="group", name=name, build=lambda: built)


def test_what_is_compiled_is_checked():
  built = compile_time.build("rows", 2, harness.mesh(2, "data"))
  assert built.wrong == 0
  assert 0 < built.facts["lower_s"] < built.compile_s
  options = argparse.Namespace(devices=2, tables=[1])
  with pytest.raises(ValueError, match="must not be set"):
    compile_time.cases(options)


def test_answers_alone_are_not_timed():
  built = harness.Built(run=None, wrong=0, compile_s=0.0, facts={})
  case = harness.Case(group="group", name="seen", build=lambda: built)
  results, complete = harness.measure([case], repeats=4)
  assert complete and results[0].times_s == ()


@pytest.mark.parametrize("name", kernels.WORK)
def test_kernels_answers_are_checked(name):
  """The reference has no wrong element, and each leaf of it is looked at."""
  work = kernels.WORK[name](kernels.draw(500, 4, 0.1))
  right = OPERATIONS[name].reference(*work.arrays, *work.static)
  assert work.wrong(right) == 0
  for field in _CHECKED[name]:
    leaves, tree = jax.tree.flatten(right)
    flat = np.array(leaves[field]).reshape(-1)
    flat[0] = flat[0] == 0  # other than it was, whatever the dtype
    leaves[field] = jax.numpy.asarray(flat.reshape(leaves[field].shape))
    assert work.wrong(tree.unflatten(leaves)) > 0


# Which leaves of an operation's result have one answer for any input.
_CHECKED = {
  "mask_pack": (0, 1),
  "compact": (0, 1),
  "merge": (0, 1, 2),
  "expand": (0,),
}


@pytest.mark.parametrize("name", select.VARIANTS)
@pytest.mark.parametrize("parts", [1, 3])
def test_selections_are_checked(name, parts, monkeypatch):
  built = select.build(name, 5_003, 0.02, parts)
  assert built.wrong == 0 and built.prepare and built.run
  for _ in range(2):  # What is donated is there again.
    jax.block_until_ready(built.prepare())
    jax.block_until_ready(built.run())
  right = select.VARIANTS[name]
  by_one = lambda x: x.at[0].add(1)

  def spoilt(*arguments):
    answer = right.run(*arguments)
    if isinstance(answer, jax.Array):
      return by_one(answer)
    return dataclasses.replace(answer, index=by_one(answer.index))

  variant = dataclasses.replace(right, run=spoilt)
  monkeypatch.setitem(select.VARIANTS, name, variant)
  assert select.build(name, 5_003, 0.02, parts).wrong > 0


def test_what_is_wrong_is_not_timed():
  calls = []
  results, complete = harness.measure(
    [_case("right", calls), _case("wrong", calls, wrong=3)], repeats=4, warmup=1
  )
  assert complete
  assert calls == ["right"] * 5
  assert [len(r.times_s) for r in results] == [4, 0]
  assert [r.wrong for r in results] == [0, 3]
  assert np.isnan(results[1].median_s)


def test_interrupt_keeps_what_was_measured():
  calls = []

  def stop():
    calls.append("stop")
    if len(calls) == 3:
      raise KeyboardInterrupt
    return ()

  built = harness.Built(run=stop, wrong=0, compile_s=0.0, facts={})
  case = harness.Case(group="group", name="stop", build=lambda: built)
  results, complete = harness.measure([case], repeats=9, warmup=0)
  assert not complete
  assert len(results[0].times_s) == 2


@pytest.fixture(scope="module")
def small():
  mesh = Mesh(np.array(jax.devices()), (sync.AXIS,))
  workload = workloads.Workload(
    name="small",
    rows=999,
    width=12,
    density=0.02,
    union_growth=4.5,
    source=workloads.Zipf(density=0.02, exponent=1.1),
  )
  return sync.Training(workload, mesh, 2)


def _variant(make):
  return sync.Variant(name="planted", volume="dense", make=make)


def test_step_is_checked_against_the_oracle(small):
  assert small.build(sync.BASELINES[1]).wrong == 0
  zen = small.build(sync.SPARSE[1])
  assert zen.wrong == 0
  assert 0 < zen.facts["wire_bytes"] < zen.facts["dense_bytes"]
  # Only every second row is summed, and nothing at all.
  half = _variant(
    lambda _: optax.stateless(
      lambda grads, _: jax.tree.map(
        lambda g: jax.lax.pmean(g, sync.AXIS).at[::2].set(g[::2]), grads
      )
    )
  )
  assert small.build(half).wrong > 0
  assert small.build(_variant(lambda _: optax.identity())).wrong > 0


def test_file_keeps_samples_versions_and_command(tmp_path):
  from benchmarks import record

  calls = []
  results, _ = harness.measure([_case("right", calls)], repeats=2)
  path = tmp_path / "out.json"
  options = argparse.Namespace(json=path, repeats=2)
  assert record.finish(options, results, complete=True) == 0
  saved = json.loads(path.read_text())
  assert len(saved["results"][0]["times_s"]) == 2
  assert jax.__version__ in json.dumps(saved)


@pytest.mark.usually("rows-sgd", "sharded-adagrad")
@pytest.mark.parametrize(
  ("name", "optimizer"),
  [
    ("dense", "adam"),
    ("rows", "sgd"),
    ("rows-pinned", "adam"),
    ("owners", "rowwise_adagrad"),
    ("sharded", "adagrad"),
    pytest.param("zen", "adagrad", marks=pytest.mark.more),
  ],
)
def test_whole_steps_leave_what_float64_does(name, optimizer):
  with jax.numpy_dtype_promotion("standard"):  # As optax computes.
    built = step.build(name, _setting(optimizer), _two())
  assert built.wrong == 0 and built.run is not None
  jax.block_until_ready(built.run())
  sent = 2000 * 4 * 4
  # A dense exchange, or no more than the look-ups of both devices.
  rows = step.VARIANTS[name].rows
  assert built.facts["wire_bytes"] < (sent / 4 if rows else sent * 1.05)


def test_a_step_that_sums_nothing_is_found_out(monkeypatch):
  alone = dataclasses.replace(
    step.VARIANTS["rows"],
    transformation=lambda inner, _: zenjax.lazy_rows(inner),
  )
  monkeypatch.setitem(step.VARIANTS, "rows", alone)
  assert step.build("rows", _setting("sgd"), _two()).wrong > 0


def _two():
  return Mesh(np.array(jax.devices()[:2]), (sync.AXIS,))


def _setting(optimizer):
  return step.Setting(
    rows=2000,
    width=4,
    look_ups=24,
    distinct=1000,
    optimizer=optimizer,
    batches=2,
  )
