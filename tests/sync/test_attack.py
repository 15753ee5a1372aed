"""Some cases of every front of the generated attack, `tests/helpers/attack`.

`python -m tests.helpers.attack` runs thousands. Here hypothesis draws the
seeds; most of the time goes into compiling, so that fronts which others test,
too, are run by `-m more`.
"""

from attack import front as attack
from attack import fronts
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from zenjax.kernels import _dispatch

pytestmark = pytest.mark.usefixtures("as_optax_computes")

CASES = 24
# Fronts that nothing else reaches, and that are compiled soon.
ALWAYS = (
  "rows of 2**30",
  "rows on two axes",
  "rows of three tables, recursive_doubling, two axes",
  "rows with int64 ids",
  "float64",
  "explicit axes, one of two",
  "permuted devices",
  "carry, bfloat16",
  "carry, sum",
  "error_feedback",
  "optax: inject_hyperparams",
  "owners, 3 and rows",
  "restarted",
  "row gradients: scaled",
)


@pytest.mark.usually(
  "rows of three*",
  "optax*",
  "rows on two*",
  "rows with int64*",
  "carry, sum",
  "row gradients*",
)
@pytest.mark.parametrize(
  "front",
  [
    pytest.param(
      front,
      id=front.name,
      marks=() if front.name in ALWAYS else pytest.mark.more,
    )
    for front in fronts.FRONTS
  ],
)
@pytest.mark.filterwarnings("ignore:`capacities` of leaf:UserWarning")
def test_drawn_cases(front):
  cases = CASES if front.weight > 0.1 else 2

  @hypothesis.settings(max_examples=cases)
  @hypothesis.given(st.integers(0, 2**32 - 1))
  def holds(seed):
    front.holds(front.case(seed, 0))

  holds()


def test_names_are_those_of_fronts():
  names = [front.name for front in fronts.FRONTS]
  assert len(set(names)) == len(names) and set(ALWAYS) <= set(names)


def test_a_front_that_is_wrong_fails_with_the_smallest_case():
  """An element is lost where it is negative."""
  wrong = attack.Front(
    "wrong",
    lambda: lambda x: np.maximum(x, 0),
    lambda rng: rng.integers(-9, 9, (4, 5)).astype(np.float32),
    lambda x, got: np.testing.assert_array_equal(got, x),
  )
  failure = next(attack.attack(wrong, 3, [1]))
  assert failure is not None and failure.number == 1
  assert "--fronts 'wrong' --seed 3 --number 1" in str(failure)
  less = attack.smallest(wrong, wrong.case(3, 1))
  assert np.count_nonzero(less) == 1 and less.min() < 0


@pytest.mark.more
def test_kernels_are_what_runs():
  """Of TPUs and GPUs, interpreted: with none the fronts would test nothing."""
  chosen = [f for f in fronts.FRONTS if f.name.startswith("kernels")]
  assert len(chosen) == 2
  for front in chosen:
    with _dispatch.recording() as calls:
      front.build()(front.case(0, 0))
    ran = {call.name for call in calls if _dispatch.EVERYWHERE in call.kernels}
    assert ran >= {"mask_pack", "compact"}, calls
