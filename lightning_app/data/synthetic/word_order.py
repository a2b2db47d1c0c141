"""The order of words in a German and in an English clause.

German order: first place, finite verb, pronouns, subject, dative, time, frequency, accusative,
nicht, manner, company, place, rest of the verb. English order: time if it is first in German,
subject, verb, objects, manner, company, place, time.
"""

from lightning_app.data.synthetic import lexicon
from lightning_app.data.synthetic.morphology import ACC, DAT, ER, NOM, WIR, Clause

_SEIN = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}
_HABEN = ("habe", "hat", "haben")
_WERDEN = ("werde", "wird", "werden")
_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}


def may_stand_first(clause: Clause) -> bool:
    """Whether the accusative, or else the dative, can come first without being a subject."""
    if clause.accusative is not None:
        return clause.accusative.fixed and clause.accusative.gender == "m"
    return clause.dative is not None and clause.dative.fixed


def _is_negative(clause: Clause) -> bool:
    """Whether a phrase (kein) already negates the clause."""
    phrases = clause.subject, clause.dative, clause.accusative
    kein = clause.predicate is not None and clause.predicate[0].startswith("kein")
    return kein or any(phrase is not None and phrase.negative for phrase in phrases)


def german_verb(clause: Clause) -> tuple[str, list[str], str]:
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
