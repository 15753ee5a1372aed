"""What remote copies between TPUs bring in the place of a collective.

One kernel takes all tables. First a header, which travels whole: what a
collective would carry but for the rows. Of rows each device sends those that
it has, and no padding.
"""

from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp

from zenjax import _wire
from zenjax._schemes.base import Context
from zenjax._schemes.base import Message
from zenjax.kernels._dispatch import Operation

_ASKED = "exchange='remote_copies'", "exchange='collectives'"


def exchange(
  header: Sequence[jax.Array],
  rows: Sequence[jax.Array],
  counts: jax.Array,
  operation: Operation,
  context: Context,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """What all devices send.

  Args:
    header: Sections `[b, k] uint32`.
    rows: `[b, C, D]` of each table.
    counts: `[b, tables] int32`, how many of them there are.
    operation: Push, of parts for every rank (`b = n`), or pull, of one for all
      (`b = 1`).
    context: Of the exchange.

  Returns:
    The sections, `[n, k]` each, and the rows, `[n, C, D]`, zero past those that
    there are.

  Raises:
    NotImplementedError: The kernel cannot serve.
  """
  joined = _wire.join(header)
  # Words in rows of one: they share lines.
  arrays = [joined[:, :, None], *rows]
  whole = jnp.full_like(counts[:, :1], joined.shape[1])
  counts = jnp.concatenate([whole, counts], axis=1)
  if operation.name == "pull":
    arrays, counts = [x[0] for x in arrays], counts[0]
  come, _ = operation.required(*_ASKED, arrays, counts, context.axes)
  lengths = [section.shape[1] for section in header]
  return _wire.split(come[0][:, :, 0], lengths), list(come[1:])


def message(
  header: int, rows: Sequence[jax.ShapeDtypeStruct], context: Context
) -> Message:
  """Of a header of so many words and `[C, D]` rows of each table.

  Its words are those of full buffers, each sent to every device: no more can
  travel.
  """
  # What only compiles for TPUs: importing it takes a moment.
  from zenjax.kernels import _remote_tpu

  first = jax.ShapeDtypeStruct((header, 1), jnp.uint32)
  words = _remote_tpu.most_bytes([first, *rows]) // 4
  return Message("remote_copy", context.axes, words * math.prod(context.sizes))
