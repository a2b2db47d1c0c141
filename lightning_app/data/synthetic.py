"""A synchronous grammar: German and English sentences with the same meaning, without a download.

It has what makes German-English word order hard: the finite verb in second place after several
kinds of first constituent, verbs at the end of subordinate and relative clauses, separable verbs,
the brackets of perfect, modal and future, agreement of articles, adjectives and pronouns in case,
gender and number, weak nouns, nicht and kein against do-support, dative verbs, two objects,
numbers. Every choice of words and structure is written to both sides at once.

German order: first place, finite verb, pronouns, subject, dative, time, frequency, accusative,
nicht, manner, company, place, rest of the verb. English order: time if it is first in German,
subject, verb, objects, manner, company, place, time.
"""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeVar

from lightning_app.data import lexicon

SEED = 1
SIZES = {"train": 30_000, "valid": 500, "test": 500}
LENGTHS = range(4, 26)  # tokens of a side, punctuation included

T = TypeVar("T")
Tense = Literal["present", "past", "modal", "future"]
NOM, ACC, DAT = range(3)
ICH, ER, WIR = range(3)  # forms of a finite verb: ich; er, sie, es; wir, sie

_DER = {
    "m": ("der", "den", "dem"),
    "f": ("die", "die", "der"),
    "n": ("das", "das", "dem"),
    "p": ("die", "die", "den"),
}
_RELATIVE = _DER | {"p": ("die", "die", "denen")}
_DIES = {"m": ("er", "en", "em"), "f": ("e", "e", "er"), "n": ("es", "es", "em")}
_DIES |= {"p": ("e", "e", "en")}
_EIN = {"m": ("", "en", "em"), "f": ("e", "e", "er"), "n": ("", "", "em"), "p": ("e", "e", "en")}
_WEAK = {"m": ("e", "en", "en"), "f": ("e", "e", "en"), "n": ("e", "e", "en")}
_WEAK |= {"p": ("en", "en", "en")}  # after der, dieser, jeder
_MIXED = {"m": ("er", "en", "en"), "f": ("e", "e", "en"), "n": ("es", "es", "en")}
_MIXED |= {"p": ("en", "en", "en")}  # after ein, kein, mein
_STRONG = ("e", "e", "en")  # of the plural, after numbers or nothing
_SEIN = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}
_HABEN = ("habe", "hat", "haben")
_WERDEN = ("werde", "wird", "werden")
_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}
_COMPANY = [("mit", "with", DAT), ("ohne", "without", ACC), ("für", "for", ACC)]
_QUESTION_WORDS = {
    "reason": ("warum", "why"),
    "time": ("wann", "when"),
    "place": ("wo", "where"),
    "frequency": ("wie oft", "how often"),
}
_POSSESSIVES = [("mein", "my"), ("sein", "his"), ("ihr", "her"), ("unser", "our")]


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
        """Return the infinitive with zu, which a separable prefix takes inside."""
        return f"{self.prefix}zu{self.infinitive}" if self.prefix else f"zu {self.infinitive}"


