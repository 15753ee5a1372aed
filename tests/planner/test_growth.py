"""Union growth from pooled steps: exact, with its error, and on real ids."""

from collections.abc import Callable
import dataclasses
import itertools
import math

import numpy as np
from planning import recorded_runs
import pytest

from benchmarks import workloads
from examples.studies.lm import corpus
from zenjax import traces


def recorded(steps: int, devices: int, rows: int, seed: int = 0):
  """Sets of uneven sizes, some rows in nearly all of them."""
  rng = np.random.default_rng(seed)
  common = rng.random(rows) ** 3
  return [
    [np.flatnonzero(rng.random(rows) < common) for _ in range(devices)]
    for _ in range(steps)
  ]


@pytest.mark.parametrize("m", range(1, 7))
def test_expectation_is_that_of_all_subsets(m):
  steps = recorded(3, 2, 12)
  pool = [set(s.tolist()) for step in steps for s in step]
  subsets = list(itertools.combinations(pool, m))
  found = recorded_runs.growth(steps, 12)
  unions = [len(set().union(*subset)) for subset in subsets]
  assert found.union(m) == pytest.approx(np.mean(unions))
  fullest = [max(map(len, subset)) for subset in subsets]
  assert found.fullest(m) == pytest.approx(np.mean(fullest))


def test_steps_are_left_out_one_by_one():
  steps = recorded(5, 2, 40)
  found = recorded_runs.growth(steps, 40)
  for t, without in enumerate(found.without):
    alone = recorded_runs.growth(steps[:t] + steps[t + 1 :], 40)
    assert without.tolist() == alone.held.tolist()


def test_error_is_of_the_size_of_the_spread():
  """Over many recordings the prediction spreads as each says of itself."""
  rng = np.random.default_rng(0)
  common = rng.random(300) ** 6
  found = [
    recorded_runs.growth(
      [
        [np.flatnonzero(rng.random(300) < common) for _ in range(2)]
        for _ in range(16)
      ],
      300,
    )
    for _ in range(80)
  ]
  unions = np.array([f.union(8) for f in found])
  said = np.mean([f.error(8) for f in found])
  assert said == pytest.approx(unions.std() / unions.mean(), rel=0.35)


def test_one_step_has_no_error():
  steps = recorded(1, 3, 20)
  found = recorded_runs.growth(steps, 20)
  assert math.isnan(found.error(2))


def test_beyond_the_pool_are_bounds():
  steps = recorded(8, 2, 60)
  few = recorded_runs.growth(steps[:3], 60)
  with pytest.raises(ValueError, match="6 row sets of 3 steps.*record 6 steps"):
    few.union(12)
  low, high = few.bounds(12)
  assert few.union(6) == low <= high <= 60
  assert few.bounds(4) == (few.union(4),) * 2
  # Of one pool, for every part of it: a union's growth never speeds up.
  whole = recorded_runs.growth(steps, 60)
  curve = [whole.union(m) for m in range(1, 17)]
  assert np.all(np.diff(curve, 2) < 1e-9)


def test_devices_that_touch_the_same_rows_or_none():
  steps = [[np.arange(10)] * 2 for _ in range(4)]
  found = recorded_runs.growth(steps, 100)
  assert (found.union(1), found.fullest(4), found.union(4)) == (10, 10, 10)
  empty = [[np.zeros(0, np.uint32)] * 2 for _ in range(2)]
  assert recorded_runs.growth(empty, 100).union(2) == 0


@pytest.mark.parametrize("steps", [[], [[]], [[np.arange(2)], []]])
def test_uneven_recordings_are_refused(steps):
  with pytest.raises(ValueError, match="`recorded` must hold steps of one"):
    recorded_runs.growth(steps, 10)


@pytest.mark.parametrize("devices", [0, -1, 2.0])
def test_devices_are_counted(devices):
  with pytest.raises(ValueError, match="`devices` must be a positive"):
    recorded_runs.growth(recorded(2, 2, 10), 10).union(devices)


