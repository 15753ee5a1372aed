"""`benchmarks.run gpu`: answers first, and no claim of a GPU without one."""

import argparse
import functools
import json

import jax
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.cases import gpu
import zenjax
from zenjax.planner import Profile

ROWS, WIDTH, DENSITY = 400, 4, 0.02
HASH, LISTED = gpu.Work("hash"), gpu.Work("hash", rows=True, pinned=False)


@pytest.fixture
def sync():
  """Sizes are known: nothing is compiled to find them."""
  sync = gpu.Sync(ROWS, WIDTH, DENSITY)
  sync._pins[HASH] = (4, 8)
  return sync


def test_answers_are_checked(sync):
  gradients = sync.gradients
  gradients.restore()
  # What is not summed is wrong: every union row of those that lack it.
  assert gradients.wrong(gradients.tables) > 0
  local = np.asarray(gradients.tables)
  assert (np.count_nonzero(local.any(-1), axis=1) == 8).all()
  want = local.sum(0)
  union = np.flatnonzero(want.any(-1) | local.any((0, 2)))
  np.testing.assert_array_equal(gradients.union, union)
  right = np.broadcast_to(want, local.shape)
  gradients.tables = jax.numpy.array(right)
  assert gradients.wrong(gradients.tables) == 0
  elsewhere = int(np.setdiff1d(np.arange(ROWS), union)[0])
  gradients.tables = gradients.tables.at[7, elsewhere, 1].set(1.0)
  assert gradients.wrong(gradients.tables) == 1
  # And what a step left is put back.
  np.testing.assert_array_equal(
    np.asarray(gradients.restore())[:, union], local[:, union]
  )


def test_rows_are_checked(sync):
  listed = sync.gradients.listed
  dense = np.asarray(listed.to_dense())
  np.testing.assert_array_equal(dense, sync.gradients.restore())
  assert sync.build("zen rows xla", LISTED, "xla", False).wrong == 0
  total = zenjax.SparseRows.from_dense(jax.numpy.asarray(dense.sum(0)), ROWS)
  alike = jax.tree.map(lambda x: jax.numpy.stack([x] * gpu.DEVICES), total)
  assert sync.gradients.wrong(alike) == 0
  (ids, values), tree = jax.tree.flatten(alike)
  apart = tree.unflatten([ids, values.at[3, 0, 0].add(1)])
  assert sync.gradients.wrong(apart) > 0


def test_run_without_a_gpu_says_so(sync, monkeypatch, tmp_path, capsys):
  build = functools.partial(sync.build, "zen hash xla", HASH, "xla", False)
  group = "all of zen_sync"
  cases = [harness.Case(group=group, name="zen hash xla", build=build)]
  monkeypatch.setattr(gpu, "Sync", lambda *_: sync)
  monkeypatch.setattr(gpu, "_cases", lambda *_: cases)
  options = argparse.Namespace(
    rows=ROWS,
    width=WIDTH,
    density=DENSITY,
    repeats=3,
    json=tmp_path / "gpu.json",
  )
  assert gpu.run(options) == 0
  told = json.loads(options.json.read_text())
  assert told["measured_on_gpu"] is False
  assert "Nothing was measured on a GPU" in told["note"]
  assert told["times_over_one_read"] == {}
  assert "zen/1" in told["reports"]["zen hash xla"]
  shown = capsys.readouterr().out
  assert "Nothing was measured on a GPU" in shown
  assert "Predicted, not measured" in shown
  zen = [
    p for p in told["predicted_not_measured"] if p["way"] != "dense (psum)"
  ]
  assert len(zen) == len(gpu.LINKS)
  assert all(p["local_s"] is None and p["seconds"] is None for p in zen)
  (result,) = told["results"]
  assert result["wrong"] == 0 and len(result["times_s"]) == 3


def test_predictions_add_what_was_measured_to_the_link():
  profile = Profile(rows=1e4, fullest=1e4, union=4.4e4, devices=8)
  way = gpu.Way(name="zen", column_groups=1, local_s=2e-3)
  found = gpu.predictions(1_000_000, 128, profile, [way])
  by = {(p.link, p.way): p for p in found}
  ring = 2 * 7 / 8 * 1_000_000 * 128 * 4
  for name, link in gpu.LINKS.items():
    dense, zen = by[name, gpu.DENSE], by[name, "zen"]
    steps = 2 * 7 * link.latency_s
    assert dense.seconds == pytest.approx(ring / link.bandwidth + steps)
    assert zen.seconds == zen.wire_s + 2e-3
    faster = gpu.over_dense(found)[name, "zen"]
    assert faster == pytest.approx(dense.seconds / zen.seconds)
    # At least what the volume bound says, at most its triple.
    bound = 7 / 8 * 5.4e4 * 128 * 4
    assert bound < zen.received_bytes < 3 * bound


def test_other_accelerators_are_refused(monkeypatch):
  device = argparse.Namespace(platform="tpu")
  monkeypatch.setattr(jax, "devices", lambda: [device])
  with pytest.raises(ValueError, match="must run on a GPU"):
    gpu._check_device((10, 10, 0.1))
  device = argparse.Namespace(
    platform="gpu", memory_stats=lambda: {"bytes_limit": 1e9}
  )
  with pytest.raises(ValueError, match="ask for fewer rows"):
    gpu._check_device((4_194_304, 128, 0.01))
