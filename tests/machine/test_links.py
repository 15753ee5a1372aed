"""Topologies, and links that are measured."""

import json
import math
import re
import sys

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

import zenjax
from zenjax._src.machine import local_work
from zenjax._src.machine import machines
from zenjax._src.machine import measure
from zenjax._src.machine import rates
from zenjax._src.machine import topologies
from zenjax._src.machine.topologies import Fit
from zenjax._src.machine.topologies import Level

CURVE = ((1e3, 1e-3), (1e6, 5e-3))


def measured() -> zenjax.planner.Topology:
  """As measured: curves, fits, one of them without a slope, and local work."""
  link = zenjax.planner.Link(
    bandwidth=1e9,
    latency_s=1e-5,
    curves={("all_gather", 4): CURVE, ("all_to_all", 4): CURVE[:1]},
    work=zenjax.planner.Work(mask_byte=1e-10),
    buffer_s=2e-3,
  )
  fits = (
    Fit(op="all_gather", latency_s=1e-3, bandwidth=2e8, error=0.1),
    Fit(op="all_to_all", latency_s=1e-3, bandwidth=math.inf, error=0.0),
  )
  level = Level(name="data", devices=4, link=link, fits=fits)
  return zenjax.planner.Topology(
    levels=(level,), memory_bytes=1e9, source="here"
  )


# --- topologies -------------------------------------------------------------


def test_json_there_and_back():
  for topology in (
    measured(),
    zenjax.planner.Topology.preset("tpu-v5p", 64, hosts=2, network="100gbit"),
    zenjax.planner.Topology.network("25gbit", 16),
  ):
    back = zenjax.planner.Topology.from_json(topology.to_json())
    assert back == topology
    assert hash(back) == hash(topology)


def test_hash_tells_topologies_apart():
  assert measured() != measured().resized(data=8)
  assert len({measured(), measured(), measured().resized(data=8)}) == 2


def test_a_file_of_before_buffers_were_timed_is_read():
  document = json.loads(measured().to_json())
  del document["levels"][0]["buffer_s"]
  back = zenjax.planner.Topology.from_json(json.dumps(document))
  assert back.levels[0].link.buffer_s == 0
  assert back != measured()


def test_a_file_is_loaded(tmp_path):
  path = tmp_path / "here.json"
  path.write_text(measured().to_json())
  assert zenjax.planner.Topology.load(path) == measured()
  with pytest.raises(ValueError, match="none.json.*cannot be read"):
    zenjax.planner.Topology.load(tmp_path / "none.json")


