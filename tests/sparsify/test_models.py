"""What must hold of the NumPy models of published sparsifiers."""

import ml_dtypes
import numpy as np
import pytest
import sparsifier_cases as cases
from sparsifier_models import partitions


def check_conserves(model, steps: int = 30):
  draws = np.stack([cases.laplace(t, model.n) for t in range(steps)])
  results = cases.train(model, steps)
  kept = results[-1]["residuals"].sum(axis=0, dtype=np.float64)
  updates = np.sum([result["updates"] for result in results], axis=0)
  total = draws.sum(axis=(0, 1), dtype=np.float64)
  # One rounding an addition to the residual, whose size |gradients| bound.
  size = np.abs(draws).sum(axis=(0, 1), dtype=np.float64)
  error = np.abs(model.n * updates + kept - total)
  assert (error <= steps * 2.0**-24 * size).all()
  assert np.abs(kept).max() > 0


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("make", cases.EVERY.values(), ids=cases.EVERY)
def test_no_gradient_is_lost(make, n):
  check_conserves(make(n))


@pytest.mark.parametrize("wire", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("make", cases.EVERY.values(), ids=cases.EVERY)
def test_the_rounding_error_of_the_wire_is_kept(make, wire):
  check_conserves(make(3, wire_dtype=wire))


@pytest.mark.parametrize("make", cases.LOCAL.values(), ids=cases.LOCAL)
def test_no_gradient_is_lost_where_all_send_the_union(make):
  check_conserves(make(3, send="union"))


def test_without_feedback_what_is_not_sent_is_gone():
  with pytest.raises(AssertionError):
    check_conserves(cases.top_k(3, feedback=False))


@pytest.mark.parametrize("make", cases.EXCLUSIVE.values(), ids=cases.EXCLUSIVE)
def test_what_is_selected_is_what_is_large_and_all_of_it(make):
  model = make(4)
  residuals = np.zeros((4, cases.SIZE), cases.F32)
  for t in range(20):
    gradients = cases.skewed(t, 4)
    acc = residuals + gradients
    result = model.step(gradients)
    bounds, places = result["partitions"], result["assignment"]
    owner = np.empty(cases.SIZE, int)
    for device in range(4):
      owner[bounds[places[device]] : bounds[places[device] + 1]] = device
    of_owner = np.abs(acc[owner, np.arange(cases.SIZE)])
    large = np.flatnonzero(of_owner >= np.float32(result["threshold"]))
    union = np.sort(np.concatenate(result["selected"]))
    assert set(large) <= set(union)  # at most a forced element more
    assert len(union) - len(large) <= sum(
      len(indices) == 1 for indices in result["selected"]
    )
    np.testing.assert_allclose(
      result["updates"][union], acc[:, union].mean(axis=0, dtype=np.float64)
    )
    assert np.count_nonzero(result["updates"]) <= len(union)
    residuals = result["residuals"]


def test_no_partition_falls_below_the_minimum():
  def loud_at_the_start(seed: int, n: int):
    gradients = cases.laplace(seed, n)
    gradients[:, cases.SIZE // 4 :] *= cases.F32.type(1e-3)
    return gradients

  results = cases.train(cases.exdyna(4), 120, loud_at_the_start)
  # 64 blocks of 16 elements over 4 devices: at least 4 each.
  first = [result["partitions"][1] // 16 for result in results]
  assert first[0] == 16 and min(first) == 4
  assert partitions.BlockPartitions(40_000, 3).minimum == 1024 / 12  # 85.33


def test_a_boundary_moves_by_one_block_a_step():
  results = cases.train(cases.exdyna(4), 40, cases.skewed)
  bounds = np.array([result["partitions"] for result in results])
  moves = np.diff(bounds, axis=0)
  assert set(np.unique(np.abs(moves))) == {0, 16}
  assert (moves != 0).any(axis=1).sum() > 5
  assert (bounds[:, :-1] % 16 == 0).all() and (bounds[:, -1] == 1_200).all()


@pytest.mark.parametrize("make", cases.EXCLUSIVE.values(), ids=cases.EXCLUSIVE)
def test_an_empty_selection_sends_one_rotating_element(make):
  n, size = 4, 1_026
  model = make(n, size)
  start = model.threshold.value
  for t in range(12):
    result = model.step(np.zeros((n, size), cases.F32))
    bounds = result["partitions"]
    for place, indices in zip(result["assignment"], result["selected"]):
      length = bounds[place + 1] - bounds[place]
      assert indices.tolist() == [bounds[place] + t % length]
    assert result["density"] == n / size and result["imbalance"] == 1.0
  assert model.threshold.value == pytest.approx(start * 0.995**11)
