import lzma
from pathlib import Path

import pytest

from lightning_app.data import moses


@pytest.mark.parametrize(
    ("language", "plain", "tokens"),
    [
        ("en", "We're here, Dr. Smith.", "We &apos;re here , Dr. Smith ."),
        ("en", 'He said: "No" & left...', "He said : &quot; No &quot; &amp; left ..."),
        ("en", "the 1990's, 5,300 of [x]", "the 1990 &apos;s , 5,300 of &#91; x &#93;"),
        ("de", "Am 3. Mai kam's an.", "Am 3. Mai kam &apos; s an ."),
        ("de", "", ""),
    ],
)
def test_tokenize(language: str, plain: str, tokens: str):
    assert moses.tokenize(plain, language) == tokens


@pytest.mark.parametrize(
    ("language", "plain"),
    [
        ("en", "We're here, Dr. Smith."),
        ("en", 'He said: "No" & left...'),
        ("en", "It costs $ 5 (or 6)?".replace("$ ", "$")),
        ("de", 'Er sagt: "Nein."'),
    ],
)
def test_detokenize_undoes_tokenize(language: str, plain: str):
    assert moses.detokenize(moses.tokenize(plain, language), language) == plain


@pytest.mark.parametrize("language", ["de", "en"])
def test_equals_the_published_test_set(shared_data: Path, language: str):
    def lines(name: str) -> list[str]:
        path = shared_data / "iwslt14_deen" / f"{name}.{language}.xz"
        return lzma.decompress(path.read_bytes()).decode().split("\n")[:-1]

    raw, published = lines("test.raw"), lines("test")
    assert len(raw) == 6750
    assert [moses.tokenize(line.replace("’", "'"), language).lower() for line in raw] == published
