"""`push` and `pull` by remote copies: the bits of the padded ones, no races.

Interpreted over 8 devices. JAX 0.10 hangs on buffers of 100 KiB and more.
"""

import dataclasses
import functools
from typing import Any

import jax

# What the detector found is told by nothing public on JAX 0.10.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import kernel_cases
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels import _lines_tpu
from zenjax.kernels import _remote_tpu
from zenjax.kernels.operations import EXCHANGES

N = 8
PIECE = 1 << 13  # two tiles
# Rows as they are, two to a word, and in lines across rows. Each takes a large
# copy and a single tile; widths and dtypes meet in one exchange.
TABLES = ((20, 128, "float32"), (40, 128, "bfloat16"), (800, 7, "bfloat16"))
# Where a copy more or less is sent, and what a buffer does not hold.
EDGES = (
  (0, 1, 7, 8, 9, 16, 17, 25),
  (0, 16, 17, 32, 33, 40, 41, 99),
  (0, 1, 292, 293, 585, 586, 800, 900),
)

each_exchange = pytest.mark.parametrize("name", EXCHANGES)


def params() -> pltpu.InterpretParams:
  names = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
  # Newer ones raise, which leaves the other devices waiting.
  warn: dict[str, Any] = {"on_race": "warn"} if "on_race" in names else {}
  return pltpu.InterpretParams(detect_races=True, **warn)


def mesh(**axes: int) -> Mesh:
  shape = tuple(axes.values())
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), tuple(axes))


def spread(run: Any, on: Mesh) -> Any:
  """`run(rows, counts)` of what each device holds."""
  over = P(on.axis_names)
  # Under check_vma the interpreter fails on a kernel's arithmetic.
  mapped = jax.shard_map(
    run, mesh=on, in_specs=over, out_specs=over, check_vma=False
  )
  return jax.jit(mapped)


def by_kernel(name: str, on: Mesh, axes: tuple[str, ...]) -> Any:
  kernel = functools.partial(
    EXCHANGES[name].kernel("tpu"), axes=axes, interpret=params(), piece=PIECE
  )
  return spread(kernel, on)


def by_reference(name: str, on: Mesh, axes: tuple[str, ...]) -> Any:
  return spread(functools.partial(EXCHANGES[name].reference, axes=axes), on)


@functools.cache
def programs(name: str) -> tuple[Any, Any]:
  one = mesh(x=N), ("x",)
  return by_kernel(name, *one), by_reference(name, *one)


@functools.cache
def rows(name: str, tables: Any = TABLES, devices: int = N, n: int = N) -> Any:
  """What all devices hold: any bits, past the counts as well."""
  parts = devices * n if name == "push" else devices
  arrays = [
    kernel_cases.table(Shape(parts * c, d, 1, dtype), i, 0.9, 0.1)
    for i, (c, d, dtype) in enumerate(tables)
  ]
  if name == "pull":
    return arrays
  return [x.reshape(parts, c, d) for x, (c, d, _) in zip(arrays, tables)]


def counts(kind: str) -> np.ndarray:
  """`[sources, ranks, tables]`."""
  rng = np.random.default_rng(len(kind))
  most = np.array([c for c, *_ in TABLES])
  shape = (N, N, len(TABLES))
  if kind == "edges":
    return np.stack([rng.choice(edges, (N, N)) for edges in EDGES], axis=2)
  if kind == "many":
    return rng.integers(0, most + 1, shape)
  full = np.broadcast_to(most, shape)
  if kind == "skewed":  # one source has all, one rank gets all, all have all
    source, rank = np.ogrid[:N, :N]
    sent = np.broadcast_arrays(source == 5, rank == 2, True)
    return np.where(np.stack(sent, axis=2), full, 0)
  return {"none": np.zeros_like(full), "full": full}[kind]


def as_given(name: str, counts: np.ndarray) -> jax.Array:
  flat = counts.reshape(-1, counts.shape[2])
  return jnp.asarray(flat if name == "push" else counts[:, 3].ravel(), "int32")


def outcome(kernel: Any, given: Any) -> tuple[Any, bool]:
  """What `kernel` returns, and whether a race was found."""
  got = jax.block_until_ready(kernel(*given))
  races = interpret_pallas_call.races
  assert races is not None and any(races.writes.values())
  return got, races.races_found


CASES = [
  *(("push", kind) for kind in ("none", "full", "skewed", "many", "edges")),
  *(("pull", kind) for kind in ("none", "many", "edges")),
]


def test_many_counts():
  pushed = sum(name == "push" for name, _ in CASES)
  assert pushed * N * N * len(TABLES) >= 500


@pytest.mark.usually("push-many", "pull-edges", "push-none")
@pytest.mark.parametrize("name, kind", CASES)
def test_bits_of_the_padded_exchange_and_no_race(name, kind):
  given = rows(name), as_given(name, counts(kind))
  kernel, reference = programs(name)
  got, races = outcome(kernel, given)
  assert not races
  kernel_cases.assert_same_bits(got, reference(*given))


