"""Whole training steps, compiled for chips with none attached.

What the compilers say is checked: what is sent, that no second table is held,
that no register of a GPU spills, and that backward work runs beside the first
round. CI compiles for TPU v5e and for H200, each kind of step once;
`python -m pytest -m every_target` compiles the rest, some minutes more.
"""

import re

import hlo
import pytest
import whole_steps
from whole_steps import LAYERS
from whole_steps import ROWS
from whole_steps import TABLE
from whole_steps import WIDTH

from benchmarks import targets
import zenjax
from zenjax.kernels.operations import OPERATIONS

# JAX 0.12 announces that Pallas will leave Triton.
pytestmark = pytest.mark.filterwarnings(
  "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

_IN_CI = [
  ("v5e:2x4", "array", "pallas"),
  ("v5e:2x4", "rows", "auto"),
  ("gpu-h200", "array", "auto"),
  ("gpu-h200", "array", "pallas"),
  ("gpu-h200", "rows", "pallas"),
]
# Where a compiler may rewrite collectives, they are counted on these two.
_EXACT = ("v5e:2x4", "gpu-h200")
# What such a step takes of the kernels that there are. Listed rows are found by
# a sort and gathered from what is listed; eight owners of columns have sixteen
# each, too few for rows of a TPU.
_USED = {
  ("tpu", "array"): ("mask_pack", "compact", "merge", "expand"),
  ("tpu", "rows"): (),
  ("cuda", "array"): ("mask_pack", "compact", "merge", "expand"),
  ("cuda", "rows"): ("merge",),
}


def _cases():
  for target in (*targets.TPUS, "gpu-h200"):
    for grads in ("array", "rows"):
      for kernels in ("auto", "pallas"):
        case = (target, grads, kernels)
        if kernels == "pallas" and not _used(target, grads):
          continue
        marks = [] if case in _IN_CI else [pytest.mark.every_target]
        yield pytest.param(*case, marks=marks, id="-".join(case))


def _used(target, grads):
  return _USED[whole_steps.platform(target), grads]


@pytest.mark.parametrize("target, grads, kernels", [*_cases()])
def test_whole_step(target, grads, kernels):
  try:
    step = whole_steps.compile(target, grads, kernels)
  except ImportError as error:
    pytest.skip(str(error))
  for name in OPERATIONS:
    there = kernels == "pallas" and name in _used(target, grads)
    assert (f"zenjax_{name}" in step.text) == there
  check_memory(step, grads)
  check_collectives(step, grads, exact=target in _EXACT)
  if target == "gpu-h200":
    check_overlap_on_gpus(step)
  if target == "v5e:2x4":
    check_overlap_on_tpus(step)


@pytest.mark.parametrize("target", ["v5e:2x4", "gpu-h200"])
def test_auto_means_xla_where_nothing_was_measured(target):
  """The same program, and no kernel in it."""
  try:
    texts = {
      kernels: _text(target, "array", kernels)
      for kernels in ("auto", "xla", "pallas")
    }
  except ImportError as error:
    pytest.skip(str(error))
  assert texts["auto"] == texts["xla"]
  assert [n for n in OPERATIONS if f"zenjax_{n}" in texts["auto"]] == []
  assert [n for n in OPERATIONS if f"zenjax_{n}" not in texts["pallas"]] == []


def test_kernels_that_cannot_serve_a_step_are_never_replaced():
  """Eight owners of columns have sixteen each, too few for rows of a TPU."""
  said = r"`merge`.* a program for tpu; .* float32 of width 16"
  try:
    with pytest.raises(NotImplementedError, match=said):
      _text("v5e:2x4", "rows", "pallas")
  except ImportError as error:
    pytest.skip(str(error))


def _text(target, grads, kernels):
  tuning = zenjax.Tuning(kernels=kernels)
  return whole_steps.lower(target, grads, tuning).as_text()


def check_memory(step, grads, look_ups=16):
  """The table is updated in place; a dense gradient is one more, no copy.

  Of rows a device holds less than the `look_ups`-th part of a table for each
  device that looks rows up.
  """
  assert step.aliased >= TABLE
  assert not hlo.copies(step.text, (ROWS, WIDTH))
  if grads == "array":
    assert TABLE <= step.temporary < 2 * TABLE
  else:
    assert not hlo.passes(step.text, (ROWS, WIDTH))
    assert step.temporary < TABLE // look_ups * step.devices


def check_collectives(step, grads, exact, exchange="collectives"):
  """Those that zenjax declares, where it says, and the sums of the layers."""
  declared = whole_steps.declared(grads, step.devices, exchange)
  found = hlo.collectives(step.text, step.devices)
  assert not any("branch" in f.inside for f in found)
  if exact:
    plain = [f for f in found if f.op == "all-reduce" and not f.inside]
    assert sum(f.elements for f in plain) == declared.plain
    rest = [f for f in found if f not in plain]
    assert sorted(rest) == sorted(declared.exchange)
  # Whatever they are called: none over the table but in the dense path.
  for f in found:
    assert f.inside == ("while",) or f.elements < ROWS * WIDTH // 8
    dense = f.inside == ("while",) and f.op != "remote-copy"
    assert grads == "array" or not dense


def check_overlap_on_gpus(step):
  """Gradients of weights are computed while the push is on its way."""
  assert "is_scheduled=true" in step.text
  entry = hlo.computations(step.text)[""]
  (start,) = hlo.lines(entry, r" all-to-all-start\(.*zen/push/\S*all_to_all")
  (done,) = hlo.lines(entry, r" all-to-all-done\(.*zen/push/\S*all_to_all")
  backward = hlo.lines(entry, r"^ *%gemm.*op_name=[^ ]*transpose\(jvp\(")
  beside = [i for i in backward if start < i < done]
  assert 2 * LAYERS <= len(backward) and beside


def check_overlap_on_tpus(step):
  """A pull runs inside of backward matrix products."""
  fused = [
    "\n".join(body)
    for name, body in hlo.computations(step.text).items()
    if name.startswith("async_collective_fusion")
  ]
  beside = [
    body
    for body in fused
    if re.search(r"all-gather\(.*zen/pull/\S*all_gather", body)
    and re.search(r" convolution\(.*transpose\(jvp\(", body)
  ]
  assert beside
