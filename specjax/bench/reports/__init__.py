"""Reports: a result of `specjax bench` as a page, a Markdown text or a picture.

A new form is a module with `render(content) -> bytes`, and its line in `FORMS`.
"""

from importlib import import_module
from pathlib import Path

from specjax.bench.reports.saved import Saved
from specjax.bench.reports.sections import content_of

# The module of each form, by the suffix of its files.
FORMS = {
    ".html": "specjax.bench.reports.page",
    ".md": "specjax.bench.reports.markdown",
    ".png": "specjax.bench.reports.picture",
}


def check_report(option: str, path: str | None) -> None:
    """Check that the suffix of `path` is in `FORMS`, and that the packages for it are installed.

    `option` is the option that gave the path. If `path` is None, nothing is checked.

    Raises:
        ValueError: the suffix is not in `FORMS`.
        ImportError: a package is missing.
    """
    if not path:
        return
    suffix = Path(path).suffix.lower()
    if suffix not in FORMS:
        raise ValueError(f"{option} {path} must end in {', '.join(FORMS)}, which choose the form")
    import_module(FORMS[suffix])


def write_report(path: str, saved: Saved) -> None:
    """Write the report of a result to `path`, in the form that its suffix selects."""
    form = import_module(FORMS[Path(path).suffix.lower()])
    Path(path).expanduser().write_bytes(form.render(content_of(saved)))
