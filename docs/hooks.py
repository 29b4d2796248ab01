"""mkdocs hooks: link files outside docs/, and copy only the commands of a console block.

A page links to `../examples/lab.yaml`, which a git host resolves. The site contains a copy of each such file.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # pages of the site that a git host expects in the root directory
OUT = re.compile(r"\]\(\.\./([^)#\s]+)")  # a link from a page in docs/ to a file outside
IN = re.compile(r"\]\(docs/")  # a link from one of PAGES to a page in docs/
CONSOLE = re.compile(r'<div class="language-console highlight">(?P<block>.*?)</div>', re.S)


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


def on_page_content(content: str, **rest: Any) -> str:
    """Set `data-copy`, which the theme's copy button prefers to the text of the block."""

    def with_commands(found: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]*>", "", found["block"]))
        commands = html.escape(console_commands(text))
        return f'<div class="language-console highlight" data-copy="{commands}">{found["block"]}</div>'

    return CONSOLE.sub(with_commands, content)


def console_commands(text: str) -> str:
    """The commands of a console block, without prompts, comments and output."""
    commands: list[str] = []
    continued = False
    for line in text.splitlines():
        if continued or line.startswith("$ "):
            commands.append(re.sub(r"\s{2,}# .*", "", line.removeprefix("$ ")))
            continued = line.endswith("\\")
    return "\n".join(commands)
