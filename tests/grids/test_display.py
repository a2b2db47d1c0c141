"""What reaches a terminal: text, never a sequence or a markup that is in a name."""

import io
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_app.core.errors import PrintableStream, printable, printable_output
from lightning_app.grids.display import PlainConsole, running_table

NAMES = ("\x1b[31mred", "\x1b]8;;http://x\x07link\x1b]8;;\x07", "\x1b[2J\x1b[H", "a\rb", "\x07")
NAMES += ("\x9b31m", "\u202egnp.exe", "\u2066x\u2069", "a\x08\x08b", "\u2028", "\udc9b")
MARKUP = ("[red]x[/red]", "[link=http://x]y[/link]", "[/]", "[bold", ":smile:")


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console on a terminal, so that colours are sequences."""
    monkeypatch.setattr(sys, "stdout", PrintableStream(io.StringIO()))
    return PlainConsole(force_terminal=True, color_system="standard", width=500)


@pytest.mark.parametrize("name", [*NAMES, *MARKUP])
def test_a_name_is_shown_as_it_is_without_its_sequences(name: str, console: Console) -> None:
    table = Table("name")
    table.add_row(name)
    table.add_row(Text(name))
    console.print(name)
    console.print(table)
    console.print(running_table([(name, None), (name, {"step": 1, "max_steps": 2})]))
    console.print(Text("own", "red"))
    assert isinstance(console.file, io.StringIO)
    found = console.file.getvalue()
    assert "\x1b[31mown" in found
    plain = found.replace("\x1b[31mown\x1b[0m", "")
    for sequence in ("\x1b[1m", "\x1b[0m", "\x1b[3m", "\x1b[?25l", "\x1b[2m"):
        plain = plain.replace(sequence, "")
    if name in MARKUP:
        assert plain.count(name) == 5
    else:
        assert not {*plain} & {*"\x1b\x07\x08\r\x9b\u202e\u2066\u2069\u2028\udc9b"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_printable(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output():
        print(f"a {name} b")
        print(f"an error {name}", file=sys.stderr)
        sys.stdout.writelines([name, "\n"])
    for text in capsys.readouterr():
        assert printable(text) == text
        assert text.endswith("\n")


def test_text_of_other_languages_and_data_in_a_pipe_stay(capsys) -> None:
    text = "naïve\tنص 東京 e\u0301 \u00a0 😀 👩\u200d💻 █"
    with printable_output():
        print(text)
    assert capsys.readouterr().out == text + "\n"
    with printable_output(only_terminals=True):
        print("a\rb \x1b[0m")
    assert capsys.readouterr().out == "a\rb \x1b[0m\n"
