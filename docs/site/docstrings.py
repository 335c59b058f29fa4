"""Docstrings as Markdown: roles such as ``:func:`` become code, doctests blocks, parameters a list, ``::`` a colon.

The docstrings are written for whoever reads the source; this is all that the site needs changed.
"""

import re

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(?:~[^`]*\.)?([^`]+)`")
_DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\S[^:\n]*): ", re.MULTILINE)
_TITLES = {"Args": "Parameters"}


def _listed(section: re.Match[str]) -> str:
    """A section of indented ``name: text`` entries as a Markdown list; further lines of an entry stay indented."""
    entries = _ENTRY.sub(
        lambda entry: "- " + ", ".join(f"`{name}`" for name in entry[1].split(", ")) + ": ", section[2]
    )
    return f"**{_TITLES.get(section[1], section[1])}**\n\n{entries.rstrip()}\n\n"


class Markdown(griffe.Extension):
    """Rewrites each docstring once, when its object is collected."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"`\1`", obj.docstring.value)
        text = _SECTION.sub(_listed, text)
        text = _DOCTEST.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", text)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
