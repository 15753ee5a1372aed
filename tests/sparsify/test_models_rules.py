"""Rules of the models, by hand: how partitions move and thresholds follow."""

import math

import numpy as np
import pytest
import sparsifier_cases as cases
import sparsifier_models as models
from sparsifier_models import partitions
from sparsifier_models import thresholds


def test_block_sizes_are_the_published_ones():
  division = partitions.BlockPartitions(60_000, 8)
  assert division.block_size == 32 and division.minimum == 32.0
  bounds = division.bounds()
  assert bounds[1] == 128 * 32
  # 45 % of the model is remainder, all in the last partition: 52 % of it.
  assert (bounds[-1] - bounds[-2]) / 60_000 == pytest.approx(0.5221, abs=1e-4)
  assert partitions.BlockPartitions(10_000_000, 8).block_size == 9_760
  assert partitions.BlockPartitions(40_000, 3).blocks == [342, 341, 341]
  even = partitions.StaticPartitions(10, 4)
  assert even.bounds().tolist() == [0, 3, 6, 8, 10]


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: partitions.BlockPartitions(32_767, 8), "32768 elements"),
    (lambda: partitions.BlockPartitions(9_999, 65, blocks=64), "65 partitions"),
    (lambda: partitions.StaticPartitions(7, 8), "8 partitions of 7"),
    (lambda: thresholds.wanted(0.001, 999), "selects nothing"),
    (lambda: thresholds.wanted(0.0, 10), "selects nothing"),
    (lambda: thresholds.wanted(1.5, 10), "selects nothing"),
  ],
)
def test_what_the_published_code_divides_by_zero_on_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def division_of(blocks: list[int], block_size: int = 30):
  division = partitions.BlockPartitions(1_920, len(blocks), 64, 1)
  division.blocks, division.block_size = list(blocks), block_size
  division.minimum = 2.5
  return division


def test_blocks_move_from_heavy_to_light_neighbours_only():
  # The fair count is 100; a block is worth 30 * 300 // 1920 = 4.
  for counts, after in [
    ([200, 50, 50], [9, 11, 10]),
    ([50, 50, 200], [10, 11, 9]),
    ([106, 94, 100], [9, 11, 10]),
    ([94, 106, 100], [11, 9, 10]),
    ([105, 94, 101], [10, 10, 10]),  # 1.05 is not above 1.05
    ([106, 96, 98], [10, 10, 10]),  # 0.96 is not below 0.95238
    ([200, 100, 0], [10, 10, 10]),  # the middle one is neither
    ([0, 0, 0], [10, 10, 10]),
    ([1, 1, 0], [10, 10, 10]),  # fewer than n: nothing to compare with
  ]:
    division = division_of([10, 10, 10])
    division.rebalance(counts)
    assert division.blocks == after, counts


def test_a_sweep_sees_the_moves_further_left():
  # The fair count is 400, so above 420 is heavy and below 381 light.
  for block_size, counts, after in [
    # A block is worth 37: the middle one rises to 387 and takes no second.
    (60, [425, 350, 425], [9, 11, 10]),
    (30, [425, 350, 425], [9, 12, 9]),
    # A block is worth 50: the middle one rises to 430 and passes it on.
    (80, [450, 380, 370], [9, 10, 11]),
    (30, [450, 380, 370], [9, 11, 10]),
  ]:
    division = division_of([10, 10, 10], block_size)
    division.rebalance(counts)
    assert division.blocks == after, (block_size, counts)


def test_a_giver_keeps_the_minimum_and_the_sweep_goes_on():
  for blocks, after in [
    ([3, 10, 10, 3], [3, 10, 10, 3]),
    ([4, 10, 10, 4], [3, 11, 11, 3]),
    ([3, 10, 10, 4], [3, 10, 11, 3]),
  ]:
    division = division_of(blocks)
    division.rebalance([200, 10, 10, 200])
    assert division.blocks == after


def test_the_published_bands_and_constants():
  for count, factor in [
    (0, 0.995),
    (909, 0.995),
    (910, 1.00125),
    (1_000, 1.00125),
    (1_100, 1.00125),
    (1_101, 1.005),
  ]:
    threshold = models.PaperThreshold(1_000)
    assert threshold.value == 1 / (2 * math.sqrt(1_000))
    threshold.update(count)
    assert threshold.value == 1 / (2 * math.sqrt(1_000)) * factor, count
  # A threshold that is off by a factor of 10 takes 462 steps.
  assert math.ceil(math.log(10) / math.log(1.005)) == 462


def test_the_first_step_uses_the_first_threshold_unchanged():
  first = cases.train(cases.micro(2), 1)[0]["threshold"]
  assert first == 1 / (2 * math.sqrt(60))
  assert cases.train(cases.micro(2, start=0.3), 1)[0]["threshold"] == 0.3


def test_a_float32_threshold_stays_beside_the_double():
  double, single = (
    [
      result["threshold"]
      for result in cases.train(cases.micro(2, threshold_dtype=dtype), 200)
    ]
    for dtype in (np.float64, np.float32)
  )
  np.testing.assert_allclose(single, double, rtol=200 * 2.0**-23)
  assert [np.float32(value) for value in single] == single
  assert single != double


def test_the_damped_rule_by_hand():
  threshold = models.DampedThreshold(100, 2.0)
  threshold.update(200)
  assert threshold.value == pytest.approx(2.0 * 2**0.03)
  for count, step in [(0, -0.05), (1, -0.05), (100, 0.0), (10_000, 0.05)]:
    threshold = models.DampedThreshold(100, 2.0)
    threshold.update(count)
    assert threshold.value == pytest.approx(2.0 * math.exp(step)), count


