"""Ctrl-C and SIGTERM end a program through `finally` blocks, never in them."""

from collections.abc import Iterator
import contextlib
import signal
import sys
import threading


@contextlib.contextmanager
def held() -> Iterator[None]:
  """SIGINT and SIGTERM wait until the block has ended."""
  if threading.current_thread() is not threading.main_thread():
    yield  # They reach the main thread only.
    return
  came: list[int] = []
  handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    for s, handler in handlers.items():
      if handler is not None:  # What C code set, Python cannot set again.
        signal.signal(s, lambda n, _: came.append(n))
    yield
  finally:
    for s, handler in handlers.items():
      if handler is not None:
        signal.signal(s, handler)
    for s in came[:1]:
      signal.raise_signal(s)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
  """SIGTERM ends `with` blocks in order, unless the program handles it."""
  ours = threading.current_thread() is threading.main_thread()
  if ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
      yield
    finally:
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
  else:
    yield
