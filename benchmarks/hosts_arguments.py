"""Options that commands between hosts share."""

import argparse
import pathlib


def add(parser: argparse.ArgumentParser) -> None:
  """Where hosts are, and a file to show in their place."""
  parser.add_argument(
    "--loopback",
    action="store_true",
    help="hosts are processes on 127.0.0.1: no root, no limit",
  )
  parser.add_argument(
    "--show",
    type=pathlib.Path,
    metavar="FILE",
    help="print what --json wrote there, and measure nothing",
  )