class Phrase(NamedTuple):
    """A noun phrase in all its roles.

    Attributes:
        german: nominative, accusative, dative.
        english: as a subject, as an object.
        form: of the verb of which it is the subject.
        gender: m, f, n, or p for any plural.
        natural: gender of the English pronoun for it.
        kind: of the noun.
        is_pronoun: whether it goes to the pronouns' place.
        negative: whether it holds the negation of the clause (kein).
        fixed: whether it may stand first as an object: its article shows the case, and it is
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
    """What one clause says, before it has an order. Pairs are (German, English)."""

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


_HE = _personal("er ihn ihm", "he him", ER, "m", "m")
_SHE = _personal("sie sie ihr", "she her", ER, "f", "f")
_I = _personal("ich mich mir", "I me", ICH, "m", "m")
_WE = _personal("wir uns uns", "we us", WIR, "p", "m")
_THEY = _personal("sie sie ihnen", "they them", WIR, "p", "m")
_IT = _personal("es es ihm", "it it", ER, "n", "n", kind="T")
_WHO = _personal("wer wen wem", "who whom", ER, "m", "m")
_PERSONAL = [_HE, _SHE, _I, _WE, _THEY]
_ENGLISH_PRONOUNS = {"m": _HE.english, "f": _SHE.english, "n": _IT.english}


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


def _article(following: str) -> str:
    """Return a or an before `following`."""
    silent_h = following.startswith(("honest", "hour"))
    vowel = following[0] in "aeiou" and not following.startswith(("useful", "uni"))
    return f"an {following}" if vowel or silent_h else f"a {following}"


def _cases(forms: Iterable[str]) -> tuple[str, str, str]:
    nominative, accusative, dative = forms
    return nominative, accusative, dative


def _declined(stem: str, endings: tuple[str, str, str]) -> tuple[str, str, str]:
    return stem + endings[NOM], stem + endings[ACC], stem + endings[DAT]


def _pronoun_of(phrase: Phrase) -> Phrase:
    """Return the personal pronoun that stands for `phrase`: German by gender, English by nature."""
    if phrase.is_pronoun:
        return phrase
    if phrase.form == WIR:
        return _THEY._replace(kind=phrase.kind)
    german = {"m": _HE, "f": _SHE, "n": _IT}[phrase.gender]
    return german._replace(english=_ENGLISH_PRONOUNS[phrase.natural], kind=phrase.kind)


class Grammar:
    """Draws sentence pairs. The same seed gives the same pairs on every platform and version.

    Only `Random.random` is used: its sequence is guaranteed, that of `choice` or `shuffle` is not.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._words = Words()
        self._relative_left = 0  # relative clauses that the sentence may still take

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _pick(self, choices: Sequence[T]) -> T:
        return choices[int(len(choices) * self._random())]

    def _word(self, choices: Sequence[T]) -> T:
        """Pick with a preference for the top of the table: density 1 / (2 sqrt(x))."""
        draw = self._random()
        return choices[int(len(choices) * draw * draw)]

    # Noun phrases

    def _phrase(
        self, kinds: str, *, negated: bool = False, definite: bool = False, plain: bool = False
    ) -> Phrase:
        """Draw a noun phrase of one of the kinds.

        Args:
            kinds: letters of the lexicon.
            negated: with kein.
            definite: nothing that a negation could not follow.
            plain: without a relative clause.
        """
        kind = kinds[0] if self._chance(0.4) else self._pick(kinds)
        if kind == "P" and not negated:
            draw = self._random()
            if draw < 0.12:
                return self._word(self._words.names)
            if draw < 0.27:
                return self._word(_PERSONAL)
        phrase = self._noun_phrase(
            self._word(self._words.nouns[kind]), negated=negated, definite=definite
        )
        if plain or negated or self._relative_left == 0 or not self._chance(0.2):
            return phrase
        self._relative_left -= 1
        german, english = self._relative(phrase)
        return phrase._replace(
            german=_cases(f"{case} , {german} ," for case in phrase.german),
            english=(f"{phrase.english[0]} {english}", f"{phrase.english[1]} {english}"),
        )

    def _noun_phrase(
        self, noun: Noun, *, negated: bool = False, definite: bool = False, singular: bool = False
    ) -> Phrase:
        plural = not singular and self._chance(0.22)
        gender = "p" if plural else noun.gender
        adjectives = self._adjectives(noun.kind)
        plain = " ".join([*(word for _, word in adjectives), noun.english[plural]])
        subject, fixed = None, True
        draw = self._random()
        if negated:
            determiners, endings = _declined("kein", _EIN[gender]), _MIXED[gender]
            subject, english = f"no {plain}", f"any {plain}" if plural else _article(plain)
            fixed = False
        elif draw < 0.42:
            determiners, endings, english = _DER[gender], _WEAK[gender], f"the {plain}"
        elif draw < 0.62 and not definite:
            fixed = False
            if plural:
                determiners, endings, english = ("", "", ""), _STRONG, plain
            else:
                determiners, endings = _declined("ein", _EIN[gender]), _MIXED[gender]
                english = _article(plain)
        elif draw < 0.78:
            german, word = self._word(_POSSESSIVES)
            determiners, endings = _declined(german, _EIN[gender]), _MIXED[gender]
            english = f"{word} {plain}"
        elif draw < 0.9 or definite:
            determiners, endings = _declined("dies", _DIES[gender]), _WEAK[gender]
            english = f"{'these' if plural else 'this'} {plain}"
        elif plural:
            german, word = self._word(self._words.numbers)
            determiners, endings, english = (german,) * 3, _STRONG, f"{word} {plain}"
        else:
            determiners, endings = _declined("jed", _DIES[gender]), _WEAK[gender]
            english = f"every {plain}"
        return Phrase(
            german=_cases(
                " ".join([determiner, *(stem + ending for stem, _ in adjectives), form]).lstrip()
                for determiner, ending, form in zip(
                    determiners, endings, noun.german[plural], strict=True
                )
            ),
            english=(subject or english, english),
            form=WIR if plural else ER,
            gender=gender,
            natural=noun.natural,
            kind=noun.kind,
            negative=negated,
            fixed=fixed,
        )

    def _adjectives(self, kind: str) -> list[tuple[str, str]]:
        """Draw no, one or two adjectives: (German stem, English)."""
        drawn: list[tuple[str, str]] = []
        for probability in (0.38, 0.15):
            if not self._chance(probability):
                break
            stem, _, english = self._word(self._words.adjectives[kind])
            if (stem, english) not in drawn:
                drawn.append((stem, english))
        return drawn

    def _relative(self, head: Phrase) -> tuple[str, str]:
        """Draw a relative clause in which the head is the subject or an object."""
        german = _RELATIVE[head.gender]
        who, whom = ("who", "whom") if head.kind == "P" else ("that", "that")
        draw = self._random()
        accusatives = self._words.transitive_for[head.kind]
        datives = self._words.dative_for.get(head.kind)
        if draw < 0.4 and accusatives:
            verb, case = self._word(accusatives), ACC
        elif draw < 0.6 and datives:
            verb, case = self._word(datives), DAT
        else:
            pronoun = head._replace(german=german, english=(who, whom), is_pronoun=True)
            clause = self._clause(subject=pronoun, adjuncts=0.3)
            return _german_final(clause), _english(clause)
        subject = self._phrase(verb.subject, definite=True)
        clause = self._adjoin(Clause(subject, verb, self._tense()), 0.3)
        return f"{german[case]} {_german_final(clause)}", f"{whom} {_english(clause)}"

    # Clauses

    def _tense(self) -> Tense:
        draw = self._random()
        if draw < 0.42:
            return "present"
        if draw < 0.72:
            return "past"
        return "modal" if draw < 0.87 else "future"

    def _clause(
        self, subject: Phrase | None = None, tense: Tense | None = None, adjuncts: float = 1.0
    ) -> Clause:
        """Draw a clause.

        Args:
            subject: the subject, if it is given.
            tense: the tense, if it is given.
            adjuncts: factor on the probability of everything that could be left out.
        """
        tense = tense or self._tense()
        negated = self._chance(0.2 * adjuncts)
        draw = self._random()
        if draw < 0.14 or (subject is not None and subject.kind not in "PA"):
            return self._copula(subject, tense, negated, adjuncts)
        words = self._words
        if draw < 0.36:
            table = words.intransitive
        elif draw < 0.72:
            table = words.transitive
        else:
            table = words.dative if draw < 0.84 else words.ditransitive
        verb = self._word(table)
        while subject is not None and subject.kind not in verb.subject:
            verb = self._word(table)
        no_subject = negated and subject is None and self._chance(0.15)
        if subject is None:
            subject = self._phrase(verb.subject, negated=no_subject, definite=negated)
        kein = negated and not no_subject and self._chance(0.5)
        clause = Clause(subject, verb, tense, negated)
        if table is words.transitive:
            phrase = self._phrase(verb.object, negated=kein, definite=negated)
            clause = clause._replace(accusative=phrase)
        elif table is words.dative:
            phrase = self._phrase(verb.object, negated=kein, definite=negated)
            clause = clause._replace(dative=phrase)
        elif table is words.ditransitive:
            receiver = self._phrase("P", definite=negated, plain=True)
            kind = self._pick(verb.object)
            thing = self._phrase(kind, negated=kein, definite=negated)
            clause = clause._replace(dative=receiver, accusative=thing)
        return self._adjoin(clause, adjuncts)

    def _copula(
        self, subject: Phrase | None, tense: Tense, negated: bool, adjuncts: float
    ) -> Clause:
        if subject is None:
            subject = self._phrase("PATXF", definite=negated)
        if subject.kind == "P" and subject.form != WIR and self._chance(0.25):
            noun = self._word(self._words.nouns["P"])
            adjectives = self._adjectives("P")
            ein = "kein" if negated else "ein"
            german = [ein + _EIN[noun.gender][NOM]]
            german += [stem + _MIXED[noun.gender][NOM] for stem, _ in adjectives]
            english = _article(" ".join([*(word for _, word in adjectives), noun.english[0]]))
            predicate = " ".join([*german, noun.german[0][NOM]]), english
        else:
            _, german, english = self._word(self._words.adjectives[subject.kind])
            predicate = german, english
            if self._chance(0.3 * adjuncts):
                degree = self._word(lexicon.DEGREES)
                predicate = f"{degree[0]} {german}", f"{degree[1]} {english}"
        clause = Clause(subject, None, tense, negated, predicate=predicate)
        if tense == "modal":
            clause = clause._replace(modal=int(len(lexicon.MODALS) * self._random()))
        if self._chance(0.25 * adjuncts):
            clause = clause._replace(time=self._word(self._words.times[tense]))
        return clause

    def _adjoin(self, clause: Clause, adjuncts: float) -> Clause:
        """Add a modal verb and what could be left out."""
        modal = int(len(lexicon.MODALS) * self._random()) if clause.tense == "modal" else 0
        time = frequency = manner = company = place = None
        if self._chance(0.32 * adjuncts):
            time = self._word(self._words.times[clause.tense])
        elif not clause.negated and self._chance(0.14 * adjuncts):
            frequency = self._word(lexicon.FREQUENCIES)
        if self._chance(0.12 * adjuncts):
            manner = self._word(self._words.manners)
        if self._chance(0.1 * adjuncts):
            company = self._company()
        if self._chance(0.28 * adjuncts):
            place = self._place()
        return clause._replace(
            modal=modal,
            time=time,
            frequency=frequency,
            manner=manner,
            company=company,
            place=place,
        )

    def _company(self) -> tuple[str, str]:
        german, english, case = self._pick(_COMPANY)
        phrase = self._phrase("PA", plain=True, definite=True)
        return f"{german} {phrase.german[case]}", f"{english} {phrase.english[1]}"

    def _place(self) -> tuple[str, str]:
        noun = self._word(self._words.places)
        german, english = noun.prepositions
        if self._chance(0.25):
            german, english = self._pick(lexicon.NEARBY)
        phrase = self._noun_phrase(noun, definite=True)
        dative = phrase.german[DAT]
        if german in ("in", "an") and dative.startswith("dem "):
            german, dative = {"in": "im", "an": "am"}[german], dative.removeprefix("dem ")
        return f"{german} {dative}", f"{english} {phrase.english[1]}"

    # Sentences

    def pair(self) -> tuple[str, str]:
        """Draw a sentence in German and English, tokens separated by spaces."""
        self._relative_left = 1
        draw = self._random()
        if draw < 0.42:
            german, english = self._statement(self._clause())
        elif draw < 0.56:
            german, english = self._subordinate_last()
        elif draw < 0.67:
            german, english = self._subordinate_first()
        elif draw < 0.76:
            german, english = self._report()
        elif draw < 0.84:
            german, english = self._coordinated()
        elif draw < 0.88:
            german, english = self._purpose()
        else:
            return _finish(*self._question(), mark="?")
        return _finish(german, english, mark=".")

    def _statement(self, clause: Clause) -> tuple[str, str]:
        """Choose what stands first in German; only the time moves in English as well."""
        first = "subject"
        draw = self._random()
        shown = clause.accusative or clause.dative
        if draw < 0.26 and clause.time is not None:
            return _german_second(clause, "time"), _english(clause, time_first=True)
        if draw < 0.26 and clause.frequency in lexicon.FREQUENCIES[:2]:
            first = "frequency"
        elif draw < 0.42 and clause.place is not None:
            first = "place"
        elif 0.42 <= draw < 0.52 and shown is not None and _may_stand_first(clause):
            first = "object"
        return _german_second(clause, first), _english(clause)

    def _subordinate(self, main: Clause) -> tuple[str, str]:
        """Draw a subordinate clause that goes with `main`, with its conjunction."""
        tense: Tense = "past" if main.tense == "past" else "present"
        german, english = self._word(lexicon.SUBORDINATORS)
        if german == "wenn" and tense == "past":
            german = "als"
        if self._chance(0.05):
            clause = Clause(_IT, self._word(self._words.weather), tense)
        else:
            subject = _pronoun_of(main.subject) if self._chance(0.4) else None
            clause = self._clause(subject, tense, adjuncts=0.5)
        return f"{german} {_german_final(clause)}", f"{english} {_english(clause)}"

    def _subordinate_last(self) -> tuple[str, str]:
        main = self._clause(adjuncts=0.6)
        german, english = self._statement(main)
        subordinate = self._subordinate(main)
        return f"{german} , {subordinate[0]}", f"{english} {subordinate[1]}"

    def _subordinate_first(self) -> tuple[str, str]:
        main = self._clause(adjuncts=0.6)
        german, english = self._subordinate(main)
        return f"{german} , {_german_second(main, '')}", f"{english} , {_english(main)}"

    def _report(self) -> tuple[str, str]:
        verb = self._word(self._words.reporting)
        tense: Tense = "present" if self._chance(0.6) else "past"
        main = Clause(self._phrase("P", plain=True), verb, tense)
        clause = self._clause(_pronoun_of(main.subject) if self._chance(0.25) else None)
        german, english = _german_second(main, "subject"), _english(main)
        return f"{german} , dass {_german_final(clause)}", f"{english} that {_english(clause)}"

    def _coordinated(self) -> tuple[str, str]:
        one = self._clause(adjuncts=0.6)
        two = self._clause(_pronoun_of(one.subject) if self._chance(0.4) else None, adjuncts=0.6)
        conjunction = self._word(lexicon.COORDINATORS)
        left, right = self._statement(one), self._statement(two)
        return f"{left[0]} {conjunction[0]} {right[0]}", f"{left[1]} {conjunction[1]} {right[1]}"

    def _purpose(self) -> tuple[str, str]:
        """A main clause and what it is done for: um ... zu, in order to."""
        main = self._clause(self._phrase("P"), adjuncts=0.5)
        words = self._words
        verb = self._word(words.transitive if self._chance(0.7) else words.dative)
        purpose = Clause(main.subject, verb, "present")
        phrase = self._phrase(verb.object)
        if verb in words.dative:
            purpose = purpose._replace(dative=phrase)
        else:
            purpose = purpose._replace(accusative=phrase)
        german, english = self._statement(main)
        middle = " ".join(_german_middle(purpose, "subject"))
        return (
            f"{german} , um {middle} {verb.zu()}",
            f"{english} in order to {verb.english[0]} {phrase.english[1]}",
        )

    def _question(self) -> tuple[str, str]:
        draw = self._random()
        if draw < 0.45:
            clause = self._clause(adjuncts=0.8)
            finite, rest, _ = _german_verb(clause)
            german = " ".join([finite, *_german_middle(clause), *rest])
            return german, _english(clause, question=True)
        if draw < 0.72:
            asked = self._pick(list(_QUESTION_WORDS))
            clause = self._clause(adjuncts=0.7)._replace(frequency=None)
            if asked != "reason":
                clause = clause._replace(**{asked: None})
            german, english = _QUESTION_WORDS[asked]
            return (
                f"{german} {_german_second(clause, '')}",
                f"{english} {_english(clause, question=True)}",
            )
        if draw < 0.86:
            clause = self._clause(_WHO)
            return _german_second(clause, "subject"), _english(clause)
        return self._object_question()

    def _object_question(self) -> tuple[str, str]:
        clause = self._clause()
        while clause.accusative is None and clause.dative is None:
            clause = self._clause()
        if clause.accusative is None:
            clause, words = clause._replace(dative=None), ("wem", "whom")
        elif clause.accusative.kind in "PA":
            clause, words = clause._replace(accusative=None), ("wen", "whom")
        else:
            clause, words = clause._replace(accusative=None), ("was", "what")
        german, english = _german_second(clause, ""), _english(clause, question=True)
        return f"{words[0]} {german}", f"{words[1]} {english}"


