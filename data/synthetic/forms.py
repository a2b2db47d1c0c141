"""The forms of German and English words, the content of phrases and clauses, and word order.

German order: first place, finite verb, pronouns, subject, dative, time, frequency, accusative,
nicht, manner, company, place, rest of the verb. English order: time if it is first in German,
subject, verb, objects, manner, company, place, time.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from data.synthetic import lexicon

Tense = Literal["present", "past", "modal", "future"]
NOM, ACC, DAT = range(3)
ICH, ER, WIR = range(3)  # forms of a finite verb: ich; er, sie, es; wir, sie

DER = {
    "m": ("der", "den", "dem"),
    "f": ("die", "die", "der"),
    "n": ("das", "das", "dem"),
    "p": ("die", "die", "den"),
}
RELATIVE = DER | {"p": ("die", "die", "denen")}
DIES = {"m": ("er", "en", "em"), "f": ("e", "e", "er"), "n": ("es", "es", "em")}
DIES |= {"p": ("e", "e", "en")}
EIN = {"m": ("", "en", "em"), "f": ("e", "e", "er"), "n": ("", "", "em"), "p": ("e", "e", "en")}
WEAK = {"m": ("e", "en", "en"), "f": ("e", "e", "en"), "n": ("e", "e", "en")}
WEAK |= {"p": ("en", "en", "en")}  # after der, dieser, jeder
MIXED = {"m": ("er", "en", "en"), "f": ("e", "e", "en"), "n": ("es", "es", "en")}
MIXED |= {"p": ("en", "en", "en")}  # after ein, kein, mein
STRONG = ("e", "e", "en")  # of the plural, after numbers or nothing


class Noun(NamedTuple):
    """Forms by number (singular, plural) and case."""

    german: tuple[tuple[str, str, str], tuple[str, str, str]]
    gender: str
    natural: str  # gender of the English pronoun
    english: tuple[str, str]
    kind: str
    prepositions: tuple[str, str] = ("in", "in")


class Verb(NamedTuple):
    """Forms of a verb; `finite` for ich, er, wir; English (base, third person, past)."""

    prefix: str
    infinitive: str
    finite: tuple[str, str, str]
    participle: str
    auxiliary: str
    english: tuple[str, str, str]
    subject: str
    object: str

    def zu(self) -> str:
        """Return the infinitive with zu, which goes after a separable prefix."""
        return f"{self.prefix}zu{self.infinitive}" if self.prefix else f"zu {self.infinitive}"


class Phrase(NamedTuple):
    """A noun phrase in all its roles.

    Attributes:
        german: nominative, accusative, dative.
        english: as a subject, as an object.
        form: of the verb, if it is the subject.
        gender: m, f, n, or p for any plural.
        natural: gender of the English pronoun for it.
        kind: of the noun.
        is_pronoun: whether it goes to the position of pronouns.
        negative: whether it holds the negation of the clause (kein).
        fixed: whether it may come first as an object: its article shows the case, and it is
            neither indefinite nor negative.
    """

    german: tuple[str, str, str]
    english: tuple[str, str]
    form: int
    gender: str
    natural: str
    kind: str
    is_pronoun: bool = False
    negative: bool = False
    fixed: bool = False


class Clause(NamedTuple):
    """The content of one clause, before it has a word order. Pairs are (German, English)."""

    subject: Phrase
    verb: Verb | None  # None for the copula
    tense: Tense
    negated: bool = False
    modal: int = 0
    dative: Phrase | None = None
    accusative: Phrase | None = None
    predicate: tuple[str, str] | None = None
    time: tuple[str, str] | None = None
    frequency: tuple[str, str] | None = None
    manner: tuple[str, str] | None = None
    company: tuple[str, str] | None = None
    place: tuple[str, str] | None = None


def _personal(
    german: str, english: str, form: int, gender: str, natural: str, kind: str = "P"
) -> Phrase:
    nominative, accusative, dative = german.split()
    subject, obj = english.split()
    forms = nominative, accusative, dative
    return Phrase(forms, (subject, obj), form, gender, natural, kind, is_pronoun=True)


HE = _personal("er ihn ihm", "he him", ER, "m", "m")
SHE = _personal("sie sie ihr", "she her", ER, "f", "f")
ME = _personal("ich mich mir", "I me", ICH, "m", "m")
WE = _personal("wir uns uns", "we us", WIR, "p", "m")
THEY = _personal("sie sie ihnen", "they them", WIR, "p", "m")
IT = _personal("es es ihm", "it it", ER, "n", "n", kind="T")
WHO = _personal("wer wen wem", "who whom", ER, "m", "m")
PERSONAL = [HE, SHE, ME, WE, THEY]
_ENGLISH_PRONOUNS = {"m": HE.english, "f": SHE.english, "n": IT.english}


def _rows(table: str) -> list[list[str]]:
    return [row.split() for row in table.split(";")]


def _pairs(table: str) -> list[tuple[str, ...]]:
    return [tuple(" ".join(part.split()) for part in row.split("/")) for row in table.split(";")]


def _noun(row: list[str], kind: str) -> Noun:
    singular, _, oblique = row[0].partition("/")
    plural = row[2]
    dative_plural = plural if plural[-1] in "ns" else plural + "n"
    oblique = oblique or singular
    return Noun(
        german=((singular, oblique, oblique), (plural, plural, dative_plural)),
        gender=row[1][0],
        natural=row[1][-1] if kind == "P" else "n",
        english=(row[3], row[3] + "s" if row[4] == "-" else row[4]),
        kind=kind,
    )


def _third_person(verb: str) -> str:
    first, _, rest = verb.partition(" ")
    if first.endswith(("s", "sh", "ch", "x", "o")):
        first += "es"
    elif first.endswith("y") and first[-2] not in "aeiou":
        first = first[:-1] + "ies"
    else:
        first += "s"
    return f"{first} {rest}".strip()


def _verb(row: list[str]) -> Verb:
    prefix, _, infinitive = row[0].rpartition("|")
    if infinitive.endswith("eln"):
        ich = infinitive[:-3] + "le"
    elif infinitive == "wissen":
        ich = "weiß"
    else:
        ich = infinitive[:-1] if infinitive.endswith("en") else infinitive[:-1] + "e"
    base, past = (form.replace("_", " ") for form in row[4:6])
    return Verb(
        prefix=prefix,
        infinitive=infinitive,
        finite=(ich, row[1], infinitive),
        participle=row[2],
        auxiliary=row[3],
        english=(base, _third_person(base), past),
        subject=row[6],
        object=row[7] if len(row) > 7 else "",
    )


class Words:
    """The lexicon, parsed."""

    def __init__(self) -> None:
        self.nouns = {
            kind: [_noun(row, kind) for row in _rows(table)]
            for kind, table in lexicon.NOUNS.items()
        }
        self.places = [
            _noun(row[2:], "O")._replace(prepositions=(row[0], row[1]))
            for row in _rows(lexicon.PLACES)
        ]
        self.names = [
            Phrase((name, name, name), (name, name), ER, gender, gender, "P")
            for name, gender in _rows(lexicon.NAMES)
        ]
        self.adjectives: dict[str, list[tuple[str, str, str]]] = {kind: [] for kind in "PATXFO"}
        for form, english, kinds in _rows(lexicon.ADJECTIVES):
            stem, _, predicative = form.partition("/")
            for kind in kinds:
                self.adjectives[kind].append((stem, predicative or stem, english))
        self.intransitive = [_verb(row) for row in _rows(lexicon.INTRANSITIVE)]
        self.transitive = [_verb(row) for row in _rows(lexicon.TRANSITIVE)]
        self.dative = [_verb(row) for row in _rows(lexicon.DATIVE)]
        self.ditransitive = [_verb(row) for row in _rows(lexicon.DITRANSITIVE)]
        self.transitive_for = {k: [v for v in self.transitive if k in v.object] for k in "PATXF"}
        self.dative_for = {k: [v for v in self.dative if k in v.object] for k in "PA"}
        self.reporting = [_verb(row) for row in _rows(lexicon.REPORTING)]
        self.weather = [_verb(row) for row in _rows(lexicon.WEATHER)]
        self.numbers = _pairs(lexicon.NUMBERS)
        self.manners = [(row[0], row[1]) for row in _pairs(lexicon.MANNERS)]
        times = _pairs(lexicon.TIMES)
        self.times: dict[Tense, list[tuple[str, str]]] = {
            "present": [(row[0], row[1]) for row in times if "n" in row[2]],
            "past": [(row[0], row[1]) for row in times if "p" in row[2]],
            "future": [(row[0], row[1]) for row in times if "f" in row[2]],
        }
        self.times["modal"] = self.times["future"]


def with_article(following: str) -> str:
    """Return a or an before `following`."""
    silent_h = following.startswith(("honest", "hour"))
    vowel = following[0] in "aeiou" and not following.startswith(("useful", "uni"))
    return f"an {following}" if vowel or silent_h else f"a {following}"


def three_cases(forms: Iterable[str]) -> tuple[str, str, str]:
    nominative, accusative, dative = forms
    return nominative, accusative, dative


def with_endings(stem: str, endings: tuple[str, str, str]) -> tuple[str, str, str]:
    return stem + endings[NOM], stem + endings[ACC], stem + endings[DAT]


def pronoun_of(phrase: Phrase) -> Phrase:
    """Return the personal pronoun that replaces `phrase`: German by gender, English by nature."""
    if phrase.is_pronoun:
        return phrase
    if phrase.form == WIR:
        return THEY._replace(kind=phrase.kind)
    german = {"m": HE, "f": SHE, "n": IT}[phrase.gender]
    return german._replace(english=_ENGLISH_PRONOUNS[phrase.natural], kind=phrase.kind)


_SEIN = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}
_HABEN = ("habe", "hat", "haben")
_WERDEN = ("werde", "wird", "werden")
_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}


def may_stand_first(clause: Clause) -> bool:
    """Whether the accusative, failing that the dative, can come first without being a subject."""
    if clause.accusative is not None:
        return clause.accusative.fixed and clause.accusative.gender == "m"
    return clause.dative is not None and clause.dative.fixed


def _is_negative(clause: Clause) -> bool:
    """Whether a phrase (kein) already negates the clause."""
    phrases = clause.subject, clause.dative, clause.accusative
    kein = clause.predicate is not None and clause.predicate[0].startswith("kein")
    return kein or any(phrase is not None and phrase.negative for phrase in phrases)


def german_verb(clause: Clause) -> tuple[str, list[str], str]:
    """Return the finite verb of a main clause, the end of that clause, and both as at the end of a
    subordinate clause."""
    verb, form, tense = clause.verb, clause.subject.form, clause.tense
    if tense == "present" or (tense == "past" and verb is None):
        if verb is None:
            finite = _SEIN[tense][form]
            return finite, [], finite
        finite = verb.finite[form]
        return finite, [verb.prefix] if verb.prefix else [], verb.prefix + finite
    if tense == "past":
        assert verb is not None, "the copula is handled above"
        auxiliary = (_HABEN if verb.auxiliary == "h" else _SEIN["present"])[form]
        return auxiliary, [verb.participle], f"{verb.participle} {auxiliary}"
    singular, plural, *_ = lexicon.MODALS[clause.modal]
    finite = _WERDEN[form] if tense == "future" else (plural if form == WIR else singular)
    infinitive = "sein" if verb is None else verb.prefix + verb.infinitive
    return finite, [infinitive], f"{infinitive} {finite}"


def german_middle(clause: Clause, first: str = "", subject_leads: bool = False) -> list[str]:
    """Return the words between the parts of the verb, without the constituent named `first`."""
    subject, accusative, dative = clause.subject, clause.accusative, clause.dative
    if first == "object":
        accusative, dative = (None, dative) if accusative is not None else (None, None)
    parts = []
    if dative is not None and dative.is_pronoun:
        parts.append(dative.german[DAT])
    if accusative is not None and accusative.is_pronoun:
        parts.insert(0, accusative.german[ACC])
    if first != "subject":
        leads = subject_leads or subject.is_pronoun
        parts.insert(0 if leads else len(parts), subject.german[NOM])
    if dative is not None and not dative.is_pronoun:
        parts.append(dative.german[DAT])
    if clause.time is not None and first != "time":
        parts.append(clause.time[0])
    if clause.frequency is not None and first != "frequency":
        parts.append(clause.frequency[0])
    if accusative is not None and not accusative.is_pronoun:
        parts.append(accusative.german[ACC])
    if clause.negated and not _is_negative(clause):
        parts.append("nicht")
    if clause.manner is not None:
        parts.append(clause.manner[0])
    if clause.company is not None:
        parts.append(clause.company[0])
    if clause.place is not None and first != "place":
        parts.append(clause.place[0])
    if clause.predicate is not None:
        parts.append(clause.predicate[0])
    return parts


def german_second(clause: Clause, first: str) -> str:
    """Return a main clause: the constituent named `first` (none if empty), then the finite verb."""
    finite, rest, _ = german_verb(clause)
    lead = []
    if first == "subject":
        lead = [clause.subject.german[NOM]]
    elif first == "object":
        accusative, dative = clause.accusative, clause.dative
        if accusative is not None:
            lead = [accusative.german[ACC]]
        elif dative is not None:
            lead = [dative.german[DAT]]
    elif first:
        lead = [getattr(clause, first)[0]]
    return " ".join([*lead, finite, *german_middle(clause, first), *rest])


def german_final(clause: Clause) -> str:
    """Return a subordinate clause without its conjunction."""
    return " ".join([*german_middle(clause, subject_leads=True), german_verb(clause)[2]])


def english_clause(clause: Clause, *, time_first: bool = False, question: bool = False) -> str:
    """Return a clause: subject first, or the auxiliary first in a question."""
    negated = clause.negated and not clause.subject.negative
    # kein on an object or predicate shows as "any" or "a" in English, beside "not"
    auxiliary, verb = _english_verb(clause, needs_auxiliary=negated or question)
    subject = clause.subject.english[0]
    parts = [clause.time[1]] if time_first and clause.time is not None else []
    parts += [auxiliary, subject] if question else [subject, auxiliary]
    if negated:
        parts.append("not")
    if clause.frequency is not None:
        parts.append(clause.frequency[1])
    parts.append(verb)
    parts += [
        phrase.english[1] for phrase in (clause.dative, clause.accusative) if phrase is not None
    ]
    time = None if time_first else clause.time
    last = clause.predicate, clause.manner, clause.company, clause.place, time
    parts += [words[1] for words in last if words is not None]
    return " ".join(part for part in parts if part)


def _english_verb(clause: Clause, needs_auxiliary: bool) -> tuple[str, str]:
    """Return the auxiliary (empty without one) and the rest of the verb."""
    verb, form, tense = clause.verb, clause.subject.form, clause.tense
    if verb is None and tense in _BE:
        return _BE[tense][form], ""
    base = "be" if verb is None else verb.english[0]
    do = "does" if form == ER else "do"
    if tense == "future":
        return "will", base
    if tense == "modal":
        _, _, third, other, takes_do = lexicon.MODALS[clause.modal]
        if not takes_do:
            return other, base
        if needs_auxiliary:
            return do, f"{other} {base}"
        return "", f"{third if form == ER else other} {base}"
    assert verb is not None, "the copula is handled above"
    if needs_auxiliary:
        return do if tense == "present" else "did", base
    if tense == "past":
        return "", verb.english[2]
    return "", verb.english[1] if form == ER else base


def finish_pair(german: str, english: str, mark: str) -> tuple[str, str]:
    """Close a sentence: one comma for two, none before the full stop, a capital first."""
    german = f"{german} {mark}".replace(" , ,", " ,").replace(f" , {mark}", f" {mark}")
    return german[0].upper() + german[1:], english[0].upper() + english[1:] + f" {mark}"
