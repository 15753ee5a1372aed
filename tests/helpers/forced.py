"""Ways of zenjax that no option chooses, forced for a test.

Each takes pytest's `monkeypatch`.
"""

import dataclasses

import zenjax._src.core.compat
import zenjax._src.core.wire
import zenjax._src.schemes.zen
import zenjax._src.sparsify.element_exchange
import zenjax._src.sync.gradient_tree
import zenjax._src.sync.leaf_tables

_src = zenjax._src


def elements_in_chunks(monkeypatch, elements: int) -> None:
  """Chunks of `elements` in which a sparsifier sums a whole vector."""
  monkeypatch.setattr(_src.sparsify.element_exchange, "_REST_CHUNK", elements)


def buffers_in_turn(monkeypatch) -> None:
  """Leaves that travel whole share buffers, as on platforms that pay each."""
  monkeypatch.setattr(_src.sync.gradient_tree, "buffers_in_turn", lambda: True)


def between_hosts(monkeypatch, parts=(1, 2, 4, 6, 8, 10, 12, 16, 24)) -> None:
  """First rounds follow what was seen, as between processes on CPUs.

  Few `parts` of a buffer compile sooner than all.
  """
  parts = (*parts, _src.core.wire.SLICES)
  monkeypatch.setattr(_src.core.wire, "PARTS", parts)
  monkeypatch.setattr(_src.core.compat, "between_hosts", lambda: True)


def two_sizes(monkeypatch) -> None:
  """Further rounds come in two sizes, as between hosts and on accelerators."""
  leaf_tables = _src.sync.leaf_tables
  sizing = leaf_tables.buffer_sizes.TWO_SIZES
  monkeypatch.setattr(leaf_tables, "_sizing", lambda context: sizing)


def for_accelerators(monkeypatch) -> None:
  """What is traced is what devices other than CPUs run, but for kernels."""
  monkeypatch.setattr(_src.core.compat, "for_cpus", lambda: False)


def unseen_zeros(monkeypatch) -> None:
  """Merges wait for all pushes, as on TPUs."""
  zen = _src.schemes.zen
  monkeypatch.setattr(zen, "_plain_zero", zen._unseen_zero)


def mask_pack_measured_on(monkeypatch, platform: str) -> None:
  """A kernel of `mask_pack` that runs where no one forces it.

  Traced for the devices that are there, as if they had been measured.
  """
  sources = _src.sync.table_sources
  measured = dataclasses.replace(
    sources.mask_pack, measured={platform: {"cpu": "a.json"}}
  )
  monkeypatch.setattr(sources, "mask_pack", measured)
