"""Windows, labels and decoding, by hand and against loops written from run_squad.py's rules."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.scores.squad import (
    NULL,
    BestSpan,
    ContextWindow,
    best_span,
    context_windows,
    max_context_windows,
    window_label,
)


def bounds(windows: list[ContextWindow]) -> list[tuple[int, int]]:
    return [(window.start, window.length) for window in windows]


def test_windows_of_the_published_sizes_and_cut_questions() -> None:
    """384 - 14 - 3 = 367 tokens of context a window; starts 128 apart, so 239 overlap."""
    assert bounds(context_windows(14, 700)) == [(0, 367), (128, 367), (256, 367), (384, 316)]
    assert context_windows(14, 700)[0].offset == 16  # [CLS], 14 tokens, [SEP]
    assert context_windows(14, 700)[0].positions == 384
    assert context_windows(14, 700)[-1].positions == 16 + 316 + 1
    assert bounds(context_windows(14, 367)) == [(0, 367)]
    assert bounds(context_windows(14, 368)) == [(0, 367), (128, 240)]
    assert context_windows(90, 10) == context_windows(64, 10)
    assert context_windows(90, 10)[0].offset == 66
    assert context_windows(63, 10)[0].offset == 65


SIZES = st.tuples(st.integers(0, 8), st.integers(1, 60), st.integers(12, 30), st.integers(1, 20))


def naive_owner(windows: list[ContextWindow], token: int) -> int | None:
    best, owner = None, None
    for index, window in enumerate(windows):
        left, right = token - window.start, window.start + window.length - 1 - token
        if left < 0 or right < 0:
            continue
        score = min(left, right) + 0.01 * window.length
        if best is None or score > best:
            best, owner = score, index
    return owner


@given(SIZES)
def test_every_token_is_in_a_window_and_has_one_owner(sizes: tuple[int, int, int, int]) -> None:
    question, context, length, stride = sizes
    windows = context_windows(question, context, max_length=length, stride=stride)
    assert {t for w in windows for t in range(w.start, w.stop)} == set(range(context))
    assert windows[-1].stop == context
    assert all(w.positions <= length for w in windows)
    assert len({w.start for w in windows}) == len(windows)
    expected = [naive_owner(windows, token) for token in range(context)]
    assert max_context_windows(windows).tolist() == expected


def test_rounding_of_the_original_decides_equal_sums() -> None:
    """Long windows, so that min + .01 length of two are nearly equal."""
    for context in range(368, 640, 7):
        windows = context_windows(14, context)
        expected = [naive_owner(windows, token) for token in range(context)]
        assert max_context_windows(windows).tolist() == expected


def test_labels() -> None:
    window = ContextWindow(start=128, length=100, offset=16)
    assert window_label(window, (128, 130)) == (16, 18)
    assert window_label(window, (227, 227)) == (115, 115)
    assert window_label(window, (227, 228)) == NULL  # its end is outside
    assert window_label(window, (127, 130)) == NULL
    assert window_label(window, (0, 3)) == NULL
    assert window_label(window, None) == NULL
    assert window_label(context_windows(0, 5)[0], (0, 0)) == (2, 2)  # never (0, 0) itself


def logits_of(windows: list[ContextWindow], fill: float = -5.0) -> list[np.ndarray]:
    return [np.full(window.positions, fill) for window in windows]


def see_all(windows: list[ContextWindow]) -> np.ndarray:
    return np.ones(windows[-1].stop, dtype=bool)


def decode(start: dict, end: dict, tokens: int = 40, **more) -> BestSpan:
    """Decode one window whose first context token has position 5; {position: logit}."""
    windows = context_windows(3, tokens)
    starts, ends = logits_of(windows), logits_of(windows)
    for logits, peaks in ((starts[0], start), (ends[0], end)):
        for position, value in peaks.items():
            logits[position] = value
    return best_span(windows, starts, ends, see_all(windows), **more)


def test_thirty_tokens_are_the_most_and_only_the_top_is_combined() -> None:
    assert decode({5: 9.0}, {34: 9.0, 20: 1.0}).span == (0, 29)
    assert decode({5: 9.0}, {35: 9.0, 20: 1.0}).span == (0, 15)
    assert decode({5: 9.0}, {7: 9.0, 6: 1.0}, max_answer=2).span == (0, 1)
    # Twenty high starts behind twenty high ends: the start at position 6 is the 21st.
    start = dict.fromkeys(range(25, 45), 9.0) | {6: 8.0}
    end = dict.fromkeys(range(5, 25), 5.0)
    assert decode(start, end).span is None
    assert decode(start, end, n_best=21).span == (1, 1)
    # Without a valid span the original program stops with an error (bert issues 211, 417, 476).
    best = decode({1: 9.0}, {1: 9.0}, n_best=1)
    assert best == BestSpan(span=None, score=-math.inf, null_score=-10)
    assert best.difference == math.inf


def test_neither_padding_nor_float16_changes_an_answer_and_masked_positions_are_none() -> None:
    windows = context_windows(3, 6)
    logits = logits_of(windows)
    logits[0][8] = 1.0
    alone = best_span(windows, logits, logits, see_all(windows), n_best=2)
    padded = [np.concatenate([each, np.full(30, 7.0)]) for each in logits]
    assert best_span(windows, padded, padded, see_all(windows), n_best=2) == alone
    windows = context_windows(3, 4)
    logits = logits_of(windows, -math.inf)
    logits[0][0] = 2.0
    best = best_span(windows, logits, logits, see_all(windows))
    assert best.span is None
    assert best.null_score == 4
    # 2048 + 1 is 2048 in float16, so the end would be the first of equals.
    windows = context_windows(0, 3)
    starts = [np.array([0, 0, 2048, 0, 0, 0], dtype=np.float16)]
    ends = [np.array([0, 0, 0, 0, 1, 0], dtype=np.float16)]
    assert best_span(windows, starts, ends, see_all(windows)).span == (0, 2)


def naive_best(windows, starts, ends, visible, n_best, max_answer):
    """Lists and loops in the order of the published program."""
    found = []
    for index, window in enumerate(windows):
        ranked = [
            sorted(enumerate(logits[index].tolist()), key=lambda pair: pair[1], reverse=True)
            for logits in (starts, ends)
        ]
        for i, start in ranked[0][:n_best]:
            for j, end in ranked[1][:n_best]:
                first, last = i - window.offset + window.start, j - window.offset + window.start
                if i < window.offset or j < window.offset:
                    continue
                if i >= window.offset + window.length or j >= window.offset + window.length:
                    continue
                if naive_owner(windows, first) != index or j < i or j - i + 1 > max_answer:
                    continue
                if not any(visible[first : last + 1]):
                    continue
                found.append((start + end, (first, last)))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return found[0] if found else (-math.inf, None)


@given(SIZES, st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5))
def test_loops(sizes: tuple[int, int, int, int], seed: int, n_best: int, max_answer: int) -> None:
    question, context, length, stride = sizes
    windows = context_windows(question, context, max_length=length, stride=stride)
    draw = np.random.default_rng(seed)
    # Few different values, so that there are many equal sums.
    starts = [draw.integers(-3, 4, w.positions).astype(float) for w in windows]
    ends = [draw.integers(-3, 4, w.positions).astype(float) for w in windows]
    visible = draw.random(context) < 0.8
    ours = best_span(windows, starts, ends, visible, n_best=n_best, max_answer=max_answer)
    expected = naive_best(windows, starts, ends, visible.tolist(), n_best, max_answer)
    assert (ours.score, ours.span) == expected
    null = [float(start[0] + end[0]) for start, end in zip(starts, ends, strict=True)]
    assert ours.null_score == min(null)
    assert ours.difference == min(null) - ours.score
