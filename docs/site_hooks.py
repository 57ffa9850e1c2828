"""Hooks of mkdocs.yml: the site holds README.md as its start page, and every file outside docs/ that a page links to.

Links stay those of the repository, so they are valid on a forge too. `on_page_markdown` translates them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
START = "README.md"


def place(path: str) -> str:
    """Where a file of the repository stands in the site."""
    return "index.md" if path == START else path.removeprefix("docs/")


def linked(path: str, text: str) -> dict[str, str]:
    """The file that each link of the page `path` names, by what stands in the link. A folder is named by its first file."""
    found = {}
    for _, target in LINK.findall(text):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if (ROOT / name).is_dir():
            name = min(f"{name}/{file.name}" for file in (ROOT / name).glob("*.*"))
        found[target] = name
    return found


def on_files(files: Files, config: Any) -> Files:
    waiting, seen = [START], {f"docs/{file.src_uri}" for file in files}
    waiting += [name for name in seen if name.endswith(".md")]
    while waiting:
        name = waiting.pop()
        if name not in seen and (ROOT / name).is_file():
            seen.add(name)
            files.append(File.generated(config, place(name), abs_src_path=str(ROOT / name)))
        if name.endswith(".md") and (ROOT / name).is_file():
            text = (ROOT / name).read_text("utf-8")
            waiting += [other for other in linked(name, text).values() if other not in seen]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    path = str(Path(page.file.abs_src_path).relative_to(ROOT))
    names = linked(path, markdown)

    def translated(link: re.Match[str]) -> str:
        return link[1] + posixpath.relpath(place(names[link[2]]), posixpath.dirname(here) or ".")

    return LINK.sub(translated, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme's search is a dialog without a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
