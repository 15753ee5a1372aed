"""Defines how rows are sent: cast, or with a scale for each row."""

import dataclasses

import jax
import jax.numpy as jnp

from zenjax._src.core import packing
from zenjax._src.core import wire


@dataclasses.dataclass(frozen=True, slots=True)
class RowWire:
  """How rows of one table are sent.

  Rows are cast to a dtype that has the range of their own. In any other dtype,
  each row is sent as words of 32 bits, the last of which is its scale in
  float32. A row that is not finite then arrives as NaN.

  Attributes:
    dtype: Dtype in which elements are sent.
    columns: Elements of a row.
    scaled: Whether each row has a scale.
  """

  dtype: jnp.dtype
  columns: int
  scaled: bool = False

  @classmethod
  def of(
    cls, dtype: jnp.dtype, wire_dtype: jnp.dtype | None, columns: int
  ) -> "RowWire":
    """Returns how rows of `dtype` are sent; None sends them as they are.

    A single element is always cast.
    """
    sent = jnp.dtype(wire_dtype or dtype)
    scaled = columns > 1 and not wire.has_range_of(sent, jnp.dtype(dtype))
    return cls(sent, columns, scaled)

  @property
  def _bits(self) -> int:
    return jax.dtypes.itemsize_bits(self.dtype)

  @property
  def nbytes(self) -> int:
    """The bytes of a row, with its scale."""
    if self.scaled:
      return 4 * self.words(1)
    return self.columns * self.dtype.itemsize

  def words(self, rows: int) -> int:
    """Returns how many words of 32 bits so many rows take."""
    if self.scaled:
      return rows * (-(-self.columns * self._bits // 32) + 1)
    return wire.words_for(rows * self.columns, self.dtype)

  def encode(self, rows: jax.Array) -> jax.Array:
    """Converts `[..., columns]` to what is sent: `[..., k]`."""
    if not self.scaled:
      return rows.astype(self.dtype)
    x = wire.constant(rows).astype(jnp.float32).reshape(-1, self.columns)
    if jnp.issubdtype(self.dtype, jnp.integer):
      words = packing.encode_integers(x, self._bits)
    else:
      words = packing.encode_floats(x, self.dtype)
    return words.reshape(*rows.shape[:-1], words.shape[1])

  def decode(self, sent: jax.Array) -> jax.Array:
    """Returns rows, in float32 if they are scaled; otherwise `sent` itself."""
    if not self.scaled:
      return sent
    words = sent.reshape(-1, sent.shape[-1])
    if jnp.issubdtype(self.dtype, jnp.integer):
      x = packing.decode_integers(words, self._bits)
    else:
      x = packing.decode_floats(words, self.dtype)
    return x[:, : self.columns].reshape(*sent.shape[:-1], self.columns)


def require(
  name: str, dtype: jnp.dtype, wire_dtype: jnp.dtype, columns: int
) -> None:
  """Raises ValueError if rows of a leaf cannot be sent in a dtype."""
  if reason := refusal(name, dtype, wire_dtype, columns):
    raise ValueError(reason)


def refusal(
  name: str, dtype: jnp.dtype, wire_dtype: jnp.dtype, columns: int
) -> str:
  """Returns why rows of a leaf cannot be sent in a dtype, or an empty text."""
  if wire_dtype.itemsize > dtype.itemsize:
    return (
      f"`wire_dtype` {wire_dtype} is wider than {dtype}, the dtype of leaf"
      f" {name!r}. Leave it out to send the leaf's own dtype."
    )
  if wire.has_range_of(wire_dtype, dtype):
    return ""
  if dtype.itemsize > 4:
    return (
      f"`wire_dtype` {wire_dtype} has a smaller range than {dtype}, the dtype"
      f" of leaf {name!r}, and so have the float32 scales of rows. Leave it out"
      " for this leaf."
    )
  own, sent = (RowWire.of(dtype, x, columns) for x in (dtype, wire_dtype))
  if sent.scaled and sent.nbytes < own.nbytes:
    return ""
  return (
    f"`wire_dtype` {wire_dtype} has a smaller range than {dtype}, so each row"
    f" is sent with a scale of 4 bytes. Rows of leaf {name!r} have {columns}"
    " columns, which makes them no shorter. Leave `wire_dtype` out for this"
    " leaf, or give a floating dtype with its range."
  )
