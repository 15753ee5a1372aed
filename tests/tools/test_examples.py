"""The small examples run as a user would run them, and their losses fall."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def _run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-W", "error", str(_EXAMPLES / name), *args]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  return subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=240
  )


@pytest.mark.parametrize(
  "name, args", [("quickstart.py", ()), ("pmap_linen.py", ("--steps", "41"))]
)
def test_trains_and_reports(name, args):
  done = _run(name, *args)
  assert done.returncode == 0, done.stderr
  losses = [float(x) for x in re.findall(r"loss +([\d.]+)", done.stdout)]
  assert len(losses) >= 3
  assert losses[-1] < 0.8 * losses[0]
  after_losses = done.stdout.rsplit("loss", 1)[1]
  # The one table of either model is in the report.
  assert re.search(r"table|embedding", after_losses), done.stdout


def test_quickstart_is_short():
  assert len((_EXAMPLES / "quickstart.py").read_text().splitlines()) < 40


def test_multi_host_asks_for_all_cluster_flags():
  done = _run("multi_host.py", "--coordinator", "127.0.0.1:1")
  assert done.returncode == 2
  assert "`--process-id` go together" in done.stderr
