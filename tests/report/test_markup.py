"""Strings are escaped once, markup is left alone."""

from lightning_app.report.markup import Markup, element, join_markup


def test_strings_are_escaped():
    made = element("p", 'a < "b" & c', class_="x", data_note='1 < "2"', title=None)
    assert made == '<p class="x" data-note="1 &lt; &quot;2&quot;">a &lt; "b" &amp; c</p>'


def test_markup_is_not_escaped_again():
    inner = element("b", "<")
    assert element("p", inner, [inner, "&"]) == "<p><b>&lt;</b><b>&lt;</b>&amp;</p>"
    assert join_markup([Markup("<hr>"), "<hr>"]) == "<hr>&lt;hr&gt;"


def test_void_elements_are_not_closed():
    assert element("meta", name="viewport") == '<meta name="viewport">'
