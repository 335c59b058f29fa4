"""What a page or a drawing of ours holds: tags that are closed in order, and nothing that would be fetched."""

from html.parser import HTMLParser
from typing import NamedTuple

_NEVER_CLOSED = ("meta", "br", "link", "img", "line")


class Box(NamedTuple):
    """A rectangle of a bar; place and width in per cent."""

    style: str
    x: float
    width: float
    title: str


class DrawnPage(HTMLParser):
    """``bars``: label and boxes of each, in order. ``tags`` and ``text``: all of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.bars: list[tuple[str, list[Box]]] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self._in_bar = False
        self.feed(page)
        assert self._open == []

    def bar(self, label: str) -> list[Box]:
        return next(boxes for name, boxes in self.bars if name == label)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _NEVER_CLOSED:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        assert not {"src", "href"} & found.keys() or found.get("href", "").startswith("#"), found
        self.tags.append(tag)
        if tag == "svg":
            self._in_bar = "bar" in found.get("class", "").split()
            if self._in_bar:
                self.bars.append((found.get("aria-label", ""), []))
        if tag == "rect" and self._in_bar:
            box = Box(found["class"], float(found["x"][:-1]), float(found["width"][:-1]), "")
            self.bars[-1][1].append(box)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open[-1:] == ["title"] and self._in_bar and self.bars[-1][1]:
            last = self.bars[-1][1][-1]
            self.bars[-1][1][-1] = last._replace(title=last.title + data)
