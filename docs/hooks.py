"""What the site needs of mkdocs: files of the repository that pages link to as `../name`.

They join the site under their own paths, and the links lose their dots.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
JOINING = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "examples/*.py")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files beside `docs/`."""
    for pattern in JOINING:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of `docs/`, as they are on a page there, as they are on the site."""
    return markdown.replace("](../", "](")
