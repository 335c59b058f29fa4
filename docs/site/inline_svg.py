"""Drawings of ours stand in the page itself, so that they take its colours, whichever the reader has chosen."""

import re
from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"


def on_page_content(html: str, **_: object) -> str:
    """Called by mkdocs for each page: pictures of docs/assets/*.svg become the drawings themselves."""
    return re.sub(
        r'<img [^>]*src="(?:\.\./)*assets/([a-z_]+\.svg)"[^>]*>', lambda found: (_ASSETS / found[1]).read_text(), html
    )
