"""The testbed: rates that hold, hosts that end, namespaces that go."""

import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.testbed import __main__ as command_line
from benchmarks.testbed import netns
from benchmarks.testbed.hosts import HostDied
from benchmarks.testbed.testbed import Testbed

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Replies to every line with its index, and ends as a line says.
_ECHO = """
import json, os, sys
print("greetings, not JSON")
for line in sys.stdin:
  message = json.loads(line)
  if message.get("exit") == int(os.environ["ZENJAX_HOST_INDEX"]):
    sys.exit("the reason why")
  if message.get("reply", True):
    print(json.dumps([os.environ["ZENJAX_HOST_INDEX"], message]), flush=True)
"""
_ARGV = [sys.executable, "-c", _ECHO]

# Enters a bed, says what is in it, and waits to be killed.
_CONTROLLER = """
import sys, time
from benchmarks.testbed.testbed import Testbed
loopback = sys.argv[1] == "loopback"
with Testbed(2, "unlimited", loopback) as bed:
  hosts = bed.start(["sleep", "600"])
  print(*[host.process.pid for host in hosts], bed._logs, flush=True)
  time.sleep(600)
"""


def _missing():
  try:
    netns.require()
    name = f"zenjax-test-{secrets.token_hex(4)}"
    netns._ip("netns", "add", name)
    netns._ip("netns", "delete", name)
  except RuntimeError as error:
    return str(error)
  return ""


_WHY_NOT = _missing()
needs_namespaces = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


def _namespaces(pid=None):
  """Namespaces, and files for them, that the process with `pid` has made."""
  return [n for n in netns._names() if n.startswith(f"zenjax-{pid}-")]


def _is_running(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  except FileNotFoundError:
    return False
  return state.split()[0] != "Z"  # Dead, if not yet collected.


def _wait_until(condition, seconds=10.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({"rate": "300mbit"}, ["`rate`", "'300mbit'", "'200mbit'", "'10gbit'"]),
    ({"hosts": 1}, ["`hosts`", "2 to 16", "1"]),
    ({"hosts": 17}, ["`hosts`", "2 to 16", "17"]),
    ({"loopback": True}, ["`rate`", "'unlimited'", "'200mbit'", "root"]),
  ],
)
def test_bad_input(arguments, words):
  with pytest.raises(ValueError) as error:
    Testbed(**arguments)
  assert all(word in str(error.value) for word in words), error.value


# --- processes, on loopback -------------------------------------------------


def test_asks_every_host_and_keeps_what_is_no_reply():
  with Testbed(3, "unlimited", loopback=True) as bed:
    hosts = bed.start(_ARGV, {"PYTHONUNBUFFERED": "1"})
    for i in range(3):
      assert bed.ask({"step": i}) == [[str(h), {"step": i}] for h in range(3)]
    assert "greetings" in hosts[2].log.read_text()
    assert bed.counters() is None
    with pytest.raises(RuntimeError, match="stop"):
      bed.start(_ARGV)
    bed.stop()
    bed.start([sys.executable, "-c", "pass"])
    bed.watch(timeout=30)
    with pytest.raises(HostDied, match="Host 0 ended with status 0"):
      bed._running.check()


def test_a_host_that_dies_is_named_with_its_log():
  with Testbed(2, "unlimited", loopback=True) as bed:
    hosts = bed.start(_ARGV)
    with pytest.raises(HostDied, match="the reason why") as error:
      bed.ask({"exit": 1, "reply": False})
    assert (error.value.host, error.value.status) == (1, 1)
    with pytest.raises(HostDied):
      bed.watch()
    os.kill(hosts[0].process.pid, signal.SIGKILL)
    hosts[0].process.wait()
    with pytest.raises(HostDied, match="Host 0 ended by SIGKILL"):
      bed._running.check()


def test_a_silent_host_is_not_waited_for():
  with Testbed(2, "unlimited", loopback=True) as bed:
    bed.start(_ARGV)
    with pytest.raises(TimeoutError, match=r"hosts \[0, 1\]"):
      bed.ask({"reply": False}, timeout=0.5)
    with pytest.raises(TimeoutError, match=r"\[0, 1\]"):
      bed.watch(timeout=0.1)


def test_an_exception_leaves_nothing():
  children, hosts, logs = [], [], pathlib.Path()
  with pytest.raises(ZeroDivisionError):
    with Testbed(2, "unlimited", loopback=True) as bed:
      logs = bed._logs or logs
      # A process of the process ends as well.
      hosts = bed.start(["sh", "-c", "sleep 600 & echo $!; wait"])
      children = [int(host.lines.get(timeout=30) or 0) for host in hosts]
      assert logs.is_dir() and all(map(_is_running, children))
      raise ZeroDivisionError
  _wait_until(lambda: not any(map(_is_running, children)))
  assert all(host.process.returncode is not None for host in hosts)
  assert not logs.exists()


# --- what ends the controller -----------------------------------------------


def _controller(place):
  process = subprocess.Popen(
    [sys.executable, "-c", _CONTROLLER, place],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None
  with process.stdout as lines:
    *pids, logs = lines.readline().split()
  assert len(pids) == 2
  return process, [int(pid) for pid in pids], pathlib.Path(logs)


@pytest.mark.parametrize(
  ("sent", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_signals_leave_nothing(sent, status):
  process, pids, logs = _controller("loopback")
  process.send_signal(sent)
  assert process.wait(20) == status
  assert not any(map(_is_running, pids)) and not logs.exists()


@needs_namespaces
def test_a_killed_controller_takes_its_hosts_along(capsys):
  process, pids, logs = _controller("namespaces")
  assert len(_namespaces(process.pid)) == 3
  netns.clean()
  assert len(_namespaces(process.pid)) == 3, "its process still runs"
  process.kill()
  process.wait()
  _wait_until(lambda: not any(map(_is_running, pids)))
  shutil.rmtree(logs)
  assert command_line.main(["--clean"]) == 0
  assert f"Deleted zenjax-{process.pid}-" in capsys.readouterr().out
  assert not _namespaces(process.pid)


# --- namespaces -------------------------------------------------------------


@needs_namespaces
def test_links_keep_to_their_rate_also_when_it_changes():
  with Testbed(2, "unlimited") as bed:
    free = bed.probe(bytes=1_000_000, repeats=2)
    assert free.bandwidth_Bps.max > 25e6
    bed.set_rate("200mbit")
    before = bed.counters()
    links = bed.probe(bytes=1_000_000, repeats=2)  # It raises if one is faster.
    after = bed.counters()
    # From 720 kB on, headers outweigh what the bucket lends.
    for measured in (links.bandwidth_Bps, links.idle_bandwidth_Bps):
      assert 2.5e6 < measured.min <= measured.max <= 25e6
    assert before is not None and after is not None
    for old, new in zip(before, after):
      assert 4e6 < new.sent_bytes - old.sent_bytes < 4.4e6
      assert 4e6 < new.received_bytes - old.received_bytes < 4.4e6
    bed.set_rate("unlimited")
    assert bed.probe(bytes=1_000_000, repeats=2).bandwidth_Bps.max > 25e6