def _may_stand_first(clause: Clause) -> bool:
    """Whether the accusative, or else the dative, can stand first without being a subject."""
    if clause.accusative is not None:
        return clause.accusative.fixed and clause.accusative.gender == "m"
    return clause.dative is not None and clause.dative.fixed


def _is_negative(clause: Clause) -> bool:
    """Whether a phrase (kein) already negates the clause."""
    phrases = clause.subject, clause.dative, clause.accusative
    kein = clause.predicate is not None and clause.predicate[0].startswith("kein")
    return kein or any(phrase is not None and phrase.negative for phrase in phrases)


def _german_verb(clause: Clause) -> tuple[str, list[str], str]:
    """Return the finite verb of a main clause, what ends that clause, and both as they end a
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


def _german_middle(clause: Clause, first: str = "", subject_leads: bool = False) -> list[str]:
    """Return what stands between the parts of the verb, without the constituent named `first`."""
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


def _german_second(clause: Clause, first: str) -> str:
    """Return a main clause: the constituent named `first` (none if empty), then the finite verb."""
    finite, rest, _ = _german_verb(clause)
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
    return " ".join([*lead, finite, *_german_middle(clause, first), *rest])


def _german_final(clause: Clause) -> str:
    """Return a subordinate clause without its conjunction."""
    return " ".join([*_german_middle(clause, subject_leads=True), _german_verb(clause)[2]])


def _english(clause: Clause, *, time_first: bool = False, question: bool = False) -> str:
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
    """Return the auxiliary (empty if there is none) and the rest of the verb."""
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


def _finish(german: str, english: str, mark: str) -> tuple[str, str]:
    """Close a sentence: one comma for two, none before the full stop, a capital first."""
    german = f"{german} {mark}".replace(" , ,", " ,").replace(f" , {mark}", f" {mark}")
    return german[0].upper() + german[1:], english[0].upper() + english[1:] + f" {mark}"


@cache
def splits(seed: int = SEED) -> dict[str, list[tuple[str, str]]]:
    """Return (German, English) pairs by split; no sentence of either language occurs twice."""
    grammar = Grammar(seed)
    seen: tuple[set[str], set[str]] = set(), set()
    pairs: list[tuple[str, str]] = []
    while len(pairs) < sum(SIZES.values()):
        german, english = grammar.pair()
        if german in seen[0] or english in seen[1]:
            continue
        if german.count(" ") + 1 in LENGTHS and english.count(" ") + 1 in LENGTHS:
            seen[0].add(german)
            seen[1].add(english)
            pairs.append((german, english))
    result = {}
    for split, size in SIZES.items():
        result[split], pairs = pairs[:size], pairs[size:]
    return result
