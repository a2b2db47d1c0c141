import functools
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.corpora import iwslt14
from lightning_app.data.sources import locate, read
from tests.told import told

TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def train_tags(language: str) -> str:
    """50 sentences, of which two are dropped: one is empty, one too unlike its partner."""
    lines = ["<url>http://x</url>", "<talkid>1</talkid>", "<keywords>k</keywords>"]
    lines += [f"<title>Talk {language}</title>", f"<description>About {language}.</description>"]
    lines += [f"Line {i} of {language}, isn't it?" for i in range(46)]
    lines += [
        "" if language == "de" else "No partner.",
        "One two three four " * (language == "de") + "x",
    ]
    return "\n".join(lines) + "\n"


def xml(name: str, language: str) -> str:
    return f'<doc>\n<seg id="1"> It’s {name} {language}. </seg>\n<seg id="2">Two.</seg>\n</doc>\n'


@pytest.fixture
def archive() -> dict[str, str]:
    files = {f"de-en/train.tags.de-en.{side}": train_tags(side) for side in ("de", "en")}
    for name in TEST_SETS:
        for side in ("de", "en"):
            files[f"de-en/IWSLT14.{name}.de-en.{side}.xml"] = xml(name, side)
    return files


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local server in place of the public home; gives the folder it serves."""
    root = tmp_path / "served"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/de-en.tgz"
        monkeypatch.setattr(iwslt14, "IWSLT14_URL", url)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield root
        server.shutdown()
        thread.join()


def pack(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            data = text.encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_tarball_becomes_fairseqs_splits_or_lacks_what_is_named(serve: Path, archive, tmp_path):
    pack(serve / "de-en.tgz", archive)
    config = DataConfig(name="iwslt14", cache=str(tmp_path / "cache"))
    first = locate(config)
    (serve / "de-en.tgz").unlink()
    assert locate(config) == first  # a second call downloads nothing
    corpus = read(first, config)
    assert {s: len(of) for s, of in corpus.splits.items()} == {"train": 46, "valid": 2, "test": 10}
    # title and description come first, so the 23rd pair is line 20
    assert corpus.splits["valid"][0]["target"] == "line 20 of en , isn &apos;t it ?"
    assert corpus.splits["test"][0]["target"] == "it &apos;s ted.dev2010 en ."
    assert corpus.splits["test"][2]["target"] == "it &apos;s tedx.dev2012 en ."
    assert corpus.references["test"][0] == "It's TED.dev2010 en."
    assert told("of 50 … 2").search(corpus.protocol)
    assert "46 / 2 / 10" in corpus.protocol
    assert "sha256" in corpus.protocol
    del archive["de-en/IWSLT14.TED.tst2011.de-en.de.xml"]
    pack(serve / "de-en.tgz", archive)
    with pytest.raises(UserError, match=r"no file IWSLT14\.TED\.tst2011\.de-en\.de\.xml"):
        locate(DataConfig(name="iwslt14", cache=str(tmp_path / "other")))
    assert [p.name for p in (tmp_path / "other" / "downloads").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("content", [None, b"not an archive"])
def test_one_clear_error(serve: Path, tmp_path: Path, content: bytes | None):
    if content is not None:
        (serve / "de-en.tgz").write_bytes(content)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:\d+/de-en\.tgz"):
        locate(DataConfig(name="iwslt14", cache=str(tmp_path / "cache")))


def test_no_network_no_hub_and_text_never_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(iwslt14, "IWSLT14_URL", "http://127.0.0.1:9/de-en.tgz")
    with pytest.raises(UserError, match=r"data\.root"):
        locate(DataConfig(name="iwslt14", cache=str(tmp_path / "cache")))

    def load_dataset(path: str, name: str | None, revision: str | None):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"hf://Salesforce/wikitext \(no route\)"):
        locate(DataConfig(name="wikitext2", task="masked_lm", cache=str(tmp_path)))
    with pytest.raises(UserError, match=r"local folders only"):
        locate(DataConfig(name="text", root="hf://owner/name", cache=str(tmp_path)))


def test_corpora_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked, table = [], {"text": ["", " = Title = \n", " some text \n"]}

    def load_dataset(path: str, name: str | None, revision: str | None):
        asked.append((path, name, revision))
        rows = datasets.Dataset.from_dict(table)
        return {"train": rows, "validation": rows, "test": rows}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(name="wikitext2", task="masked_lm", cache=str(tmp_path))
    locate(config)
    corpus = read(locate(config), config)
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1", None)]
    assert corpus.splits["test"]["text"][:] == ["", "= Title =", "some text"]
    assert "not the text of the official splits" in corpus.protocol
    table = {"translation": [{"de": "Ja, gut.", "en": "It's\nso."}]}
    config = DataConfig(name="iwslt14", root="hf://owner/name", cache=str(tmp_path))
    corpus = read(locate(config), config)
    assert {*asked[1:]} == {("owner/name", None, "refs/convert/parquet")}
    assert corpus.splits["test"][0] == {"source": "ja , gut .", "target": "it &apos;s so ."}
    assert corpus.references["test"] == ["It's so."]
    assert "hf://owner/name" in corpus.protocol
    assert "not fairseq's splits" in corpus.protocol