def _level(**fields):
  return lambda d: d["levels"][0].update(fields)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (lambda d: d.update(version=7), "of version 1, got 7"),
    (lambda d: d.update(levels=[]), "`levels`.*at least one"),
    (lambda d: d.update(levels=d["levels"] * 2), "each once"),
    (
      lambda d: d.update(levels=[3]),
      r"`levels\[0\]` of the topology must be an object, got 3",
    ),
    (lambda d: d.update(memory_bytes=-1), "`memory_bytes`.*positive, got -1"),
    (lambda d: d.pop("source"), "the topology must.*lacks .'source'.*measure"),
    (lambda d: d.update(note=1), "the topology must.*unknown .'note'"),
    (lambda d: d.update(ports=0), "`ports`.*positive, got 0"),
    (_level(devices=True), r"`levels\[0\].devices`.*whole number, got True"),
    (_level(devices=0), r"`levels\[0\].devices`.*positive, got 0"),
    (_level(bandwidth=0), r"`levels\[0\].bandwidth`.*positive, got 0"),
    (_level(buffer_s=-1), r"`levels\[0\].buffer_s`.*not negative, got -1"),
    (_level(latency_s="1"), r"`levels\[0\].latency_s`.*number, got '1'"),
    (_level(latency_s=10**400), r"`levels\[0\].latency_s`.*finite number"),
    (_level(work={"hash": 1}), r"`levels\[0\].work`.*unknown .'hash'"),
    (_level(work={"mask_row": -1}), r"`levels\[0\].work`.*refused.*0 or more"),
    (_level(curves=[{}]), r"`levels\[0\].curves\[0\]`.*lacks.*'points'"),
    (
      _level(curves=[{"op": "all_gather", "devices": 2, "points": []}]),
      r"`levels\[0\].curves\[0\].points`.*one or more",
    ),
    (
      _level(curves=[{"op": "x", "devices": 2, "points": [[1, 2]]}]),
      "refused: `curves`.*all_gather.*got .'x', 2",
    ),
    (
      _level(
        curves=[{"op": "all_gather", "devices": 2, "points": [[2, 1], [1, 1]]}]
      ),
      "ascending bytes",
    ),
    (
      _level(curves=[{"op": "all_gather", "devices": 2, "points": [[2]]}]),
      r"`levels\[0\].curves\[0\].points\[0\]`.*list of 2, got \[2\]",
    ),
    (
      _level(fits=[{"op": "all_gather"}]),
      r"`levels\[0\].fits\[0\]`.*lacks.*latency_s",
    ),
  ],
)
def test_broken_json_is_refused(change, said):
  document = json.loads(measured().to_json())
  change(document)
  with pytest.raises(ValueError, match=said):
    zenjax.planner.Topology.from_json(json.dumps(document))


def test_what_is_no_json_is_refused():
  with pytest.raises(ValueError, match="the topology is no JSON .* cut short"):
    zenjax.planner.Topology.from_json(measured().to_json()[:-20])


@pytest.mark.parametrize("name", machines.MACHINES)
def test_presets_say_whose_figures_they_are(name):
  topology = zenjax.planner.Topology.preset(name, 8)
  assert topology.sizes == (8,)
  assert "a peak" in topology.source and "latency" in topology.source
  # 16 GB is the smallest of these, 141 GB the largest.
  assert 15e9 < (topology.memory_bytes or 0) < 150e9
  # PCIe of 32 GB/s joins L4s, the slowest by far.
  least = 3e10 if name == "l4" else 1e11
  assert least < topology.levels[0].link.bandwidth < 1e12
  assert topology.name == name and topology.ports == 1


def test_hosts_share_ports():
  one_each = zenjax.planner.Topology.preset(
    "h200", 8, hosts=4, network="400gbit", ports=8
  )
  assert one_each.level("host").link.bandwidth == 50e9
  assert one_each.name == "h200 on 400 Gbit/s, 8 network cards a host"
  assert list(one_each.links) == ["host", "device"]
  assert one_each.links["device"] == one_each.levels[1].link
  shared = zenjax.planner.Topology.preset(
    "tpu-v5e", 8, hosts=4, network="100gbit", ports=2
  )
  assert shared.level("host").link.bandwidth == 12.5e9 * 2 / 8
  assert shared.devices == 32


def test_a_host_has_one_port_unless_more_are_told():
  pod = zenjax.planner.Topology.preset("h200", 8, hosts=4, network="400gbit")
  assert pod.level("host").link.bandwidth == 50e9 / 8
  assert pod.name == "h200 on 400 Gbit/s, 1 network card a host"
  alone = zenjax.planner.Topology.network("400gbit", 4, "h200")
  assert alone.level("host").link.bandwidth == 50e9 and alone.ports == 1
  two = zenjax.planner.Topology.network("400gbit", 4, ports=2)
  assert two.level("host").link.bandwidth == 100e9
  assert two.name == "400 Gbit/s, 2 network cards a host"


