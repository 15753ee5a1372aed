"""Cells made by hand, as `benchmarks.run network` keeps them."""

from benchmarks import campaign
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.campaigns.network.campaign import Grid
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings

FACTS = {
  "density": 0.01,
  "union_density": 0.03,
  "dense_bytes": 8e6,
  "bound_bytes": 1e6,
}
# At 200mbit, 25e6 bytes a second: 40 ms for the bound.


def cell(variant="zen", seconds=0.1, **changes):
  values = {
    "hosts": 2,
    "rate": "200mbit",
    "workload": "lm1b-lstm",
    "variant": variant,
    "repeats": 2,
    "batches": 2,
    "wrong": 0,
    "compile_s": 1.5,
    "wire_bytes": 1.5e6,
    "least_wire_bytes": 1.25e6,
    "received_bytes": 1.6e6,
    "facts": FACTS,
    "host_times_s": [[seconds, seconds / 2], [seconds / 2, seconds]],
  }
  return Cell(**(values | changes))


def found(*cells):
  findings = Findings(campaign.software(cells_lib.CODE, loopback=False))
  for each in cells:
    findings.add(each)
  return findings


def grid(**changes):
  values = {
    "hosts": (2,),
    "rates": ("200mbit",),
    "workloads": ("lm1b-lstm",),
    "variants": ("psum", "zen"),
    "repeats": 2,
    "batches": 2,
  }
  return Grid(**(values | changes))
