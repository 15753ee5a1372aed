"""Reads line rates of networks as people write them."""

import math
import re

_RATE = re.compile(
  r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"
  r"(?:([mgt]?)(bits?|bytes?|b)\s*(/\s*s(?:ec)?|ps)?)?\s*",
  re.IGNORECASE,
)
_PREFIXES = {"": 1.0, "m": 1e6, "g": 1e9, "t": 1e12}
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
  if match := _RATE.fullmatch(str(rate)):
    number, prefix, unit, per = [text or "" for text in match.groups()]
    bits = float(number) * _PREFIXES[prefix.lower()] * _bits(prefix, unit, per)
    if (1 if unit else _LEAST_BARE) <= bits < math.inf:
      return bits
  raise ValueError(
    "A line rate must be written as '25 Gbit/s', '25gbit', '25 Gb/s', '25Gbps',"
    f" '3.1 GB/s', or 25e9 for bits per second, got {rate!r}."
  )


def _bits(prefix: str, unit: str, per: str) -> int:
  """Returns the bits of a unit; 0 if it is an amount, or ambiguous."""
  if not unit or unit.lower().startswith("bit"):
    return 1
  if unit.lower().startswith("byte"):
    return 8 if per else 0
  # "Gb/s" and "Gbps" are bits, "GB/s" and "GBps" are bytes. Of "gb/s" and
  # "GBPS", people mean either, but "gbps" is always bits.
  if unit == "b" and per and (prefix.isupper() or per.lower() == "ps"):
    return 1
  if unit == "B" and per and not f"{prefix}{per}".replace("/", "").isupper():
    return 8
  return 0


def in_words(bits: float) -> str:
  """Returns a rate in bits per second with three digits, say "25 Gbit/s"."""
  bits = float(f"{bits:.3g}")
  for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
    if bits >= size:
      return f"{bits / size:g} {unit}"
  return f"{bits / 1e6:g} Mbit/s"