def test_another_rate_is_that_of_the_same_ports():
  for pod in (
    zenjax.planner.Topology.preset("h200", 8, hosts=4, network=1e9, ports=2),
    zenjax.planner.Topology.preset("h200", 8, hosts=4, network=1e9),
    zenjax.planner.Topology.network(1e9, 4, "h200", ports=2),
  ):
    faster = topologies.with_rate(pod, 10e9)
    slow, fast = pod.levels[0].link, faster.levels[0].link
    assert fast.bandwidth == pytest.approx(10 * slow.bandwidth)
    assert fast.work == slow.work and faster.levels[1:] == pod.levels[1:]
    assert zenjax.planner.Topology.from_json(faster.to_json()) == faster


def test_a_file_of_before_ports_were_told_has_one():
  document = json.loads(measured().to_json())
  del document["ports"]
  assert zenjax.planner.Topology.from_json(json.dumps(document)) == measured()


@pytest.mark.parametrize(
  ("written", "bits"),
  [
    *[(x, 25e9) for x in ("25gbit", "25 Gbit/s", "25Gbps", "25 GBIT/S")],
    *[(x, 25e9) for x in ("25 Gb/s", "25gbps", "25.0 Gbits/sec", "25e9")],
    *[(x, 25e9) for x in (25e9, 25_000_000_000, np.float32(25e9), " 25 gbit ")],
    *[(x, 24.8e9) for x in ("3.1 GB/s", "3.1GBytes/s", "3.1 GBps", "3.1gB/s")],
    *[(x, 200e6) for x in ("200mbit", "200 Mbit/s", "25 MB/s", "0.2 gbit")],
    *[(x, 1.6e12) for x in ("1.6 Tbit/s", "1.6e3 Gbps", "2e11 bytes/s")],
  ],
)
def test_rates_are_read_as_people_write_them(written, bits):
  assert rates.bits_a_second(written) == pytest.approx(bits)
  link = zenjax.planner.Topology.network(written, 2).levels[0].link
  assert link.bandwidth == pytest.approx(bits / 8)


@pytest.mark.parametrize(
  ("written", "why"),
  [
    *[(x, "may be bits or bytes") for x in ("25gb/s", "25 GBPS", "25GB/S")],
    *[(x, "an amount is no rate") for x in ("25GB", "25Gb", "25 gbytes")],
    *[(x, "is in bits a second") for x in ("25", 25, 999.0)],
    *[(x, "") for x in ("fast", "", "25G", "-1gbit", "0gbit", "1,5 Gbit/s")],
    *[(x, "") for x in (0, -1e9, float("inf"), float("nan"), True, None)],
    *[(x, "") for x in ("1e400 gbit", "25 Gbit/m", "25 Kbit/s", b"25gbit")],
  ],
)
def test_rates_that_may_be_two_are_refused(written, why):
  said = rf"`rate` must be a line rate as '25 Gbit/s', .*got .*{why}"
  with pytest.raises(ValueError, match=said) as error:
    zenjax.planner.Topology.network(written, 2)
  assert repr(written) in str(error.value)
  with pytest.raises(ValueError, match="`network` must be a line rate"):
    network = "" if written is None else written
    zenjax.planner.Topology.preset("h100", 8, hosts=2, network=network)


@pytest.mark.parametrize(
  ("bits", "said"),
  [
    (2e8, "200 Mbit/s"),
    (24.8e9, "24.8 Gbit/s"),
    (4e11, "400 Gbit/s"),
    (1.6e12, "1.6 Tbit/s"),
  ],
)
def test_rates_in_words_are_read_again(bits, said):
  assert rates.in_words(bits) == said
  assert rates.in_words(bits * 0.9999) == said
  assert rates.bits_a_second(said) == pytest.approx(bits)


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ({"machine": "h1000"}, "`machine`.*h100, h200.*got 'h1000'"),
    ({"machine": "h100", "hosts": 2}, "`network` must be given"),
    ({"machine": "h100", "network": "1gbit"}, "`network` must be given"),
    ({"machine": "h100", "hosts": 2, "network": "fast"}, "got 'fast'"),
    ({"machine": "h100", "hosts": 2, "network": "0gbit"}, "got '0gbit'"),
    ({"machine": "h100", "ports": 2}, "`ports` must be given where `network`"),
    ({"machine": "h100", "ports": 0}, "`ports` must be .* at least 1, got 0"),
    ({"machine": "h100", "ports": 1.5}, "`ports` must be .* got 1.5"),
  ],
)
def test_unknown_machines_are_refused(arguments, said):
  with pytest.raises(ValueError, match=said):
    zenjax.planner.Topology.preset(devices=8, **arguments)


