"""Reads line rates of networks in the notations that people use."""

import math
import re

_RATE = re.compile(
  r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)([mgt]?)([a-z/]*)", re.IGNORECASE
)
_PREFIXES = {"": 1.0, "m": 1e6, "g": 1e9, "t": 1e12}
# Bits of each unit. "BPS" is missing, because it may be in bits or bytes.
_UNITS: dict[str, int] = {
  **{unit: 1 for unit in ("", "bit", "bits", "bit/s", "bits/s", "b/s", "bps")},
  **{unit: 8 for unit in ("byte/s", "bytes/s", "B/s", "Bps")},
}
# A smaller number without a unit is probably a rate in another unit, because
# networks are faster than 1 Mbit/s.
_LEAST_BARE = 1e6


def bits_a_second(rate: str | float) -> float:
  """Reads a line rate.

  Args:
    rate: A number with a unit, such as "25 Gbit/s" or "3.1 GB/s", or a number
      of bits per second.

  Returns:
    Bits per second.

  Raises:
    ValueError: The rate is not positive, cannot be read, or may be in bits or
      in bytes.
  """
  if match := _RATE.fullmatch(str(rate).replace(" ", "")):
    number, prefix, unit = match.groups()
    # The case of long units does not matter.
    unit_bits = _UNITS.get(unit if len(unit) <= 3 else unit.lower(), 0)
    bits = float(number) * _PREFIXES[prefix.lower()] * unit_bits
    # People write "gb/s" for bits and for bytes.
    is_clear = unit != "b/s" or prefix.isupper()
    if is_clear and (_LEAST_BARE if not unit else 1) <= bits < math.inf:
      return bits
  raise ValueError(
    "A line rate must be written as '25 Gbit/s', '25gbit', '25 Gb/s', '25Gbps',"
    f" '3.1 GB/s', or 25e9 for bits per second, got {rate!r}."
  )


def in_words(bits: float) -> str:
  """Returns a rate in bits per second with three digits, say "25 Gbit/s"."""
  bits = float(f"{bits:.3g}")
  for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
    if bits >= size:
      return f"{bits / size:g} {unit}"
  return f"{bits / 1e6:g} Mbit/s"
