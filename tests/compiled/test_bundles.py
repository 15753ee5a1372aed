"""What the compilers say of the operations: reads, bytes and bundles."""

import os
import subprocess
import sys

from chips import lowered_mask_pack
import hlo
from kernel_cases import Shape
import pytest

from benchmarks import bundles
from benchmarks import targets

ROWS = 1 << 20
WIDTHS = (16, 64, 128)


@pytest.mark.parametrize("target, fusions", [("v5e:2x4", 4), ("gpu-h200", 7)])
def test_reference_reads_the_gradient_once(target, fusions):
  """Mask and pack by XLA: all but one instruction cost by the rows alone."""
  aside = []
  for width in WIDTHS:
    shape = Shape(ROWS, width, 8)
    compiled = lowered_mask_pack(target, shape, "xla").compile()
    text, cost = compiled.as_text(), compiled.cost_analysis()
    assert bundles.reads(text) == 1
    entry = hlo.computations(text)[""]
    # The masks, their words, and a loop over the turns of lanes.
    assert len(hlo.lines(entry, r" fusion\(")) <= fusions
    assert len(hlo.lines(entry, r" while\(")) == 1
    if target == "v5e:2x4":
      aside.append(cost["bytes accessed"] - ROWS * width * 4)
  # What XLA counts grows by one read of the table; for GPUs it counts nothing.
  assert len(set(aside)) <= 1 and all(x < 300 * ROWS for x in aside)


def test_reads_are_those_of_the_first_argument():
  text = """HloModule two_reads

ENTRY %main (a: f32[8,2], b: f32[8]) -> f32[8] {
  %a.1 = f32[8,2]{1,0} parameter(0)
  %b.1 = f32[8]{0} parameter(1)
  %flat = f32[16]{0} bitcast(%a.1)
  %once = f32[8]{0} fusion(%b.1, %flat), kind=kLoop, calls=%sum
  %again = f32[8]{0} fusion(%a.1), kind=kLoop, calls=%most
  ROOT %c = f32[8]{0} add(%once, %again)
}
"""
  assert bundles.reads(text) == 2


def test_dump_is_read_by_instruction(tmp_path):
  total = "Schedule analysis:\n\ttotal scheduled bundles:    {}\n"
  spilled = (
    " 0x1 : { %1 = sst [smem:[#allocation4_spill]] %s1 }\n"
    " 0x2 : { %2 = vst [vmem:[#allocation5_spill] sm:$0xff] %v1 ;;"
    " %v3 = vld [vmem:[#allocation5_spill] sm:$0xff] }\n"
    " 0x3 : { %3 = vst [vmem:[#allocation5] sm:$0xff] %v1 }\n"
  )
  for name, size in (("fusion.7", 30), ("zenjax_x.1", 4), ("TLP", 900)):
    whole = tmp_path / f"123-{name}-65-schedule-analysis_final_bundles.txt"
    whole.write_text(total.format(size))
    (tmp_path / f"123-{name}-66-final_bundles.txt").write_text(spilled)
  assert bundles.read(tmp_path) == bundles.Dump(
    bundles={"fusion.7": 30, "zenjax_x.1": 4},
    spills={"fusion.7": 2, "zenjax_x.1": 2},
  )


def test_command_counts_without_a_tpu():
  try:
    targets.tpu("v5e:2x4")
  except ImportError as error:
    pytest.skip(str(error))
  shown = subprocess.run(
    [sys.executable, "-m", "benchmarks.bundles"]
    + ["--rows", "4096", "--operations", "expand"],
    check=True,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"},
  ).stdout
  by_xla, by_hand = (
    line.split() for line in shown.splitlines() if " expand " in f" {line}"
  )
  assert by_xla[1] == "xla" and by_hand[1] == "pallas"
  # must move, accessed, reads, instructions, bundles, spills
  assert by_xla[4] == by_hand[4] == "1"
  assert 0 < int(by_hand[6].replace(",", "")) < int(by_xla[6].replace(",", ""))
