"""Scores the embedded model on held-out pictures, through `vlm.VLM`.

    python tools/eval_embedded.py --questions 2000 --fonts FOLDER...

The questions are those of the model card for the same faces and number: their seeds, layouts and strings are in no
training picture. Prints a table; the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from embedded import heldout
from embedded.fonts import Face, default_folders, find_faces

from vlm import VLM, SamplingParams

LIMIT = 64  # tokens; the longest right answer has fewer


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--questions", type=int, default=2000, help="a task")
    p.add_argument("--tasks", nargs="+", choices=heldout.TASKS, default=heldout.TASKS, metavar="TASK")
    p.add_argument("--model", type=Path, default=None, help="folder; the embedded model if not given")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--fonts", nargs="+", default=None, help="folders of .ttf files")
    p.add_argument("--show", type=int, default=0, help="wrong answers to print a task")
    return p.parse_args()


def conversation(item: heldout.Item) -> list[dict[str, Any]]:
    """The question after its pictures."""
    pictures = [{"type": "image", "image": image} for image in item.images()]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": item.question}]}]


def answers(vlm: VLM, items: list[heldout.Item]) -> list[str]:
    """Greedy answers; pictures are drawn as they are asked for."""
    conversations: Iterator[list[dict[str, Any]]] = (conversation(item) for item in items)
    params = SamplingParams(temperature=0, max_tokens=LIMIT)
    return [output.text for output in vlm.chat_many(conversations, params, on_error="raise")]


def by_size(items: list[heldout.Item], right: list[bool]) -> str:
    """Exact answers of each font size, in per cent."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for item, ok in zip(items, right, strict=True):
        groups[item.tags["size"]].append(ok)
    order = sorted(groups, key=lambda size: int(size.split()[0]))
    return ", ".join(f"{size}: {100 * sum(groups[size]) / len(groups[size]):.1f}" for size in order)


def score(vlm: VLM, task: str, n: int, faces: list[Face], show: int) -> bool:
    """Prints a task's row, and ``show`` of its wrong answers; whether its target (if it has one) is met."""
    items = list(heldout.items(task, n, faces))
    given = answers(vlm, items)
    right = [answer == item.answer for answer, item in zip(given, items, strict=True)]
    exact, target = 100 * sum(right) / n, heldout.TARGETS.get(task)
    met = target is None or exact >= target
    sizes = by_size(items, right) if task in heldout.READING else ""
    print(f"{task:14} {exact:6.2f} {target or '-':>7} {'' if met else 'missed':7} {sizes}".rstrip(), flush=True)
    wrong = [(item, answer) for item, answer, ok in zip(items, given, right, strict=True) if not ok]
    for item, answer in wrong[:show]:
        print(f"    {item.question!r}: {answer!r}, right is {item.answer!r}")
    return met


def main() -> int:
    args = parse()
    faces = find_faces(args.fonts or default_folders())
    if not faces:
        print("no faces found: name folders of .ttf files with --fonts", file=sys.stderr)
        return 2
    begin = time.time()
    with VLM(args.model, device=args.device, dtype=args.dtype) as vlm:
        print(f"{args.questions} questions a task, {len(faces)} faces")
        print("task           exact %  target         by font size")
        met = [score(vlm, task, args.questions, faces, args.show) for task in args.tasks]
    print(f"{time.time() - begin:.0f} s; {'all targets met' if all(met) else 'a target is missed'}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
