"""The page at /: a chat that shows which tokens were accepted drafts."""

import base64
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


async def show_page(request: Request) -> Response:
    """Answer GET / with the page."""
    text = _FILE.read_text(encoding="utf-8")
    return Response(text, headers=_headers(text), media_type="text/html")


@cache
def _headers(text: str) -> dict[str, str]:
    """Return headers that let a browser run only the page's script, and load from no other host."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _hash(text: str, element: str) -> str:
    """Return the hash of an element's text, as in a Content-Security-Policy."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"
