"""What `retune` found, and whether another compilation is earned back."""

import dataclasses
import math

from zenjax._planner._plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retuned:
  """What `retune` found: print it.

  Attributes:
    plan: For what the run has seen: its choices, with capacities pinned.
    changed: What differs from the plan that runs, a line each.
    now_seconds: What a step should take as it runs.
    then_seconds: What it should take with the new plan.
    compile_seconds: That compiling it takes; None where it was not told.
    steps_left: That are still to be taken; None where they were not told.

  Example:
    >>> import zenjax
    >>> leaf = zenjax.LeafPlan(
    ...   name="table", shape=(4096, 8), dtype="float32", scheme="dense"
    ... )
    >>> found = zenjax.Retuned(
    ...   plan=zenjax.Plan(leaves=(leaf,), mesh=(("data", 8),)),
    ...   changed=("table: zen/1 -> dense",),
    ...   now_seconds=0.5, then_seconds=0.25,
    ...   compile_seconds=5.0, steps_left=1000,
    ... )
    >>> found.earned_after, found.pays
    (20, True)
    >>> print(found)
    table: zen/1 -> dense
    a step: 500 ms as it runs, 250 ms planned anew
    compiling takes 5 s, earned back after 20 steps; 1,000 are left: it pays
  """

  plan: Plan
  changed: tuple[str, ...]
  now_seconds: float
  then_seconds: float
  compile_seconds: float | None = None
  steps_left: int | None = None

  @property
  def gain_seconds(self) -> float:
    """What a step should take less."""
    return self.now_seconds - self.then_seconds if self.changed else 0.0

  @property
  def earned_after(self) -> int | None:
    """Steps that gain what compiling takes; None: none do, or unknown."""
    if self.compile_seconds is None or not self.gain_seconds > 0:
      return None
    return math.ceil(self.compile_seconds / self.gain_seconds)

  @property
  def pays(self) -> bool | None:
    """Whether the steps left gain more than compiling takes; None: unknown."""
    if not self.gain_seconds > 0:
      return False
    if self.compile_seconds is None or self.steps_left is None:
      return None
    return self.gain_seconds * self.steps_left > self.compile_seconds

  def __str__(self) -> str:
    if not self.changed:
      return "nothing changes: the plan is as it would be made now"
    step = (
      f"a step: {self.now_seconds * 1e3:.4g} ms as it runs,"
      f" {self.then_seconds * 1e3:.4g} ms planned anew"
    )
    return "\n".join([*self.changed, step, self._verdict()])

  def _verdict(self) -> str:
    if not self.gain_seconds > 0:
      return "nothing is gained: leave the plan as it is"
    if self.compile_seconds is None:
      return self._without_compile_seconds()
    told = (
      f"compiling takes {self.compile_seconds:.3g} s, earned back after"
      f" {self.earned_after:,} steps"
    )
    if self.steps_left is None:
      return f"{told}: it pays where more are left"
    pays = (
      "it pays" if self.pays else "it does not pay, leave the plan as it is"
    )
    return f"{told}; {self.steps_left:,} are left: {pays}"

  def _without_compile_seconds(self) -> str:
    if self.steps_left is None:
      return (
        f"1,000 steps gain {self.gain_seconds * 1e3:.3g} s: it pays where those"
        " left gain more than compiling takes"
      )
    won = self.gain_seconds * self.steps_left
    return (
      f"the {self.steps_left:,} steps left gain {won:.3g} s: it pays where"
      " compiling takes less"
    )
