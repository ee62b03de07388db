"""HTML to plain text with its block structure kept as lines."""

import re
from typing import Final

__all__ = ["html_to_text"]

_DROPPED: Final = frozenset({"script", "style", "title", "template", "noscript", "svg", "iframe", "object"})
# Paragraphs get a blank line around them, which chunking prefers as a border, lines a single break.
_PARAGRAPHS: Final = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "details", "dialog", "div", "dl", "fieldset"),
        *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main"),
        *("nav", "ol", "p", "pre", "section", "table", "ul"),
    }
)
_LINES: Final = frozenset(
    {
        *("caption", "dd", "dt", "figcaption", "legend", "li", "option", "summary"),
        *("tbody", "tfoot", "thead", "tr"),
    }
)
_CELLS: Final = frozenset({"td", "th"})
# HTML's own notion of space, which spares the no-break space.
_SPACES: Final = " \t\n\f\r"
_SPACE: Final = re.compile(f"[{_SPACES}]+")
_LINE_ENDS: Final = re.compile(r"[ \t]+\n")
_TAG_OPENS: Final = re.compile("<[A-Za-z/!?]")
_BLANK_LINES: Final = re.compile(r"\n{3,}")


class _Writer:
    """Collects text the way a browser lays it out: runs of space collapse, blocks start on a new line."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._breaks = 0
        self._space = ""

    def request_breaks(self, count: int) -> None:
        self._breaks = max(self._breaks, count)
        self._space = ""

    def line_break(self) -> None:
        self.request_breaks(min(self._breaks + 1, 2))

    def request_space(self, space: str = " ") -> None:
        if not self._breaks:
            self._space = max(self._space, space, key=len)

    def text(self, string: str, preformatted: bool) -> None:
        if not string:
            return
        if preformatted:
            self._flush(string)
            return
        if string[:1] in _SPACES:
            self.request_space()
        words = _SPACE.sub(" ", string).strip(" ")
        if not words:
            return
        self._flush(words)
        if string[-1:] in _SPACES:
            self.request_space()

    def _flush(self, string: str) -> None:
        if self._parts:
            self._parts.append("\n" * self._breaks or self._space)
        self._parts.append(string)
        self._breaks, self._space = 0, ""

    def result(self) -> str:
        joined = _LINE_ENDS.sub("\n", "".join(self._parts))
        return _BLANK_LINES.sub("\n\n", joined).strip()


def html_to_text(markup: str) -> tuple[str, str]:
    """Return the visible text and the title of an HTML page.

    Scripts, styles and comments are dropped. Paragraphs, headings, lists and tables are set apart by a
    blank line, list items and rows by a line break, cells by a tab; ``<pre>`` keeps its own space.

    Parameters
    ----------
    markup
        Decoded HTML, however badly nested.

    Returns
    -------
    tuple of str
        The text and the title; either may be empty.
    """
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString, PreformattedString, Tag

    # Browsers drop a tag that the file ends in; Python's parser looks for its end again and again.
    torn = _TAG_OPENS.search(markup, markup.rfind(">") + 1)
    soup = BeautifulSoup(markup[: torn.start()] if torn else markup, "html.parser")
    title = _SPACE.sub(" ", soup.title.get_text()).strip() if soup.title else ""
    writer = _Writer()
    # An explicit stack, as hostile pages nest deeper than Python's recursion limit. An entry is a node
    # still to be read, or (None, breaks, ...) for what happens where an element ends.
    stack: list[tuple[object, int, bool]] = [(soup, 0, False)]
    while stack:
        node, breaks, preformatted = stack.pop()
        if node is None:
            writer.request_breaks(breaks)
        elif isinstance(node, Tag):
            if node.name in _DROPPED:
                continue
            breaks = 2 if node.name in _PARAGRAPHS else 1 if node.name in _LINES else 0
            if breaks:
                writer.request_breaks(breaks)
                stack.append((None, breaks, preformatted))
            elif node.name == "br":
                writer.line_break()
            elif node.name in _CELLS:
                writer.request_space("\t")
            preformatted = preformatted or node.name in ("pre", "textarea")
            stack.extend((child, 0, preformatted) for child in reversed(node.contents))
        elif isinstance(node, NavigableString) and not isinstance(node, PreformattedString):
            writer.text(str(node), preformatted)
    return writer.result(), title
