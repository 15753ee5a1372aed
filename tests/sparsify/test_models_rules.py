"""Rules of the models, by hand: how partitions move and thresholds follow."""

import math

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
    (0.03, 200, 0.03),  # 0.0508 is cut to 0.05: nothing adds up
    (-0.03, 200, -0.02975),
    (0.03, 201, 0.0),  # far off
    (0.03, 49, 0.0),
    (0.03, 0, 0.0),
  ]:
    threshold = models.DampedThreshold(100, 2.0)
    threshold.drift = drift
    threshold.update(count)
    assert threshold.drift == pytest.approx(after), (drift, count)
