"""Docstrings as Markdown: roles such as ``:func:`` become code, doctests become blocks, ``::`` a colon.

The docstrings are written for whoever reads the source; this is all that the site needs changed.
"""

import re

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(?:~[^`]*\.)?([^`]+)`")
_DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring once, when its object is collected."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"`\1`", obj.docstring.value)
        text = _DOCTEST.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", text)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
