"""HTML that reads well in a light and in a dark notebook, and without any style at all.

Colours are JupyterLab's own variables where there are some, else half-transparent, so that the theme shines through.
Every output carries the style sheet, because a saved notebook shows its outputs one by one.
"""

import html
import linecache
import os
from collections.abc import Iterable

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from ptxlab.sources import Source

_LEXERS = {"ptx": "ptx", "cu": "cuda"}

# Twice the class, to weigh more than a notebook's own rules for tables and code.
STYLE = """.ptxlab.ptxlab {
  --red: rgba(224, 62, 62, .28); --amber: rgba(224, 150, 20, .26); --green: rgba(46, 160, 67, .25);
  --line: rgba(128, 128, 128, .35); --faint: rgba(128, 128, 128, .12);
  --mono: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace);
  line-height: 1.5; font-size: 13px; max-width: 80em;
  & table { border-collapse: collapse; margin: .3em 0 .6em; font-size: 13px }
  & td, & th { border: 0; border-bottom: 1px solid var(--line); padding: .15em .7em; text-align: left;
    vertical-align: top; white-space: normal; max-width: 40em }
  & th { font-weight: 600 } & th, & td:first-child { white-space: nowrap }
  & code, & pre, & .bits { font-family: var(--mono); font-size: 12.5px; color: inherit }
  & code { background: none !important; padding: 0 !important; white-space: pre !important }
  & pre { margin: .4em 0; padding: .3em .6em; line-height: 1.4; overflow-x: auto; border-left: 3px solid var(--line) }
  & .num, & .bits { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
  & .title { margin: .4em 0 .2em; font-size: 14px }
  & .dim { opacity: .65 } & .no { opacity: .5; user-select: none }
  & .bad { background: var(--red) } & .over { background: var(--red); font-weight: 700 }
  & .at { background: var(--red); display: inline-block; min-width: 100% }
  & .chip { border-radius: 3px; padding: .05em .4em; margin: 0 .35em .15em 0; background: var(--faint);
    display: inline-block }
  & .chip.bad { background: var(--red) } & .chip.good { background: var(--green) }
  & .chip.changed { background: var(--amber) }
  & .section td { padding-top: 1em; border-bottom-width: 2px; font-weight: 600 }
  & summary { cursor: pointer }
  & .wide { overflow-x: auto; margin: .3em 0 } & .tall { max-height: 45em; overflow-y: auto }
  & svg text { fill: currentColor; font: 9px var(--mono) }
  & svg rect { fill-opacity: .33 }
  & svg .other { fill-opacity: .08 } & svg text.other { fill-opacity: .45 }
  & svg rect.mine { fill: #2563eb; fill-opacity: .9 } & svg text.mine { fill: #fff; font-weight: 700 }
  & svg rect.wrong { stroke: rgb(224, 62, 62); stroke-width: 1.5 }
  & svg .label { text-anchor: middle } & svg .end { text-anchor: end }
  & .k, & .kr, & .kt { color: var(--jp-mirror-editor-keyword-color, #2f8f4e); font-weight: 600 }
  & .c, & .c1, & .cm { color: var(--jp-mirror-editor-comment-color, #7b8a8b); font-style: italic }
  & .cp, & .cpf { color: var(--jp-mirror-editor-meta-color, #8a63d2) }
  & .m, & .mi, & .mh, & .mf { color: var(--jp-mirror-editor-number-color, #2f8f8f) }
  & .s, & .s1, & .s2 { color: var(--jp-mirror-editor-string-color, #c0504d) }
  & .nf, & .nb { color: var(--jp-mirror-editor-def-color, #3b7dd8) }
}"""


class Html(str):
    """Text that is HTML already; `element` and `escape` leave it as it is."""


def escape(content: object) -> Html:
    """Escape the content to HTML; what is `Html` already stays as it is."""
    return content if isinstance(content, Html) else Html(html.escape(str(content), quote=False))


def element(name: str, *children: object, **attributes: object) -> Html:
    """Return `<name ...>children</name>`; children that are not `Html` are escaped, `cls` stands for `class`."""
    html_attributes = {"class" if n == "cls" else n.replace("_", "-"): setting for n, setting in attributes.items()}
    children_html = "".join(
        f' {n}="{html.escape(str(setting))}"' for n, setting in html_attributes.items() if setting not in (None, "")
    )
    return Html(f"<{name}{children_html}>{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Join parts one after the other."""
    return Html(between.join(map(escape, parts)))


def page(*children: object) -> str:
    """Build one output: its style and its content."""
    return element("div", element("style", Html(STYLE)), *children, cls="ptxlab")


def chip(*children: object, kind: str = "") -> Html:
    """Build a word on a coloured ground; `kind`: `bad`, `good`, `changed` or none.

    The space is for pages without style.
    """
    return Html(element("span", *children, cls=f"chip {kind}".strip()) + " ")


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """Build a table; an argument that is a cell or a row already stays as it is."""
    head = element("tr", *(_cell("th", cell) for cell in header))
    return element("table", head, *(row if isinstance(row, Html) else _row(row) for row in rows))


def _row(cells: Iterable[object]) -> Html:
    return element("tr", *(_cell("td", cell) for cell in cells))


def _cell(name: str, content: object) -> Html:
    is_cell = isinstance(content, Html) and content.startswith(f"<{name}")
    return escape(content) if is_cell else element(name, content)


def details(summary: object, *children: object, shown: bool = False) -> Html:
    """Build an element to unfold."""
    return Html(f"<details{' open' if shown else ''}>{element('summary', summary)}{join(children)}</details>")


def highlight_lines(text: str, language: str) -> list[Html]:
    """Return the lines of a PTX (`ptx`) or CUDA C++ (`cu`) source with their colours."""
    coloured = highlight(text, get_lexer_by_name(_LEXERS[language], stripnl=False), HtmlFormatter(nowrap=True))
    return [Html(line) for line in coloured.splitlines()]


def listing(text: str, language: str, *, marked: Iterable[int] = (), first: int = 1, last: int | None = None) -> Html:
    """Render numbered lines `first` to `last` of a source; `marked` ones stand out."""
    lines, marks = highlight_lines(text, language), set(marked)
    chosen = range(first, min(last or len(lines), len(lines)) + 1)
    shown_lines = []
    for number in chosen:
        line = join([element("span", f"{number:>4}  ", cls="no"), lines[number - 1]])
        shown_lines.append(element("span", line, cls="at") if number in marks else line)
    return element("pre", join(shown_lines, "\n"))


def excerpt(source: Source, line: int, around: int = 2) -> Html:
    """Render the lines of a source around a line, which stands out."""
    return listing(source.text, source.language, marked=[line], first=max(1, line - around), last=line + around)


def place(path: str, line: int) -> str:
    """Format a place as `<cell mine>:12` or `dequant.cuh:7`.

    The folder is left out, because a notebook must not show it.
    """
    return f"{os.path.basename(path) if os.path.isabs(path) else path}:{line}"


def remember(source: Source) -> None:
    """Store the text of a cell in `linecache`, where Python stores the lines of cells that it runs itself."""
    linecache.cache[source.path] = (len(source.text), None, source.text.splitlines(keepends=True), source.path)


def recall(path: str) -> Source | None:
    """Return the file at a path, or the cell that `remember` was told of."""
    linecache.checkcache(path)  # files change; cells are remembered anew
    text = "".join(linecache.getlines(path))
    return Source.from_text(text, path) if text else None
