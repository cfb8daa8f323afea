"""Styles and frames of the HTML pages that commands write, and how they are filled in.

A page loads nothing and runs no script: its style is part of it, and its policy forbids all else.
Text of the job may come from foreign file names, so it is escaped, and invisible characters are
written out (`_voice.shown`).
"""

from __future__ import annotations

import html
from importlib import resources
from string import Template
from typing import Any

from reft._voice import shown

# Styles stand in the page, also as attributes. Nothing else is allowed, and nothing has an address.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
)


def escape(value: Any) -> str:
    return html.escape(shown(str(value)), quote=True)


def fill(name: str, title: str, **parts: str) -> str:
    """The page `name`.html with its style, a title (plain text) and its parts (HTML)."""
    folder = resources.files(__name__)
    style = (folder / f"{name}.css").read_text(encoding="utf-8")
    frame = Template((folder / f"{name}.html").read_text(encoding="utf-8"))
    return frame.substitute(parts, policy=POLICY, style=style, title=escape(title))
