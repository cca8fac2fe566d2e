"""Strings to print in pictures: words, numbers, random strings and single lines.

A string is held out (evaluation only) when a checksum of it says so, so training and evaluation never share one, on any
machine and with any seed.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

MAX_CHARS = 24
# Left out of random strings, where no context tells them apart in many faces: I l | and O 0 o.
LETTERS = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
UPPER = "ABCDEFGHJKLMNPQRSTUVWXYZ"
LOWER = "abcdefghijkmnpqrstuvwxyz"
DIGITS = "0123456789"
MARKS = "!?#$%&*+-=/@:.()"
# Same form in both cases: a string of these alone has no right answer.
CASELESS = set("cosvwxzCOSVWXZ")
WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def held_out(string: str) -> bool:
    """True for one string in sixteen; these are printed in evaluation pictures only."""
    return zlib.crc32(string.encode()) % 16 == 0


def word(rng: random.Random) -> str:
    """One word, lower, Capitalised or UPPER; one in eight is made up of random syllables."""
    if rng.random() < 0.125:
        made = "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
        text = made + rng.choice(["", "n", "r", "s", "t", "l"])
    else:
        text = rng.choice(WORDS)
    style = rng.random()
    return text if style < 0.5 else text.capitalize() if style < 0.8 else text.upper()


def random_string(rng: random.Random) -> str:
    """3 to 8 characters without meaning."""
    style = rng.random()
    if style < 0.35:
        alphabet = LETTERS + "23456789"
    elif style < 0.55:
        alphabet = UPPER + "23456789"
    elif style < 0.7:
        alphabet = LOWER
    elif style < 0.8:
        alphabet = UPPER
    else:
        alphabet = LETTERS + "23456789" + MARKS
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 8)))


def number(rng: random.Random) -> str:
    """Digits, with the signs that numbers carry: separators, currency, per cent, time, date."""

    def n(digits: int) -> str:
        return "".join(rng.choice(DIGITS) for _ in range(digits))

    form = rng.randrange(10)
    if form < 4:
        return str(rng.randint(1, 9)) + n(rng.randint(0, 5))
    if form == 4:
        return f"{rng.randint(0, 999)}.{n(rng.randint(1, 3))}"
    if form == 5:
        return f"{rng.randint(1, 99)},{n(3)}"
    if form == 6:
        return f"{rng.choice('$£€')}{rng.randint(1, 999)}.{n(2)}" if rng.random() < 0.8 else f"${rng.randint(1, 9999)}"
    if form == 7:
        return f"{rng.randint(0, 100)}%"
    if form == 8:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    return rng.choice([f"{n(2)}/{n(2)}/{n(2)}", f"{n(3)}-{n(4)}", f"20{n(2)}-{n(2)}-{n(2)}", f"-{n(2)}", f"+{n(2)}"])


def line(rng: random.Random) -> str:
    """A single line of 2 to 5 pieces, at most MAX_CHARS characters: words, numbers, marks, codes."""
    while True:
        limit = rng.randint(8, MAX_CHARS)
        case = rng.random()
        parts: list[str] = []
        while True:
            kind = rng.random()
            if kind < 0.72:
                piece = rng.choice(WORDS)
                piece = piece.upper() if case < 0.12 else piece.capitalize() if case < 0.35 or not parts else piece
            elif kind < 0.88:
                piece = number(rng)
            elif kind < 0.93:
                piece = random_string(rng)
            else:
                piece = rng.choice(["&", "-", "a", "I", "+", "at", "of", "the", "to", "=", "No.", "Dr.", "Mr.", "/"])
            if parts and rng.random() < 0.08:
                parts[-1] += rng.choice([",", ":", ";", "."])
            if len(" ".join([*parts, piece])) > limit:
                break
            parts.append(piece)
        text = " ".join(parts) + rng.choice(["", "", "", ".", "!", "?"])
        if rng.random() < 0.04:
            text = rng.choice(['"', "'"]) + text[: MAX_CHARS - 2] + '"'
            text = text[0] + text[1:-1] + text[0]
        if rng.random() < 0.04:
            text = f"{rng.choice(WORDS)}@{rng.choice(WORDS)}.{rng.choice(['com', 'org', 'net', 'de'])}"
        if rng.random() < 0.03:
            text = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}.{rng.choice(['py', 'txt', 'pdf', 'png'])}"
        if len(parts) > 1 and len(text) <= MAX_CHARS:
            return text


MAKERS = {"word": word, "random": random_string, "number": number, "line": line}


def readable(text: str) -> bool:
    """Whether the letters' case can be told from the picture (a string such as ``xos`` looks like ``XOS``)."""
    return any(c not in CASELESS for c in text if not c.isspace() and c not in ".,-:;'")


def draw_string(rng: random.Random, kind: str, evaluation: bool) -> str:
    """A string of ``kind`` ("word", "random", "number", "line") from the training or the evaluation side."""
    while True:
        text = MAKERS[kind](rng)
        if len(text) <= MAX_CHARS and held_out(text) == evaluation and readable(text):
            return text


def near_miss(rng: random.Random, text: str) -> str:
    """``text`` with one letter or digit changed."""
    spots = [i for i, c in enumerate(text) if c.isalnum()]
    i = rng.choice(spots)
    pool = DIGITS if text[i].isdigit() else UPPER if text[i].isupper() else LOWER
    other = rng.choice([c for c in pool if c.lower() != text[i].lower()])
    return text[:i] + other + text[i + 1 :]
