"""Topologies: presets, rates, files, and what is measured of a machine."""

import json
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
import pytest
from refusals import names

from zenjax.planner import Link
from zenjax.planner import measure_links
from zenjax.planner import measure_work
from zenjax.planner import Topology
from zenjax.planner import Work

_TEXT: Any = "1gbit"
POD = Topology.preset("h100", 8, hosts=4, network="400 Gbit/s", ports=8)
MACHINES = (
  *("a100", "h100", "h200", "l4", "v100"),
  *("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"),
)


@pytest.mark.parametrize("name", MACHINES)
def test_presets_say_whose_figures_they_are(name):
  found = Topology.preset(name, 8)
  assert found.name == name and found.axes == ("device",)
  assert "data sheet" in found.source or "docs.cloud.google.com" in found.source
  assert "peak" in found.source and (found.memory_bytes or 0) > 1e10
  # Nothing is read or written faster than the memory allows.
  work = found.links[0].work
  assert 4 * work.mask_byte == work.move_byte > 0


def test_hosts_share_their_cards():
  slow, fast = POD.links
  assert slow.bandwidth == 400e9 / 8 and fast.bandwidth == 450e9
  assert POD.devices == 32 and "8 network cards" in POD.name
  one = Topology.preset("h100", 8, hosts=4, network="400gbit")
  assert one.links[0].bandwidth == 50e9 / 8 and "1 network card a" in one.name
  assert POD.with_hosts(7).sizes == (7, 8)
  alone = Topology.network("25 Gbit/s", 8)
  assert alone.links[0].work == Work() and alone.memory_bytes is None


RATES = {
  25e9: (
    *("25 Gbit/s", "25gbit", "25 Gb/s", "25Gbps", "25 GBIT"),
    *("25 gbps", "25 Gbits/s", 25e9),
  ),
  10e9: ("10 Gbit/sec",),
  24.8e9: ("3.1 GB/s", "3.1 GBytes/s"),
  200e6: ("200 Mbit/s",),
}


@pytest.mark.parametrize(
  ("written", "bits"),
  [(x, bits) for bits, every in RATES.items() for x in every],
)
def test_rates_are_read_as_people_write_them(written, bits):
  found = Topology.network(written, 2)
  assert found.links[0].bandwidth == pytest.approx(bits / 8)
  again = Topology.network(found.name.split(",")[0], 2)
  assert again.links[0].bandwidth == pytest.approx(bits / 8)


def test_json_there_and_back(tmp_path):
  path = tmp_path / "pod.json"
  path.write_text(POD.to_json())
  assert Topology.load(path) == POD
  assert hash(Topology.load(path)) == hash(POD) != hash(POD.with_hosts(2))


def _mesh(*sizes: int) -> Mesh:
  devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
  return Mesh(devices, ("host", "device")[-len(sizes) :])


def test_measured_axes_are_a_topology():
  axes = ("device", "host")
  found = measure_links(_mesh(2, 2), axes, sizes=(4096, 1 << 18), repeats=1)
  assert (found.axes, found.sizes) == (axes, (2, 2))
  assert Topology.from_json(found.to_json()) == found
  assert "lines miss times by up to" in found.source
  for link in found.links:
    assert link.bandwidth > 0 and link.latency_s >= 0 and link.work != Work()


def _read(**changes):
  """Reads a file that somebody has changed."""
  document = json.loads(POD.to_json()) | changes
  return lambda: Topology.from_json(json.dumps(document))


def _network(rate):
  return lambda: Topology.network(rate, 2)


_AGAIN = "measure_links"  # How to make another file.
_NO_RATES = (
  *("25", "25G", "25 GB", "25 gb/s", "25 GBPS"),
  *("1 0 gbit", "fast", "1e999 bit", 0),
)
REFUSED = [
  *((_network(rate), ["'25 Gbit/s'", repr(rate)]) for rate in _NO_RATES),
  (lambda: Topology.network("1gbit", 2, ports=0), ["`ports`"]),
  (lambda: Topology.network("1gbit", 0), ["`sizes[0]`", "positive"]),
  (lambda: Topology.preset("b9", 8), ["`machine`", "h100", "measure_links"]),
  (lambda: Topology.preset("h100", 8, hosts=2), ["`network`", "hosts=2"]),
  (lambda: Topology.preset("h100", 8, network="1gbit"), ["`network`"]),
  (lambda: Topology(axes=("a",), sizes=(), links=()), ["`axes`", "('a',)"]),
  (lambda: Link(bandwidth=0.0, latency_s=0.0), ["`bandwidth`", "positive"]),
  (lambda: Link(bandwidth=1e9, latency_s=-1.0), ["`latency_s`", "0 or more"]),
  (lambda: Link(bandwidth=_TEXT, latency_s=0.0), ["finite number", "1gbit"]),
  (lambda: Work(mask_byte=-1.0), ["`mask_byte`", "0 or more"]),
  # Files.
  (lambda: Topology.load("nowhere.json"), ["No such", "nowhere.json"]),
  (lambda: Topology.from_json("{}"), ["lacks 'version'", "another kind of"]),
  (_read(version=1), ["version 2", "got 1", _AGAIN]),
  (_read(version=None), ["version 2", "got None", _AGAIN]),
  (_read(sizes=[4, 0]), ["`sizes[1]`", "positive", _AGAIN]),
  (_read(links=[{"bandwidth": 1e9}]), ["`links[0]`", "latency_s", _AGAIN]),
  (_read(memory_bytes="80 GB"), ["`memory_bytes`", "a finite number", _AGAIN]),
  (_read(axes=["a", "a"]), ["`axes`", "different names", _AGAIN]),
  # What cannot be measured.
  (lambda: measure_links(_mesh(1)), ["`axis_name`", "several devices"]),
  (lambda: measure_links(_mesh(2), "host"), ["`axis_name`", "'host'"]),
  (lambda: measure_links(_mesh(2), repeats=0), ["`repeats`", "got 0"]),
  (lambda: measure_links(_mesh(2), sizes=(0,)), ["`sizes`", "got 0"]),
  (lambda: measure_work(repeats=0), ["`repeats`", "got 0"]),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused(call, words):
  with pytest.raises((OSError, TypeError, ValueError)) as error:
    call()
  names(error, *words)
