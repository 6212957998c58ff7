"""MkDocs hooks: pages outside docs/, links between the two, and this project's docstring conventions."""

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "LICENSE": "LICENSE",
    "CITATION.cff": "CITATION.cff",
    "benchmark/accuracy/recall_model/README.md": "recall-model.md",
}


def on_files(files, config):
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links between files to links between pages. MkDocs checks that they exist."""
    place = page.file.src_uri
    source = {p: s for s, p in OUTSIDE.items()}.get(place, f"docs/{place}")

    def moved(link):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}"

    return re.sub(r"\]\((?![a-z]+:)([^)#]+)", moved, markdown)


class Docstrings(griffe.Extension):
    """Conventions unknown to the docstring parser: sections without blank lines, several names with one description."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = re.sub(r":\w+:`", "`", obj.docstring.value)
            text = re.sub(r"(?m)^(Returns|Raises):$", r"\n\1:", text)
            obj.docstring.value = re.sub(r"(?m)^( +\w+), (\w[\w, ]*): ", r"\1: and `\2`: ", text)
