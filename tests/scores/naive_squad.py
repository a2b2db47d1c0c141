"""SQuAD's scores from what the published scripts do, step by step; shares nothing with ours."""

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def is_word(character: str) -> bool:
    """What `\\w` matches: letters, digits and the underscore, of all scripts."""
    return character.isalnum() or character == "_"


def words_of(text: str) -> list[str]:
    """Lower, delete punctuation, cut at the borders of words, drop articles, join, split."""
    kept = ""
    for character in text.lower():
        if character not in PUNCTUATION:
            kept += character
    runs: list[str] = []
    for character in kept:
        if runs and is_word(runs[-1][-1]) == is_word(character):
            runs[-1] += character
        else:
            runs.append(character)
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def exact(gold: str, prediction: str) -> int:
    return int(" ".join(words_of(gold)) == " ".join(words_of(prediction)))


def f1(gold: str, prediction: str, version: int) -> float:
    true, predicted = words_of(gold), words_of(prediction)
    if version == 2 and (len(true) == 0 or len(predicted) == 0):
        return int(true == predicted)
    left = list(true)
    same = 0
    for word in predicted:
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0
    precision, recall = same / len(predicted), same / len(true)
    return 2 * precision * recall / (precision + recall)


def raw_v2(golds: dict, predictions: dict) -> tuple[dict[str, int], dict[str, float]]:
    exact_scores, f1_scores = {}, {}
    for question, texts in golds.items():
        if question not in predictions:
            continue
        real = [text for text in texts if words_of(text)]
        if not real:
            real = [""]
        exact_scores[question] = max(exact(gold, predictions[question]) for gold in real)
        f1_scores[question] = max(f1(gold, predictions[question], 2) for gold in real)
    return exact_scores, f1_scores


def v1(golds: dict, predictions: dict) -> tuple[float, float]:
    exact_sum, f1_sum = 0.0, 0.0
    for question, texts in golds.items():
        if question in predictions:
            exact_sum += max(exact(gold, predictions[question]) for gold in texts)
            f1_sum += max(f1(gold, predictions[question], 1) for gold in texts)
    return 100 * exact_sum / len(golds), 100 * f1_sum / len(golds)


def best_threshold(
    golds: dict, predictions: dict, scores: dict, null_odds: dict
) -> tuple[float, float]:
    """The published scan over thresholds, its treatment of ties and its start at 0 included."""
    score = sum(1 for texts in golds.values() if not texts)
    best, threshold = float(score), 0.0
    for question in sorted(null_odds, key=lambda each: null_odds[each]):
        if question not in scores:
            continue
        if golds[question]:
            score += scores[question]
        elif predictions[question]:
            score -= 1
        if score > best:
            best, threshold = score, null_odds[question]
    return 100 * best / len(scores), threshold
