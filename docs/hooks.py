"""mkdocs: files of the project outside docs/ that a page links to become part of the site, at the same place beside it.

On a git host `../examples/lab.yaml` leads from docs/ssh.md to the file; in the site the same link leads to a copy of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # pages of the site that must lie where a git host looks for them
OUT = re.compile(r"\]\(\.\./([^)#\s]+)")  # from a page in docs/
IN = re.compile(r"\]\(docs/")  # from one of PAGES


def on_files(files: Files, config: Any) -> Files:
    wanted = {name for name in PAGES if (ROOT / name).exists()}
    for page in files.documentation_pages():
        wanted |= set(OUT.findall(page.content_string))
    for name in sorted(wanted):
        path = ROOT / name
        if path.is_file() and files.get_file_from_path(name) is None:
            level = InclusionLevel.INCLUDED if name in PAGES else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, name, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    if page.file.src_uri in PAGES:
        return IN.sub("](", markdown)
    return OUT.sub(r"](\1", markdown)
