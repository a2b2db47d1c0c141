"""HTML as nested calls. Every string is escaped unless it is `Markup` already."""

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable["Child"]

VOID = frozenset({"meta", "br", "hr", "col"})


def element(name: str, /, *children: Child, **attributes: str | None) -> Markup:
    """`element("p", "a < b", class_="note")` is `<p class="note">a &lt; b</p>`.

    `class_` and `for_` lose their underscore, others turn it into a dash; None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join_markup(children)}</{name}>")


def join_markup(children: Iterable[Child]) -> Markup:
    """The children one after the other, strings escaped."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    return html.escape(child, quote=False) if isinstance(child, str) else join_markup(child)
