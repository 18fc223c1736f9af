"""HTML that reads well in a light and in a dark notebook, and without any style at all.

Colours are JupyterLab's own variables where there are some, else half-transparent, so that the theme shines through.
Every output carries the style sheet, because a saved notebook shows its outputs one by one.
"""

import html
import linecache
from collections.abc import Iterable

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

_LEXERS = {"ptx": "ptx", "cu": "cuda"}

STYLE = """
.ptxlab { --red: rgba(224, 62, 62, .28); --amber: rgba(224, 150, 20, .26); --green: rgba(46, 160, 67, .25);
  --line: rgba(128, 128, 128, .35); --faint: rgba(128, 128, 128, .10); --blue: rgba(56, 132, 222, .28);
  --mono: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace); line-height: 1.45; max-width: 75em }
.ptxlab table { border-collapse: collapse; margin: .3em 0 .6em; font-size: 13px }
.ptxlab td, .ptxlab th { border: 0; border-bottom: 1px solid var(--line); padding: .15em .7em; text-align: left;
  vertical-align: top; background: none }
.ptxlab th { font-weight: 600; white-space: nowrap }
.ptxlab .num { text-align: right; font-variant-numeric: tabular-nums }
.ptxlab code, .ptxlab pre, .ptxlab .bits { font-family: var(--mono); font-size: 12.5px; background: none }
.ptxlab .bits { white-space: nowrap; text-align: right }
.ptxlab pre { margin: .3em 0; line-height: 1.4; overflow-x: auto; color: inherit; padding: 0 }
.ptxlab pre .at { background: var(--red); display: inline-block; min-width: 100% }
.ptxlab .no { opacity: .5; user-select: none }
.ptxlab .dim { opacity: .65 }
.ptxlab .bad { background: var(--red) }
.ptxlab .over { background: var(--red); font-weight: 700 }
.ptxlab .chip { border-radius: 3px; padding: 0 .4em; white-space: nowrap; background: var(--faint);
  margin-right: .35em }
.ptxlab .chip.bad { background: var(--red) } .ptxlab .chip.good { background: var(--green) }
.ptxlab .chip.changed { background: var(--amber) }
.ptxlab .title { margin: .2em 0; font-size: 14px }
.ptxlab summary { cursor: pointer }
.ptxlab .wide { overflow-x: auto; margin: .3em 0 }
.ptxlab svg text { fill: currentColor; font: 9px var(--mono) }
.ptxlab svg rect { fill-opacity: .33 }
.ptxlab svg .other { fill-opacity: .08 } .ptxlab svg text.other { fill-opacity: .45 }
.ptxlab svg rect.mine { fill-opacity: .85 } .ptxlab svg text.mine { font-weight: 700 }
.ptxlab svg rect.wrong { stroke: rgb(224, 62, 62); stroke-width: 1.5 }
.ptxlab svg .label { text-anchor: middle } .ptxlab svg .end { text-anchor: end }
.ptxlab .k, .ptxlab .kr, .ptxlab .kt { color: var(--jp-mirror-editor-keyword-color, #2f8f4e);
  font-weight: 600 }
.ptxlab .c, .ptxlab .c1, .ptxlab .cm { color: var(--jp-mirror-editor-comment-color, #7b8a8b); font-style: italic }
.ptxlab .cp, .ptxlab .cpf { color: var(--jp-mirror-editor-meta-color, #8a63d2) }
.ptxlab .m, .ptxlab .mi, .ptxlab .mh, .ptxlab .mf { color: var(--jp-mirror-editor-number-color, #2f8f8f) }
.ptxlab .s, .ptxlab .s1, .ptxlab .s2 { color: var(--jp-mirror-editor-string-color, #c0504d) }
.ptxlab .nf, .ptxlab .nb { color: var(--jp-mirror-editor-def-color, #3b7dd8) }
"""


class Html(str):
    """Text that is HTML already; `element` and `escape` leave it as it is."""


def escape(content: object) -> Html:
    """The content as HTML."""
    return content if isinstance(content, Html) else Html(html.escape(str(content), quote=False))


def element(name: str, *children: object, **attributes: object) -> Html:
    """`<name ...>children</name>`; children that are not `Html` are escaped, `cls` stands for `class`."""
    given = {"class" if n == "cls" else n.replace("_", "-"): value for n, value in attributes.items()}
    inside = "".join(f' {n}="{html.escape(str(value))}"' for n, value in given.items() if value not in (None, ""))
    return Html(f"<{name}{inside}>{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Parts one after the other."""
    return Html(between.join(map(escape, parts)))


def page(*children: object) -> str:
    """One output: its style and its content."""
    return element("div", element("style", Html(STYLE)), *children, cls="ptxlab")


def chip(*children: object, kind: str = "") -> Html:
    """A word on a coloured ground; `kind`: `bad`, `good`, `changed` or none."""
    return element("span", *children, cls=f"chip {kind}".strip())


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """A table; cells that are `<td>` elements already stay as they are."""
    head = element("tr", *(element("th", cell) for cell in header))
    body = [element("tr", *(cell if _is_cell(cell) else element("td", cell) for cell in row)) for row in rows]
    return element("table", head, *body)


def _is_cell(cell: object) -> bool:
    return isinstance(cell, Html) and cell.startswith("<td")


def details(summary: object, *children: object, shown: bool = False) -> Html:
    """Something to unfold."""
    return Html(f"<details{' open' if shown else ''}>{element('summary', summary)}{join(children)}</details>")


def highlighted(text: str, language: str) -> list[Html]:
    """The lines of a PTX (`ptx`) or CUDA C++ (`cu`) source, with their colours."""
    coloured = highlight(text, get_lexer_by_name(_LEXERS[language], stripnl=False), HtmlFormatter(nowrap=True))
    return [Html(line) for line in coloured.splitlines()]


def listing(text: str, language: str, *, marked: Iterable[int] = (), first: int = 1, last: int | None = None) -> Html:
    """Numbered lines `first` to `last` of a source; `marked` ones stand out."""
    lines, marks = highlighted(text, language), set(marked)
    chosen = range(first, min(last or len(lines), len(lines)) + 1)
    shown = []
    for number in chosen:
        line = join([element("span", f"{number:>4}  ", cls="no"), lines[number - 1]])
        shown.append(element("span", line, cls="at") if number in marks else line)
    return element("pre", join(shown, "\n"))


def excerpt(path: str, line: int, around: int = 2) -> Html:
    """Some lines of a file, or of a cell that `remember` was told of; empty where neither is there."""
    text = "".join(linecache.getlines(path))
    if not 0 < line <= text.count("\n") + 1:
        return Html("")
    language = "ptx" if ".visible" in text or ".version" in text else "cu"
    return listing(text, language, marked=[line], first=max(1, line - around), last=line + around)


def remember(path: str, text: str) -> None:
    """Keep the text of a cell where Python keeps the lines of those that it runs itself."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
