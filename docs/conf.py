"""Sphinx: python -m sphinx -W --keep-going docs docs/_build"""

import os

import zenjax

# Pages are executed on eight CPU devices, as a reader may do it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

project = "zenjax"
author = "the zenjax authors"
release = zenjax.__version__
extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "zenjax"
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Docstrings put code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Signatures stand in the text, with shapes.
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
linkcheck_anchors = False
