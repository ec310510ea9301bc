"""Adds files of the repository to the site, which pages link to as `../name`.

They have the same paths on the site, and links to them lose the `../`.
"""

from pathlib import Path
from typing import Any

from flag_tables import fill
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
JOINING = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/*.py", "examples/*.py"),
    *("deploy/*", "deploy/grafana/*", "specjax/messages/formats.py"),
)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside `docs/`."""
    for pattern in JOINING:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return a page with its tables of flags, and with its links adapted to the site."""
    if "/" in page.file.src_uri:  # a page of another folder, like benchmarks
        return markdown.replace("](../docs/", "](../")
    return fill(markdown).replace("](../", "](").replace("](docs/", "](")