def test_the_drift_by_hand():
  threshold = models.DampedThreshold(100, 2.0)
  threshold.update(120)
  assert threshold.drift == pytest.approx(0.0002)
  threshold.update(100)
  assert threshold.value == pytest.approx(2.0 * 1.2**0.03 * math.exp(0.0002))
  threshold.update(80)
  assert threshold.drift == pytest.approx(0)
  for drift, count, after in [
    (0.03, 90, 0.0299),
    (0.03, 75, 0.02975),
    (0.03, 50, 0.02975),
    (0.03, 150, 0.03025),
    (0.03, 300, 0.03),  # 0.063 is cut to 0.05: nothing adds up
    (-0.03, 300, -0.02975),
    (-0.03, 400, -0.02975),
    (0.03, 401, 0.0),  # far off
    (0.03, 25, 0.02975),
    (0.03, 24, 0.0),
    (0.03, 0, 0.0),
  ]:
    threshold = models.DampedThreshold(100, 2.0)
    threshold.drift = drift
    threshold.update(count)
    assert threshold.drift == pytest.approx(after), (drift, count)


def test_a_single_stays_one():
  threshold = models.DampedThreshold(100, 2.0, np.float32)
  threshold.update(113)
  assert threshold.value.dtype == threshold.drift.dtype == np.float32
  assert threshold.drift == cases.F32.type(0.001) * (
    cases.F32.type(113) / cases.F32.type(100) - cases.F32.type(1)
  )


def shifted(pool: np.ndarray, size: int):
  """Gradients that cost no new random numbers: windows of one long draw."""
  shifts = np.random.default_rng(1).integers(0, pool.shape[1] - size, 1_000)
  return lambda step, n: pool[:n, shifts[step] : shifts[step] + size]


@pytest.mark.parametrize("draw", ["normal", "laplace"])
@pytest.mark.parametrize("make", cases.EXCLUSIVE.values(), ids=cases.EXCLUSIVE)
def test_the_published_rule_finds_the_density_in_the_end(make, draw):
  rng = np.random.default_rng(0)
  pool = getattr(rng, draw)(0, 0.02, (2, 9_000)).astype(np.float32)
  results = cases.train(make(2, 2_048, 0.02), 900, shifted(pool, 2_048))
  got = [result["density"] for result in results]
  assert np.mean(got[-300:]) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("scale", [1e-5, 1e-1])
def test_the_damped_rule_finds_it_at_any_scale_and_sooner(scale):
  pool = cases.laplace(0, 2, 9_000, scale)
  start = float(np.quantile(np.abs(pool), 0.98))
  model = cases.micro(2, 2_048, 0.02, controller="damped", start=start)
  results = cases.train(model, 300, shifted(pool, 2_048))
  got = [result["density"] for result in results]
  assert np.mean(got[100:]) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("rate", [-0.009, 0.009])
def test_the_damped_rule_follows_a_scale_that_shrinks_or_grows(rate):
  pool = cases.laplace(0, 2, 9_000)
  draw = shifted(pool, 2_048)
  grown = lambda t, n: draw(t, n) * cases.F32.type(math.exp(rate * t))
  start = float(np.quantile(np.abs(pool), 0.98))
  model = cases.micro(2, 2_048, 0.02, controller="damped", start=start)
  got = [result["density"] for result in cases.train(model, 600, grown)]
  assert np.mean(got[100:]) == pytest.approx(0.02, rel=0.05)
  without = cases.micro(2, 2_048, 0.02, controller="damped", start=start)
  without.threshold = models.DampedThreshold(40, start, drift_gain=0)
  got = [result["density"] for result in cases.train(without, 600, grown)]
  assert abs(np.mean(got[100:]) / 0.02 - 1) > 0.2


def test_every_comparison_has_an_exact_form_in_integers():
  """For programs without doubles; the second in unsigned 32 bits."""
  rng = np.random.default_rng(0)
  base = np.concatenate([np.arange(1, 3_000), rng.integers(1, 2**26, 3_000)])
  quotient, rest = base // 50_000, base % 50_000
  below = 47_619 * quotient + (47_619 * rest + 49_999) // 50_000
  for factor in (partitions.HEAVY, partitions.LIGHT, 1.1, 0.909):
    for shift in (-1, 0, 1):
      count = np.round(base * factor).astype(np.int64) + shift
      ratio = count / base
      assert ((ratio > partitions.HEAVY) == (20 * count > 21 * base)).all()
      assert ((ratio < partitions.LIGHT) == (count < below)).all()
      assert ((ratio > 1.1) == (10 * count > 11 * base)).all()
      assert ((ratio > 0.909) == (1_000 * count > 909 * base)).all()


def test_what_a_block_is_worth_has_an_exact_form_in_32_bits():
  """An estimate in float32, corrected by a remainder that wraps around."""
  rng = np.random.default_rng(0)
  for size in (32_768, 98_304, 10_000_019, 2**30 - 1):
    block = partitions.BlockPartitions(size, 8).block_size
    total = rng.integers(0, size + 1, 5_000).astype(np.int32)
    total[:100] = np.arange(100) * min(1_024, size // 100)
    share = np.float32(block / size)
    guess = (total.astype(np.float32) * share).astype(np.int32)
    rest = total * np.int32(block) - guess * np.int32(size)
    worth = guess + (rest >= size) - (rest < 0)
    want = total.astype(np.int64) * block // size
    np.testing.assert_array_equal(worth, want)
