"""Sphinx: python -m sphinx -W --keep-going docs docs/_build"""

import os
import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

import zenjax

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
]
# MyST-NB writes the executed pages to jupyter_execute, beside _build.
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = "zenjax"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
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
autosummary_generate = False
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
linkcheck_anchors = False


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
