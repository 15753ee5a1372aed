"""The models of top-k, threshold, random-k and Deep Gradient Compression."""

import math
from typing import Any

import numpy as np
import pytest
import sparsifier_cases as cases
import sparsifier_models as models
from sparsifier_models import momentum


def test_top_k_by_hand():
  acc = np.array([3, -5, 0, 5, 1, -3, 3], cases.F32)
  for k, want in [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 3, 5])]:
    assert models.TopK(k).select(acc, 0, 0).tolist() == want
  acc[[2, 4]] = np.nan, -np.inf
  assert models.TopK(1).select(acc, 0, 0).tolist() == [2]
  assert models.TopK(2).select(acc, 0, 0).tolist() == [2, 4]
  zeros = np.zeros(5, cases.F32)
  assert models.TopK(3).select(zeros, 0, 0).tolist() == [0, 1, 2]


def test_a_hard_threshold_includes_itself_and_may_select_nothing():
  acc = np.array([0.1, -0.3, 0.2, np.nan, 0.0], cases.F32)
  assert models.HardThreshold(0.2).select(acc, 0, 0).tolist() == [1, 2, 3]
  assert models.HardThreshold(9.0).select(acc[:3], 0, 0).tolist() == []
  assert models.HardThreshold(0.0).select(acc, 0, 0).tolist() == [0, 1, 2, 3, 4]
  rising = models.HardThreshold(lambda step: 0.15 * (step + 1))
  assert rising.select(acc[:3], 0, 0).tolist() == [1, 2]
  assert rising.select(acc[:3], 2, 0).tolist() == []
  # The float32 nearest to 0.7 is smaller than the double 0.7.
  acc = np.array([0.7], cases.F32)
  assert models.HardThreshold(0.7).select(acc, 0, 0).tolist() == [0]


def test_own_and_union_by_hand():
  gradients = np.array([[4, 1, 0, 3], [1, 1, 5, -4]], cases.F32)
  own = models.ErrorFeedback(4, 2, models.TopK(1)).step(gradients)
  assert own["updates"].tolist() == [2, 0, 2.5, 0]
  assert own["residuals"].tolist() == [[0, 1, 0, 3], [1, 1, 0, -4]]
  assert own["build_up"] == 2.0 and own["density"] == 0.25
  union = models.ErrorFeedback(4, 2, models.TopK(1), send="union")
  result = union.step(gradients)
  assert result["updates"].tolist() == [2.5, 0, 2.5, 0]
  assert result["residuals"].tolist() == [[0, 1, 0, 3], [0, 1, 0, -4]]
  # The residual comes back: 3 + 1 > 3 + 0.
  result = union.step(np.array([[3, 0, 0, 1], [0, 0, 0, 0]], cases.F32))
  assert [list(map(int, s)) for s in result["selected"]] == [[3], [3]]
  assert result["updates"].tolist() == [0, 0, 0, 0]


def compressed(n: int, k: int = 60, **options: Any):
  return models.MomentumCorrection(cases.SIZE, n, models.TopK(k), **options)


def test_without_momentum_it_is_error_feedback():
  for masking in (True, False):
    plain, model = cases.top_k(3), compressed(3, momentum=0.0, masking=masking)
    for t in range(10):
      a, b = plain.step(cases.laplace(t, 3)), model.step(cases.laplace(t, 3))
      np.testing.assert_array_equal(a["updates"], b["updates"])
      np.testing.assert_array_equal(a["residuals"], b["residuals"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_where_all_is_sent_and_none_masked_it_is_momentum_sgd(nesterov):
  model = compressed(2, cases.SIZE, nesterov=nesterov, masking=False)
  velocity = np.zeros(cases.SIZE)
  for t in range(10):
    mean = cases.laplace(t, 2).mean(axis=0, dtype=np.float64)
    velocity = 0.9 * velocity + mean
    want = 0.9 * velocity + mean if nesterov else velocity
    got = model.step(cases.laplace(t, 2))["updates"]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_held_back_adds_up_as_momentum_would(nesterov):
  """Momentum correction: late, but what momentum SGD would have added up."""
  nothing = models.HardThreshold(lambda step: 0.0 if step == 9 else np.inf)
  model = models.MomentumCorrection(cases.SIZE, 2, nothing, nesterov=nesterov)
  velocity, moved = np.zeros(cases.SIZE), np.zeros(cases.SIZE)
  for t in range(10):
    mean = cases.laplace(t, 2).mean(axis=0, dtype=np.float64)
    velocity = 0.9 * velocity + mean
    moved += 0.9 * velocity + mean if nesterov else velocity
  result = cases.train(model, 10)[-1]
  np.testing.assert_allclose(result["updates"], moved, atol=1e-5)
  assert not result["residuals"].any() and not result["momenta"].any()


def test_masking_stops_the_momentum_of_what_was_sent():
  one, other = compressed(1, 1), compressed(1, 1, masking=False)
  gradient = np.zeros((1, cases.SIZE), cases.F32)
  gradient[0, 3] = 1
  for model in (one, other):
    assert model.step(gradient)["updates"][3] == 1
  quiet = np.zeros((1, cases.SIZE), cases.F32)
  assert one.step(quiet)["updates"][3] == 0
  assert other.step(quiet)["updates"][3] == pytest.approx(0.9)


def test_clipping_is_local_and_by_the_root_of_the_devices():
  gradients = np.zeros((4, cases.SIZE), cases.F32)
  gradients[0, :2] = 3, 4
  gradients[1, :2] = 0.3, 0.4
  gradients[2, 5] = np.nan
  gradients[3, 6] = np.inf
  clipped = [momentum.clip(g, 2 / math.sqrt(4)) for g in gradients]
  np.testing.assert_allclose(clipped[0][:2], [0.6, 0.8], rtol=1e-6)
  assert np.array_equal(clipped[1], gradients[1])
  assert np.isnan(clipped[2]).sum() == 1 and np.isinf(clipped[3]).sum() == 1
  result = compressed(4, 2, clip_norm=2.0).step(gradients[[0, 1, 1, 1]])
  np.testing.assert_allclose(result["updates"][:2], [1.5 / 4, 2 / 4], rtol=1e-6)
