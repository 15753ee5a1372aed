"""What is installed: every package, its types, no more than it needs."""

import importlib
import importlib.metadata
import importlib.resources
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

import zenjax

_ROOT = pathlib.Path(__file__).resolve().parents[2]

in_checkout = pytest.mark.skipif(
  not (_ROOT / "zenjax").is_dir(), reason="looks at the checkout's own files"
)


def _pyproject() -> dict:
  with open(_ROOT / "pyproject.toml", "rb") as f:
    return tomllib.load(f)


def _installed() -> importlib.metadata.Distribution:
  """What pip installed, and not the metadata that lies in a checkout."""
  for found in importlib.metadata.distributions(name="zenjax"):
    if found.read_text("RECORD"):
      return found
  pytest.skip("zenjax is imported by path, it was not installed")


def _python(code: str, **how) -> subprocess.CompletedProcess:
  command = [sys.executable, "-c", code]
  return subprocess.run(command, capture_output=True, text=True, **how)


def _run(code: str) -> None:
  done = _python(code)
  assert done.returncode == 0, done.stderr


def _packages_under(directory: str, package: str) -> set[str]:
  base = _ROOT / directory
  inits = base.rglob("__init__.py")
  parts = [init.parent.relative_to(base).parts for init in inits]
  return {".".join((package, *p)) for p in parts}


@in_checkout
def test_pyproject_lists_every_package():
  # The link zenjax/kernels is walked or not, as Python's version will have it.
  ours = {
    name
    for name in _packages_under("zenjax", "zenjax")
    if not name.startswith("zenjax.kernels")
  }
  on_disk = ours | _packages_under("kernels", "zenjax.kernels")
  assert set(_pyproject()["tool"]["setuptools"]["packages"]) == on_disk


@in_checkout
def test_every_directory_with_modules_is_a_package():
  """A folder without `__init__.py` would work here and miss from the wheel."""
  for top in ("zenjax", "kernels"):
    for module in (_ROOT / top).rglob("*.py"):
      assert (module.parent / "__init__.py").is_file(), module


@in_checkout
def test_kernels_is_linked_and_does_not_pose_as_the_other_project():
  assert (_ROOT / "zenjax" / "kernels").resolve() == _ROOT / "kernels"
  done = _python("import kernels", cwd=_ROOT)
  assert done.returncode == 1
  assert "ImportError" in done.stderr and "zenjax.kernels" in done.stderr


@in_checkout
def test_readme_names_extras_and_files_that_exist():
  readme = (_ROOT / "README.md").read_text()
  extras = set(re.findall(r"\.\[(\w+)\]", readme))
  assert {"examples", "test"} <= extras
  assert extras <= set(_pyproject()["project"]["optional-dependencies"])
  files = set(re.findall(r"\b(?:examples|benchmarks)/\w+\.\w+", readme))
  for name in files:
    assert (_ROOT / name).is_file(), name
  programs = set(re.findall(r"python -m (examples[\w.]*)", readme))
  assert "examples.studies.lm" in programs
  for program in programs:
    package = _ROOT / program.replace(".", "/")
    assert (package / "__main__.py").is_file(), program


def test_installs_one_package_that_needs_three():
  installed = _installed()
  assert installed.version == zenjax.__version__
  files = installed.files or ()
  scripts = [f.name for f in files if f.parts[0] == ".."]
  assert scripts == ["zenjax"]
  tops = {f.parts[0] for f in files if f.parts[0] != ".."}
  ours = re.compile(r"zenjax(-[\w.]+\.dist-info)?|__editable__.*|__pycache__")
  assert all(map(ours.fullmatch, tops)), tops
  required = [r for r in installed.requires or () if "extra ==" not in r]
  names = {re.split(r"[^\w-]", r)[0] for r in required}
  assert names == {"jax", "numpy", "optax"}


def test_every_module_imports():
  found = pkgutil.walk_packages(zenjax.__path__, "zenjax.")
  names = {module.name for module in found}
  assert {"zenjax._src.schemes.zen", "zenjax.kernels.reference"} <= names
  for name in names:
    importlib.import_module(name)


@pytest.mark.parametrize(
  "words", [["--help"], ["plan", "--help"], ["--versoin"]]
)
def test_help_and_refused_options_import_neither_jax_nor_numpy(words):
  _run(f"""
import sys
from zenjax._src.planner.cli import main
sys.argv = ["zenjax", *{words!r}]
try:
  main()
except SystemExit as stopped:
  assert stopped.code == (0 if "--help" in sys.argv else 2), stopped.code
else:
  raise AssertionError("it went on")
loaded = {{"jax", "numpy", "optax"}} & set(sys.modules)
assert not loaded, loaded
""")


def test_the_command_is_installed():
  (command,) = [
    entry
    for entry in _installed().entry_points
    if entry.group == "console_scripts"
  ]
  assert command.name == "zenjax"
  assert command.value == "zenjax._src.planner.cli:main"
  done = subprocess.run(
    [pathlib.Path(sys.prefix, "bin", "zenjax"), "--help"],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("usage: zenjax [-h] COMMAND")


def test_names_are_there_and_no_others():
  assert set(zenjax.__all__) <= set(dir(zenjax))
  wrong = "zensync"
  with pytest.raises(AttributeError, match="module 'zenjax' has no.*'zensync'"):
    getattr(zenjax, wrong)
  assert not hasattr(zenjax, "__wrapped__")


@in_checkout
def test_the_citation_is_of_this_version():
  cited = (_ROOT / "CITATION.cff").read_text()
  (version,) = re.findall(r"^version: (.+)$", cited, re.MULTILINE)
  assert version == zenjax.__version__
  (licence,) = re.findall(r"^license: (.+)$", cited, re.MULTILINE)
  assert licence == _pyproject()["project"]["license"]
  changes = (_ROOT / "CHANGELOG.md").read_text()
  newest = re.findall(r"^## (\S+)", changes, re.MULTILINE)[0]
  assert newest == zenjax.__version__


def test_ships_its_types():
  assert (importlib.resources.files("zenjax") / "py.typed").is_file()


def test_public_names_are_sorted_and_documented():
  assert list(zenjax.__all__) == sorted(zenjax.__all__, key=str.lower)
  for name in zenjax.__all__:
    value = getattr(zenjax, name)
    assert not callable(value) or value.__doc__, name


def test_import_is_light():
  """No extra is imported, and JAX's devices can still be configured."""
  _run("""
import sys
import zenjax
zenjax.zen_sync
extras = {"chex", "flax", "hypothesis", "matplotlib", "orbax", "rich", "tqdm"}
assert not extras & set(sys.modules), extras & set(sys.modules)
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
""")