@pytest.mark.parametrize("capacity, width, dtype", TABLES)
def test_no_more_than_a_tile_is_sent_beyond_the_rows(
  capacity, width, dtype, monkeypatch
):
  in_python = lambda steps, do: [do(i) for i in range(int(steps))]
  monkeypatch.setattr(_lines_tpu, "loop", in_python)
  like = jnp.zeros((1, capacity, width), dtype)
  lines = _lines_tpu.Lines.of(like, PIECE)
  size = lines.encode(like).shape[1]
  for count in range(capacity + 1):
    copied: list[pl.Slice] = []
    lines.pieces(jnp.int32(count), copied.append)
    end = 0
    for piece in copied:
      assert int(piece.start) == end and piece.size % lines.tile == 0
      end += piece.size
    rows, sent = count * width * like.dtype.itemsize, end * lines.line_bytes
    assert end <= size and rows <= sent < rows + lines.tile * lines.line_bytes
    assert len(copied) <= end // lines.piece + lines.piece // lines.tile


SMALL = ((9, 128, "int32"),)


@pytest.mark.parametrize(
  "name, axes", [("push", ("slow", "fast")), ("pull", ("fast",))]
)
def test_ranks_count_along_several_axes_or_one_of_them(name, axes):
  on = mesh(slow=2, fast=3)
  ranks = 2 * 3 if len(axes) == 2 else 3
  given = rows(name, SMALL, 2 * 3, ranks)
  parts = (6 * ranks, 1) if name == "push" else (6,)
  number = jnp.asarray(np.random.default_rng(0).integers(0, 10, parts), "int32")
  got, races = outcome(by_kernel(name, on, axes), (given, number))
  assert not races
  want = by_reference(name, on, axes)(given, number)
  kernel_cases.assert_same_bits(got, want)


class Looks(_remote_tpu.Exchange):
  """Reads a row that another device writes."""

  __slots__ = ()

  def look(self) -> None:
    row = self.targets[1].at[(self._me + 1) % N, pl.ds(0, 1)]
    copy = pltpu.make_async_copy(row, self.announced.at[0], self.looked)
    copy.start()
    copy.wait()


class LooksLate(Looks):
  def receive(self) -> None:
    super().receive()
    self.look()


class LooksEarly(Looks):
  def receive(self) -> None:
    self.look()
    super().receive()


@pytest.mark.parametrize(
  "looks, races", [(LooksLate, False), (LooksEarly, True)]
)
def test_detector_is_red_on_a_read_before_arrival(looks, races, monkeypatch):
  monkeypatch.setattr(_remote_tpu, "Exchange", looks)
  kernel = by_kernel("push", mesh(x=N), ("x",))
  number = jnp.full((N * N, 1), 9, jnp.int32)
  _, found = outcome(kernel, (rows("push", SMALL), number))
  assert found == races


def given_small(name: str) -> Any:
  shape = (N * N, 1) if name == "push" else (N,)
  return rows(name, SMALL), jnp.full(shape, 3, jnp.int32)


@each_exchange
@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_reference_runs_where_no_kernel_was_measured(name, implementation):
  operation = EXCHANGES[name]
  assert not operation.measured
  run = functools.partial(operation, axes=("x",), kernels=implementation)
  got = spread(run, mesh(x=N))(*given_small(name))
  want = programs(name)[1](*given_small(name))
  kernel_cases.assert_same_bits(got, want)


@each_exchange
def test_kernel_asked_for_is_never_replaced(name):
  run = functools.partial(EXCHANGES[name], axes=("x",), kernels="pallas")
  traced = spread(run, mesh(x=N)).trace(*given_small(name))
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert f"zenjax_{name}" in text and "all_to_all" not in text
  with pytest.raises(NotImplementedError, match=f"`{name}`.* on tpu: yes"):
    traced.lower(lowering_platforms=("cpu",))


@each_exchange
@pytest.mark.parametrize(
  "tables, served",
  [
    (((0, 128, "float32"),), "at least one"),
    (((1 << 19, 128, "float32"),), "less than 2 GiB"),
    (((8, 1, "int8"),) * 129, "at most 128 arrays"),
  ],
)
def test_refuses_and_says_what_it_serves(name, tables, served):
  t, per = len(tables), N * N if name == "push" else N
  shape = lambda c, d: (per, c, d) if name == "push" else (per * c, d)
  arrays = [jax.ShapeDtypeStruct(shape(c, d), dtype) for c, d, dtype in tables]
  number = (per, t) if name == "push" else (per * t,)
  run = functools.partial(EXCHANGES[name], axes=("x",), kernels="pallas")
  with pytest.raises(NotImplementedError, match=served):
    jax.eval_shape(
      spread(run, mesh(x=N)), arrays, jax.ShapeDtypeStruct(number, jnp.int32)
    )


@each_exchange
def test_devices_of_vmap_are_refused(name):
  run = functools.partial(EXCHANGES[name], axes=("x",), kernels="pallas")
  arrays, number = given_small(name)
  split = lambda x: x.reshape(N, -1, *x.shape[1:])
  with pytest.raises(NotImplementedError, match="inside shard_map"):
    jax.vmap(run, axis_name="x")([split(x) for x in arrays], split(number))
