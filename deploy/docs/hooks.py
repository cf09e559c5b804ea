"""Hooks of mkdocs: READMEs and the API reference become pages too.

In the repository a link leads from file to file. On the site it leads to the page of that file, or,
where the file is no page, is left as its name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "docs/index.md": "global-index.md",
    "proto/README.md": "parts/proto.md",
    "store_daemon/README.md": "parts/store-daemon.md",
    "global_index/README.md": "parts/global-index.md",
    "router/README.md": "parts/router.md",
    "client_sdk/README.md": "parts/client-sdk.md",
    "client_sdk/engine/torch_engine/README.md": "parts/torch-engine.md",
    "client_sdk/cli/README.md": "parts/cli.md",
    "benchmarks/README.md": "parts/benchmarks.md",
    "deploy/README.md": "parts/deploy.md",
    "SECURITY.md": "parts/security.md",
    "DECISIONS.md": "parts/decisions.md",
    "STATUS.md": "parts/status.md",
    "CHANGELOG.md": "parts/changelog.md",
    "CONTRIBUTING.md": "parts/contributing.md",
}
"""File of the repository -> page. Those in docs/ are pages under their own names."""
SOURCES = {page: source for source, page in PAGES.items()}
API = {
    "api/sdk.md": (
        "# The SDK\n\n`from client_sdk import ...`. client_sdk/README.md says what holds.\n",
        ("client_sdk",),
    ),
    "api/contract.md": (
        "# The contract\n\nWhat engines import of `emberkv_proto`, beside the SDK.\n",
        (
            "emberkv_proto.hashing",
            "emberkv_proto.layout",
            "emberkv_proto.types",
            "emberkv_proto.errors",
        ),
    ),
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the table of contents forgot come at its end."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    pages = [*PAGES.values(), *(path.name for path in (ROOT / "docs").glob("*.md"))]
    left = sorted({page for page in pages if page not in named})
    if left and config.nav is not None:
        config.nav.append({"More": left})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    index = files.get_file_from_path("index.md")
    if index is not None:  # docs/index.md is about the index, not the site's first page
        files.remove(index)
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text("utf-8")))
    for uri, (head, modules) in API.items():
        parts = [head, *(f"::: {module}\n" for module in modules)]
        files.append(File.generated(config, uri, content="\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path, _, anchor = target.partition("#")
        return _link(text, _repository_path(source, path), anchor, here, files)

    return _outside_of_code(markdown, moved)


def _repository_path(source: str, path: str) -> str:
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return f"{found}/README.md" if (ROOT / found).is_dir() else found


def _link(text: str, path: str, anchor: str, here: str, files: Files) -> str:
    if not (ROOT / path).exists() and not path.endswith("/README.md"):
        return f"[{text}]({path})"  # leads nowhere, and mkdocs will say so
    page = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not page or files.get_file_from_path(page) is None:
        name = path.removesuffix("/README.md")
        return text if name in text or text.startswith("`") else f"{text} (`{name}`)"
    relative = posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"[{text}]({relative}{'#' + anchor if anchor else ''})"


def _outside_of_code(markdown: str, moved: Any) -> str:
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if n % 2 else _LINK.sub(moved, p) for n, p in enumerate(parts))