def test_other_numbers_of_devices():
  larger = measured().resized(data=64)
  assert larger.devices == 64
  # The curve was measured with 4.
  link = larger.levels[0].link
  assert link.seconds("all_gather", 64, 1e9) == 63 * 1e-5 + 1
  with pytest.raises(ValueError, match="'host'"):
    measured().resized(host=2)


# --- fits -------------------------------------------------------------------


def test_a_line_is_found():
  curve = tuple((x, 2e-4 + x / 5e8) for x in (1e3, 1e5, 1e7))
  found = measure.fit_line("all_gather", curve)
  assert found.latency_s == pytest.approx(2e-4)
  assert found.bandwidth == pytest.approx(5e8)
  assert found.error < 1e-9
  assert found.seconds(1e6) == pytest.approx(2e-4 + 2e-3)


def test_neither_number_is_negative():
  falling = measure.fit_line("all_gather", ((1e3, 2e-3), (1e6, 1e-3)))
  assert falling.bandwidth == math.inf
  # Least relative squares of a constant: 1/2 + 1 over 1/4 + 1, in ms.
  assert falling.latency_s == pytest.approx(1.2e-3)
  assert falling.error == pytest.approx(0.4)
  steep = measure.fit_line("all_gather", ((1e3, 1e-6), (1e6, 1e-2)))
  assert steep.latency_s == 0
  with pytest.raises(ValueError, match="positive seconds"):
    measure.fit_line("all_gather", ((1e3, 0.0),))


def test_a_poor_fit_is_told():
  straight = tuple((x, 1e-4 + x / 1e9) for x in (1e3, 1e5, 1e7))
  bent = ((1e3, 1e-4), (1e5, 9e-3), (1e7, 1e-2))
  with pytest.warns(RuntimeWarning, match="'x'.*of all_to_all by [0-9]+%[.]"):
    level = measure.level_of(
      "x", 4, {"all_gather": straight, "all_to_all": bent}
    )
  assert [fit.op for fit in level.fits] == ["all_gather", "all_to_all"]
  # A line is no matter where the curve is known.
  assert level.link.seconds("all_to_all", 4, 1e5) == 9e-3


def test_latency_is_of_one_message():
  curve = tuple((x, 6e-4 + x / 1e9) for x in (1e3, 1e5, 1e7))
  level = measure.level_of("x", 4, {"all_gather": curve})
  assert level.link.latency_s == pytest.approx(2e-4)
  # So what was measured comes back where the curve does not hold any more.
  alone = zenjax.planner.Link(bandwidth=level.link.bandwidth, latency_s=2e-4)
  assert alone.seconds("all_gather", 4, 1e6) == pytest.approx(1.6e-3)


def test_what_a_link_lends_after_a_pause_it_lends_once():
  burst = ((1e3, 1e-3), (1e5, 2e-3), (1e6, 3e-2), (1e7, 3e-1 + 3e-3))
  link = zenjax.planner.Link(
    bandwidth=1e9, latency_s=1.0, curves={("all_gather", 4): burst}
  )
  found = measure.lasting(link)
  byte_s = 0.273 / 9e6
  for (received, seconds), (_, was) in zip(
    found.curves["all_gather", 4], burst, strict=True
  ):
    straight = 1e-3 + (received - 1e3) * byte_s
    assert seconds == pytest.approx(max(straight, was))
  assert found.seconds("all_gather", 4, 1e5) > 2 * 2e-3
  assert found.seconds("all_gather", 2, 1e5) == 1 + 1e-4
  alone = {("all_gather", 4): burst[:1]}
  assert measure.lasting(
    zenjax.planner.Link(bandwidth=1, latency_s=0, curves=alone)
  )


