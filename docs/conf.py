"""Settings of Sphinx for the site of distloop, and how its docstrings become pages; `make docs` builds it.

The root of the sources is the checkout, so that a link between two pages is the same on the site and in the files.
"""

import json
import re
from typing import Any

from docutils import nodes
from myst_parser.sphinx_ import Parser
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

import distloop

project = "distloop"
author = "The distloop authors"
release = version = distloop.__version__

root_doc = "docs/index"
include_patterns = ["docs/**", "CHANGELOG.md", "WORKSPACE.md", "experiments/benchmarks/*.md"]
exclude_patterns = ["docs/_build", ".*"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.programoutput"]

html_theme = "furo"
html_title = f"distloop {release}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_extra_path = ["_site"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "monokai"

myst_heading_anchors = 4
default_role = "code"  # docstrings are written in Markdown's style: `name`, and indented programs
autoclass_content = "both"  # `__init__` describes the arguments of some classes
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpick_ignore = [("py:exc", "subprocess.TimeoutExpired")]  # of the standard library
python_maximum_signature_line_length = 88

SETTINGS = "Attributes, with their defaults:"  # of Config, which have a page of their own


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Leaves out what only readers of the code need, links public names, and marks programs, which are indented."""
    first_of_init = (getattr(getattr(obj, "__init__", None), "__doc__", None) or "").partition("\n")[0]
    if what == "class" and lines[0] == first_of_init:
        del lines[0]
    if SETTINGS in lines:
        del lines[lines.index(SETTINGS) :]
    lines[:] = [re.sub(r"`(?:distloop\.)?(\w+)`", as_link, line) for line in lines]
    for i in range(len(lines) - 1, 1, -1):
        indent = len(lines[i]) - len(lines[i].lstrip())
        before = next((line for line in reversed(lines[:i]) if line.strip()), "")
        if lines[i].strip() and not lines[i - 1].strip() and indent >= len(before) - len(before.lstrip()) + 4:
            lines[i:i] = [" " * (indent - 4) + ".. code-block:: python", ""]


def as_link(name: re.Match[str]) -> str:
    """Returns a link to the entry of a public name; a bare name has to be one of a class."""
    is_public = name[1] in distloop.__all__ and (name[1][0].isupper() or "." in name[0])
    return f":py:obj:`{name[0].strip('`')} <distloop.{name[1]}>`" if is_public else name[0]


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the pages in the tables of two pages to the navigation, each under the same heading as there."""
    if docname not in (root_doc, "docs/laws"):
        return
    for section in source[0].split("\n## ")[1:]:
        if pages := re.findall(r"\]\(([\w./]+)\) \|$", section, re.M):
            heading = section.partition("\n")[0]
            source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```\n"])


def without_help(app: Sphinx, docname: str, source: list[str]) -> None:
    """Leaves out what `generated.py` wrote for readers of the files: the site shows the same from the code."""
    source[0] = re.sub(r"^```text written by make docs\n.*?^```\n", "", source[0], flags=re.M | re.S)


class NotebookParser(Parser):
    """Reads the cells of a notebook, with their results, as a page of Markdown."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fills a document from the text of a notebook."""
        texts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            texts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            texts += map(shown_result, cell.get("outputs", ()))
        super().parse("\n\n".join(texts), document)


def shown_result(output: dict[str, Any]) -> str:
    """Returns a result of a cell in Markdown: a picture as it is, all else as text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/svg+xml" in data:
        picture = re.sub(r"\n\s*\n", "\n", "".join(data["image/svg+xml"]))
        return f"```{{raw}} html\n{picture[picture.index('<svg') :]}\n```"
    return f"```text\n{''.join(data['text/plain']).strip()}\n```"


def setup(app: Sphinx) -> None:
    """Adds the above to Sphinx."""
    for field in PyObject.doc_field_types:
        field.label = "Attributes" if field.name == "variable" else field.label
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    app.connect("source-read", add_contents)
    app.connect("source-read", without_help)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
