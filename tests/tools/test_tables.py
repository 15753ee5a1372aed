"""`benchmarks.run tables`: forms and models agree before any is timed."""

import functools
import json
import pathlib
import statistics

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from benchmarks.campaigns import ddp
from benchmarks.campaigns import models
from benchmarks.campaigns import tables
import zenjax

# The examples promote as users' programs do.
pytestmark = pytest.mark.usefixtures("as_optax_computes")

N, STEPS = 2, 3
RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
SETTINGS = {
  "bags": dict(rows=4000, width=8, tokens=40, look_ups=2),
  "ngram": dict(rows=20_000, width=8, tokens=1, look_ups=1),
  "dlrm": dict(rows=20_000, width=8, tokens=1, look_ups=1),
}
FORMS = [
  *[("bags", form) for form in (*tables.FORMS, "by hand")],
  *[("ngram", form) for form in ("sharded", "rows", "row-sharded")],
  *[("dlrm", form) for form in ("sharded", "rows")],
]


class Compiler:
  """Compiles as hosts do, for one process."""

  def compile(self, lowered):
    return lowered.compile(), 0.0


@functools.cache
def model(name):
  return models.make(models.Setting(model=name, **SETTINGS[name]), N)


@functools.cache
def want(name):
  return model(name).losses(STEPS)


@pytest.mark.usually("bags-*sharded*", "bags-by hand", "ngram-sharded")
@pytest.mark.parametrize(
  ("name", "form"), FORMS, ids=["-".join(x) for x in FORMS]
)
def test_every_form_has_the_losses_of_the_plain_program(name, form):
  mesh = Mesh(np.array(jax.devices()[:N]), (tables.AXIS,))
  of = (tables.FORMS | tables.ALONE.get(name, {}))[form](mesh, model(name))
  with jax.set_mesh(mesh):
    program = tables.Program(of, Compiler())
    got = [float(program()) for _ in range(STEPS)]
  np.testing.assert_allclose(got, want(name), rtol=1e-4)
  assert len(set(got)) == STEPS


def test_torch_has_the_losses_of_the_plain_program(monkeypatch, tmp_path):
  pytest.importorskip("torch")
  monkeypatch.setenv("ZENJAX_HOST_ADDRESS", "127.0.0.1")
  monkeypatch.setenv("ZENJAX_HOST_CACHE", str(tmp_path))
  program = ddp.Program(model("dlrm"), 1, 0)
  got = [program() for _ in range(STEPS)]
  np.testing.assert_allclose(got, want("dlrm"), rtol=1e-4)


def test_the_ideal_counts_distinct_rows_of_others_once():
  made = model("bags")
  ids = [np.split(ids, N)[host] for ids, _ in made.batches for host in range(N)]
  distinct = np.mean([len(np.unique(x)) for x in ids])
  dense = made.params["w"].nbytes
  row = made.params["table"][0].nbytes
  # An id and a row; their gradient and its id; half of them with the other.
  ours = distinct / 2 * (2 * row + 8) + dense
  assert made.ideal_bytes(N) == pytest.approx(ours)


@pytest.mark.parametrize("name", ["bags", "ngram", "dlrm"])
def test_the_planner_chooses_what_was_measured_fastest(name):
  """Within a tenth, of the forms that it chooses from."""
  file = "tables" if name == "bags" else f"models-{name}"
  path = RESULTS / f"{file}-4-1gbit.json"
  found = json.loads(path.read_text(encoding="utf-8"))
  forms = {"replicated": "replicated", "row-sharded": "sharded-xla"}
  forms |= {"rows": "replicated-sparse", "sharded": "sharded"}
  ms = {
    forms[r["name"]]: statistics.median(r["times_s"])
    for r in found["results"]
    if r["name"] in forms
  }
  sizes = {k: found["options"][k] for k in SETTINGS["bags"]}
  made = models.make(models.Setting(model=name, **sizes), 4)
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  plan = zenjax.planner.plan_tables(
    made.loss,
    jax.tree.map(shape, made.params),
    *map(shape, made.part(made.batches[0], 0, 4)),
    tx=made.tx,
    topology=zenjax.planner.Topology.network("1 Gbit/s", 4),
  )
  (form,) = {table.form for table in plan.tables}
  assert ms[form] <= 1.1 * min(ms.values())