# --- measuring --------------------------------------------------------------


def mesh(*sizes: int) -> Mesh:
  devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
  return Mesh(devices, ("host", "device")[-len(sizes) :])


@pytest.mark.filterwarnings("ignore:Links along:RuntimeWarning")
def test_every_collective_is_measured():
  found = zenjax.planner.measure_links(
    mesh(2), sizes=(1 << 12, 1 << 16), repeats=1
  )
  (level,) = found.levels
  assert (level.name, level.devices) == ("device", 2)
  assert {fit.op for fit in level.fits} == set(measure.OPS)
  for fit in level.fits:
    curve = level.link.curves[fit.op, 2]
    assert [x for x, _ in curve] == [1 << 12, 1 << 16]
    for received, seconds in curve:
      assert 0 < seconds < 60
      assert level.link.seconds(fit.op, 2, received) == seconds
      assert abs(fit.seconds(received) / seconds - 1) <= fit.error + 1e-9
  assert zenjax.planner.Topology.from_json(found.to_json()) == found
  work = level.link.work
  assert work.mask_byte + work.mask_row > 0 and work.move_byte >= 0


@pytest.mark.parametrize(("many_s", "each_s"), [(0.085, 0.01), (0.004, 0.0)])
def test_what_each_more_buffer_of_a_sum_takes(many_s, each_s):
  few, many = measure._BUFFERS
  run = lambda: None
  points = [
    measure._Timed(axis, measure._sum_of(k), 0.0, run)
    for axis in ("host", "device")
    for k in (few, many)
  ]
  seconds = np.array([1.0, 2.0, 0.005, many_s])
  found = measure._buffer_s(points, seconds, "device")
  assert found == pytest.approx(each_s)


def test_sums_of_several_buffers_are_several():
  program, _ = measure.lowered(measure.sum_of(3), 3 * 64, mesh(2), "device")
  assert program.as_text().count('"stablehlo.all_reduce"') == 3


def test_work_is_that_of_all_devices_at_once(monkeypatch):
  """On a mesh of two axes, nothing crosses them, and the bar ends."""
  monkeypatch.setattr(local_work, "TABLES", ((400, 16), (1600, 4)))
  monkeypatch.setattr(local_work, "MOVED", ((64, 16), (256, 4)))
  turns = []
  work = local_work.measured(mesh(2, 2), 2, lambda: turns.append(1))
  assert len(turns) == 4 * 3
  for name in ("mask", "move"):
    row, byte = (getattr(work, f"{name}_{x}") for x in ("row", "byte"))
    assert row >= 0 and byte >= 0 and 0 < row + byte < 1


def test_work_moves_every_row(monkeypatch):
  """What is timed packs, merges and writes what it says."""
  monkeypatch.setattr(local_work, "TABLES", ())
  monkeypatch.setattr(local_work, "MOVED", ((64, 4),))
  totals = []
  real = jax.block_until_ready
  note = lambda x: totals.append(x[1]) or real(x)
  monkeypatch.setattr(local_work.jax, "block_until_ready", note)
  for run in local_work.runs(mesh(2), 4).values():
    run()
  (total,) = totals
  # Four sources of 16 rows each, of which few meet in one of 512 slots.
  assert total.shape == (2,) and np.all((total > 32) & (total <= 64))


def test_a_larger_scale_costs_a_row_no_less():
  samples = {"mask_0": [3.0], "mask_1": [3.0], "move_0": [2.0], "move_1": [2.0]}
  once, scaled = (local_work.fit([samples], scale) for scale in (1, 4))
  assert scaled == pytest.approx({k: x / 4 for k, x in once.items()})


