"""Moses tokenisation in Python: what fairseq did to IWSLT14, and the way back to plain text.

The rules of `tokenizer.perl` and `detokenizer.perl` (Koehn et al. 2007, Moses) for English and
German, without aggressive hyphen splitting.
"""

import re
from typing import Literal

Language = Literal["de", "en"]

_ESCAPES = [
    ("&", "&amp;"),
    ("|", "&#124;"),
    ("<", "&lt;"),
    (">", "&gt;"),
    ("'", "&apos;"),
    ('"', "&quot;"),
    ("[", "&#91;"),
    ("]", "&#93;"),
]

# Words that keep their full stop ("Dr."); single letters do as well.
_TITLES = (
    "Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl DR Dr Ens Gen Gov Hon "
    "Hosp Insp Lt MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Ph Prof Pvt Rep Reps "
    "Res Rev Rt Sen Sens Sfc Sgt Sr St Supt Surg v vs"
)
_LETTERS = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"
_KEEP_STOP = {
    "en": set(f"{_TITLES} {_LETTERS} Drs Hr rev".split()),
    "de": set(
        f"{_TITLES} {_LETTERS} {_LETTERS.lower()} Art Mio Mrd bzw usw etc Mag Hr Fr Nr ca "
        "I II III IV VI VII VIII IX XI XII XIII XIV XV XVI XVII XVIII XIX XX".split()
    )
    | {str(ordinal) for ordinal in range(1, 100)},
}
# Words that keep it only before a number ("No. 5").
_KEEP_STOP_BEFORE_NUMBER = {"en": {"No", "Nos", "Art", "Nr", "pp"}, "de": set[str]()}

_ALPHA = r"[^\W\d_]"
_SPECIAL = re.compile(r"([^\w\s.'`,\-]|_)")
_DOTS = re.compile(r"\.{2,}")
_COMMA_AFTER = re.compile(r"(\D),")
_COMMA_BEFORE = re.compile(r",(\D)")
_COMMA_LAST = re.compile(r"(\d),$")
# English contractions: "we're" -> "we 're"; every other apostrophe stands alone.
_CONTRACTION = re.compile(rf"({_ALPHA})'({_ALPHA})")
_DECADE = re.compile(r"(\d)'(s)")
_ALONE = re.compile(rf"(?<!{_ALPHA})'|'(?!{_ALPHA})")
_NUMBERED_ALPHA = re.compile(rf"(\d)'({_ALPHA})")
_STOP_BEFORE_QUOTE = re.compile(r"\.' ?$")
_QUOTE_ELISION = re.compile(rf"'{_ALPHA}")
_OPENING = re.compile(r"[$€£¥(\[{¿¡]+")
_CLOSING = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTES = re.compile(r"['\"„“”`]+")


def escape(text: str) -> str:
    """Write the characters that Moses reserves as entities: `'` becomes `&apos;` and so on."""
    for plain, entity in _ESCAPES:
        text = text.replace(plain, entity)
    return text


def unescape(text: str) -> str:
    """Undo `escape`."""
    for plain, entity in reversed(_ESCAPES):
        text = text.replace(entity, plain)
    return text


def tokenize(text: str, language: Language) -> str:
    """Return the tokens of `text`, separated by single spaces and escaped."""
    text = " ".join(text.split())
    text = _SPECIAL.sub(r" \1 ", text)
    # Runs of dots are one token; a private character stands for them until the end.
    text = _DOTS.sub(lambda run: " " + "\ue000" * len(run[0]) + " ", text)
    text = _COMMA_AFTER.sub(r"\1 , ", text)
    text = _COMMA_BEFORE.sub(r" , \1", text)
    text = _COMMA_LAST.sub(r"\1 ,", text)
    text = _split_apostrophes(text) if language == "en" else text.replace("'", " ' ")
    words = text.split()
    last = len(words) - 1
    for i, word in enumerate(words):
        if len(word) > 1 and word.endswith("."):
            following = words[i + 1] if i < last else ""
            if i == last or not _keeps_stop(word[:-1], following, language):
                words[i] = word[:-1] + " ."
    text = _STOP_BEFORE_QUOTE.sub(" . '", " ".join(words))
    return escape(text.replace("\ue000", "."))


def _split_apostrophes(text: str) -> str:
    text = _DECADE.sub("\\1 \ue001\\2", text)
    text = _CONTRACTION.sub("\\1 \ue001\\2", text)
    text = _NUMBERED_ALPHA.sub("\\1 \ue001\\2", text)
    return text.replace("'", " ' ").replace("\ue001", "'")


def _keeps_stop(word: str, following: str, language: Language) -> bool:
    if "." in word and any(letter.isalpha() for letter in word):
        return True
    if word in _KEEP_STOP[language] or following[:1].islower():
        return True
    return word in _KEEP_STOP_BEFORE_NUMBER[language] and following[:1].isdigit()


def detokenize(text: str, language: str) -> str:
    """Return plain text: entities undone, punctuation and contractions attached to their words."""
    out: list[str] = []
    glue = True  # whether the next word follows without a space
    opened = {"'": False, '"': False}
    words = unescape(text).split()
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        attach, glue_next = glue, False
        if _OPENING.fullmatch(word):
            glue_next = True
        elif _CLOSING.fullmatch(word) or (
            language == "en" and _QUOTE_ELISION.match(word) and before[-1:].isalnum()
        ):
            attach = True
        elif _QUOTES.fullmatch(word):
            kind = "'" if word.startswith(("'", "`")) else '"'
            if opened[kind] or i == len(words) - 1:
                attach, opened[kind] = True, False
            elif language == "en" and word == "'" and before.endswith("s"):
                attach = True  # the Jones' house
            else:
                glue_next, opened[kind] = True, True
        out.append(word if attach else " " + word)
        glue = glue_next
    return "".join(out)
