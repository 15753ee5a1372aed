"""Sphinx: python -m sphinx -W --keep-going docs docs/_build"""

import os
import pathlib
import re
import sys
import tomllib

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

import zenjax

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
# Pages are executed on eight CPU devices, as a reader may do it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

project = "zenjax"
author = "the zenjax authors"
copyright = author
release = zenjax.__version__
extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "markdown_pages",  # Also writes llms.txt.
]
# MyST-NB writes the executed pages to jupyter_execute, next to _build.
exclude_patterns = ["_build", "jupyter_execute", "notes"]
html_theme = "furo"
html_title = "zenjax"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# An "edit this page" link appears once pyproject.toml names the repository.
_urls = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))
_urls = _urls["project"]["urls"]
html_theme_options = {"top_of_page_buttons": []}
if "Repository" in _urls:
  html_theme_options = {
    "source_repository": _urls["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
  }
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Docstrings put code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Docstrings say types and shapes.
autosummary_generate = False
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight pre"
# python -m sphinx -b linkcheck docs docs/_build/links
linkcheck_anchors = False
linkcheck_retries = 2
linkcheck_timeout = 20
linkcheck_workers = 4
linkcheck_rate_limit_timeout = 60
linkcheck_report_timeouts_as_broken = False
# This site refuses programs.
linkcheck_ignore = [r"https://www\.usenix\.org/.*"]


class LinkNames(SphinxPostTransform):
  """Links `zenjax.zen_sync(...)` in a text to its entry of the API."""

  default_priority = 5  # Before references are resolved, at 10.

  def run(self, **kwargs):
    for literal in list(self.document.findall(nodes.literal)):
      name = re.match(r"zenjax(\.\w+)+", literal.astext())
      parent = literal.parent
      if name is None or isinstance(parent, nodes.reference | pending_xref):
        continue
      link = pending_xref(
        "",
        refdomain="py",
        reftype="obj",
        reftarget=name[0],
        refdoc=self.env.current_document.docname,
        refexplicit=True,
        refwarn=False,
      )
      parent.replace(literal, link)
      link += literal


def setup(app):
  app.add_post_transform(LinkNames)