@pytest.mark.parametrize("name", machines.MACHINES)
def test_presets_have_a_floor_of_work(name):
  topology = zenjax.planner.Topology.preset(
    name, 8, hosts=2, network="100gbit", ports=8
  )
  (work,) = {level.link.work for level in topology.levels}
  # From 300 GB/s to 4.8 TB/s.
  assert 0.2e-12 <= work.mask_byte <= 3.4e-12
  assert work.move_byte == 4 * work.mask_byte
  assert "a floor" in topology.source
  alone = zenjax.planner.Topology.network("100gbit", 2, name)
  assert alone.levels[0].link == topology.levels[0].link
  assert alone.memory_bytes == topology.memory_bytes


@pytest.mark.filterwarnings("ignore:Links along:RuntimeWarning")
def test_axes_are_measured_one_by_one(monkeypatch):
  ops = {"all_gather": measure.OPS["all_gather"]}
  monkeypatch.setattr(measure, "OPS", ops)
  monkeypatch.setattr(local_work, "measured", lambda *_: zenjax.planner.Work())
  found = zenjax.planner.measure_links(mesh(2, 2), sizes=(4096,), repeats=1)
  assert [level.name for level in found.levels] == ["host", "device"]
  explicit = jax.make_mesh((2, 1), ("a", "b"), devices=jax.devices()[:2])
  found = zenjax.planner.measure_links(explicit, sizes=(4096, 4097), repeats=1)
  assert found.sizes == (2,)
  # Sizes that round to one are measured once.
  assert len(found.levels[0].link.curves["all_gather", 2]) == 1


@pytest.mark.parametrize("op", measure.OPS)
def test_a_single_collective_is_one(op):
  n = 4
  program, operand = measure.lowered(op, 64, mesh(n), "device")
  named = re.findall(r"stablehlo\.(\w+)", program.as_text())
  assert [name for name in named if name in measure.OPS] == [op]
  assert operand.shape == (n, 64)
  assert (
    measure.received(op, 64, n)
    == {
      "all_gather": 3 * 256,
      "all_reduce": 2 * 3 / 4 * 256,
      "all_to_all": 3 / 4 * 256,
      "collective_permute": 256,
      "reduce_scatter": 3 / 4 * 256,
    }[op]
  )


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ({"axis_name": "model"}, "`axis_name`.*'model'"),
    ({"axis_name": ("device", "device")}, "each once"),
    ({"axis_name": "host"}, "one device has no link"),
    ({"sizes": ()}, "`sizes` must be positive"),
    ({"sizes": (0,)}, "`sizes` must be positive"),
    ({"repeats": 0}, "`repeats` must be a positive integer"),
  ],
)
def test_bad_arguments_are_refused(arguments, said):
  with pytest.raises(ValueError, match=said):
    zenjax.planner.measure_links(mesh(1, 2), **arguments)


def test_one_device_has_no_link():
  with pytest.raises(ValueError, match="one device has no link"):
    zenjax.planner.measure_links(mesh(1))


def test_a_bar_needs_tqdm(monkeypatch):
  monkeypatch.setitem(sys.modules, "tqdm", None)
  with pytest.raises(ImportError, match=r"needs tqdm.*zenjax\[plan\]"):
    zenjax.planner.measure_links(mesh(2), progress=True)
  with measure._bar(None, 3) as advance:
    advance()


def test_an_interrupt_leaves_no_bar(monkeypatch, capsys):
  tqdm = pytest.importorskip("tqdm")

  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(measure, "build", lambda *_: interrupted)
  with pytest.raises(KeyboardInterrupt):
    zenjax.planner.measure_links(mesh(2), sizes=(4096,), progress=True)
  assert not tqdm.tqdm._instances
  assert "links" in capsys.readouterr().err