def test_traces_are_of_the_model_that_is_planned(tmp_path):
  tables = (traces.TableInfo(name="embed", rows=40, width=4, dtype="float32"),)
  header = traces.Header(tables=tables, devices=2, steps=3)
  traces.create(tmp_path, header)
  for number, step in enumerate(recorded(3, 2, 40)):
    traces.write_step(tmp_path, header, number, [step])
  run = recorded_runs.recorded(traces.read(tmp_path))
  assert run.growths["embed"].pooled == run.pooled == 6
  (embed,) = run.gradients
  found = recorded_runs.profiles(tmp_path, [embed], 6)
  assert found["embed"].union == run.growths["embed"].union(6)
  for change, said in (
    ({"shape": (41, 4)}, r"'embed' 40 x 4 there, \(41, 4\) here"),
    ({"name": "other"}, r"'embed' 40 x 4 there, none here"),
  ):
    other = dataclasses.replace(embed, **change)
    with pytest.raises(ValueError, match=f"`trace` must be.*{said}"):
      recorded_runs.profiles(tmp_path, [other], 6)


# --- what others have published, and real ids -------------------------------


def pooled(name: str, devices: int, steps: int) -> recorded_runs.Growth:
  workload = workloads.get(name)
  return recorded_runs.growth(
    [workloads.sets(workload, devices, seed) for seed in range(steps)],
    workload.rows,
  )


def test_bert_of_the_zen_paper():
  """1.06 % of a device are 40.8 % of 128, from 4 devices that ran."""
  found = pooled("squad-bert", devices=4, steps=40)
  assert found.union(1) / found.rows == pytest.approx(0.0106, rel=0.01)
  assert found.union(128) / found.rows == pytest.approx(0.408, rel=0.05)
  assert found.error(128) < 0.02


TOKENS = 512  # Of a device and step.


def random_places(ids: np.ndarray, devices: int, step: int) -> np.ndarray:
  rng = np.random.default_rng([devices, step])
  starts = rng.integers(0, len(ids) - TOKENS, devices)
  return ids[starts[:, None] + np.arange(TOKENS)]


def shuffled_windows(ids: np.ndarray, devices: int, step: int) -> np.ndarray:
  """Windows of 64 tokens, as `examples.studies.lm` reads them."""
  windows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
  shuffled = np.random.default_rng(devices).permutation(windows)
  size = devices * TOKENS
  mine = shuffled.reshape(-1)[step * size : (step + 1) * size]
  return mine.reshape(devices, TOKENS)


def front_to_back(ids: np.ndarray, devices: int, step: int) -> np.ndarray:
  """Every device reads a part of its own."""
  starts = np.arange(devices) * (len(ids) // devices) + step * TOKENS
  return ids[starts[:, None] + np.arange(TOKENS)]


def from_4_to_64(order: Callable[..., np.ndarray], ids: np.ndarray) -> float:
  """Returns the union of 64 devices, predicted from 4, over the real one."""
  draw = lambda devices, steps: [
    list(map(np.unique, order(ids, devices, step))) for step in range(steps)
  ]
  found = recorded_runs.growth(draw(4, 32), int(ids.max()) + 1)
  assert found.error(64) < 0.1
  real = [len(workloads.union(step)) for step in draw(64, 8)]
  return found.union(64) / float(np.mean(real))


@pytest.mark.parametrize("order", [random_places, shuffled_windows])
def test_sixteen_times_as_many_devices_on_real_ids(order):
  text = corpus.load_tokens(max_tokens=400_000)
  assert from_4_to_64(order, text.ids) == pytest.approx(1, rel=0.1)


def test_hosts_that_read_texts_of_their_own_are_not_foreseen():
  """Words change from front to back: random places show it, parts do not."""
  rng = np.random.default_rng(0)
  ids = np.arange(400_000) // 64 + rng.integers(0, 50, 400_000)
  assert from_4_to_64(random_places, ids) == pytest.approx(1, rel=0.1)
  assert from_4_to_64(front_to_back, ids) < 0.5
