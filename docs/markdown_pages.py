"""Sphinx extension: every page also as Markdown, and an llms.txt of all pages.

Next to `how.html` the site has `how.md`: its source, with the code that ran
and what it printed. A page of the API holds signatures and docstrings instead
of directives.
"""

import importlib
import inspect
import pathlib
import re
import types

import nbformat

_TITLE = re.compile(r"^# (.+)$", re.M)
_FENCE = re.compile(r"^```\{(\S+)\}([^\n]*)\n(.*?)^```$", re.S | re.M)
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.S)


def _object(path: str):
  """Returns the object of a dotted name."""
  names = path.split(".")
  for i in range(len(names), 0, -1):
    try:
      found = importlib.import_module(".".join(names[:i]))
    except ModuleNotFoundError:
      continue
    for name in names[i:]:
      found = getattr(found, name)
    return found
  raise ImportError(path)


def _members(path: str) -> list[str]:
  """Returns the names of a class's own public methods and properties."""
  kinds = (classmethod, staticmethod, property, types.FunctionType)
  return [
    f"{path}.{name}"
    for name, x in vars(_object(path)).items()
    if not name.startswith("_") and isinstance(x, kinds)
  ]


def _documented(path: str) -> str:
  found = _object(path)
  try:
    known = inspect.signature(found)
    names = [x.replace(annotation=x.empty) for x in known.parameters.values()]
    known = known.replace(parameters=names, return_annotation=known.empty)
    signature = re.sub(r" at 0x\w+", "", str(known))
  except (TypeError, ValueError):
    signature = ""
  text = inspect.getdoc(found) or ""
  return f"### {path}\n\n```python\n{path}{signature}\n```\n\n{text}\n"


def _plain(text: str, folder: pathlib.Path) -> str:
  """Replaces directives by what they show."""

  def shown(fence: re.Match) -> str:
    kind, argument, body = fence[1], fence[2].strip(), fence[3]
    if kind == "toctree":
      entries = re.findall(r"^(?:.*<)?([\w./-]+)>?$", body, re.M)
      return "\n".join(f"- [{x}]({x}.md)" for x in entries)
    if kind in ("include", "literalinclude"):
      text = (folder / argument).read_text("utf-8")
      return text if kind == "include" else f"```python\n{text}```"
    if kind == "eval-rst":
      names = []
      for name, options in re.findall(
        r"^.. auto\w+:: (\S+)\n?((?:   .*\n?)*)", body, re.M
      ):
        names += [name, *(_members(name) if ":members:" in options else [])]
      return "\n".join(map(_documented, names))
    if kind == "raw":
      return ""
    body = re.sub(r"\A(?:\s*:\w+:[^\n]*\n)+", "", body)
    return f"```python\n{body}```" if kind == "code-cell" else body

  def named(link: re.Match) -> str:
    page = folder / link[1]
    title = _TITLE.search(page.read_text("utf-8")) if page.is_file() else None
    return f"[{title[1] if title else link[1]}]({link[1]}{link[2] or ''})"

  text = _FENCE.sub(shown, _HEADER.sub("", text, count=1))
  text = re.sub(r"\[\]\(([\w./-]+)(#[\w-]+)?\)", named, text)
  return re.sub(r"\{\w+\}(?=`)", "", text).strip() + "\n"


def _printed(outputs, tags) -> list[str]:
  """Returns the texts of a cell's outputs that its tags do not remove."""
  texts, streams = [], set()
  for output in outputs:
    if output.output_type == "stream":
      if f"remove-{output.name}" in tags:
        continue
      # `nb_merge_streams` puts all of a stream into its first output.
      texts += [] if output.name in streams else [output.text]
      streams.add(output.name)
    elif "text/html" not in (data := output.get("data", {})):
      texts.append(data.get("text/plain", ""))
  return texts


def _executed(notebook: pathlib.Path, folder: pathlib.Path) -> str:
  """Returns an executed page: text, code and output."""
  parts = []
  for cell in nbformat.read(notebook, as_version=4).cells:
    tags = cell.metadata.get("tags", [])
    if cell.cell_type != "code":
      parts.append(_plain(cell.source, folder))
      continue
    if "remove-cell" in tags:
      continue
    if "remove-input" not in tags:
      parts.append(f"```python\n{cell.source}\n```\n")
    text = "\n".join(filter(None, _printed(cell.outputs, tags))).rstrip()
    if text:
      parts.append(f"```\n{text}\n```\n")
  return "\n".join(parts)


def _pages(app) -> list[str]:
  """Returns all pages in the order of the tables of contents."""
  found: list[str] = []

  def add(page: str) -> None:
    if page not in found:
      found.append(page)
      for below in app.env.toctree_includes.get(page, []):
        add(below)

  add(app.config.root_doc)
  return found


def _first(text: str) -> str:
  """Returns the first sentence below the title, for the list of pages."""
  after = text[text.find("\n") :]
  for block in re.split(r"\n\s*\n", after):
    block = " ".join(block.split())
    if block and not re.match(r"#|>|```|!?\[|[-|:(<]|\{", block):
      sentence = re.match(r".*?[.:](?=\s|$)", block)
      return f": {sentence[0].rstrip(':') if sentence else block}"
  return ""


def _write(app, error) -> None:
  if error or app.builder.format != "html":
    return
  out = pathlib.Path(app.outdir)
  executed = out.parent / "jupyter_execute"
  lines = [
    f"# {app.config.project}",
    "",
    "> Sparse gradient synchronization for JAX, as an optax transformation.",
    "",
  ]
  last = ""
  for page in _pages(app):
    path = pathlib.Path(app.env.doc2path(page))
    notebook = executed / f"{page}.ipynb"
    if app.config.nb_execution_mode != "off" and notebook.exists():
      text = _executed(notebook, path.parent)
    else:
      text = _plain(path.read_text("utf-8"), path.parent)
    target = out / f"{page}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    title = _TITLE.search(text)
    folder = page.rpartition("/")[0]
    if folder and folder != last:
      lines += ["", f"## {folder.capitalize()}", ""]
    last = folder
    lines.append(f"- [{title[1] if title else page}]({page}.md){_first(text)}")
  (out / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _link(app, page, template, context, doctree) -> None:
  """Puts a link to the Markdown below the title of the sidebar's contents."""
  if doctree is not None and context.get("body"):
    link = f'<a href="{page.rsplit("/", 1)[-1]}.md">This page as Markdown</a>'
    context["body"] += f'<p class="as-markdown">{link}</p>'


def setup(app):
  app.connect("build-finished", _write)
  app.connect("html-page-context", _link)
  return {"parallel_read_safe": True}
