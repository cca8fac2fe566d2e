"""Ask several questions about two pictures in one conversation each; they run as one batch.

python examples/ask_two_images.py [FIRST SECOND]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vlm import VLM

PICTURES = Path(__file__).parent / "pictures"
PAIR = (PICTURES / "pair_first.png", PICTURES / "pair_second.png")
QUESTIONS = (
    "Which picture has more circles?",
    "Describe this image.",
)


def main() -> None:
    if len(sys.argv) not in (1, 3):
        sys.exit(f"usage: {sys.argv[0]} [FIRST SECOND]")
    first, second = map(Path, sys.argv[1:]) if len(sys.argv) == 3 else PAIR
    both = [{"type": "image", "path": first}, {"type": "image", "path": second}]
    conversations = [
        [{"role": "user", "content": [*both, {"type": "text", "text": QUESTIONS[0]}]}],
        *(
            [{"role": "user", "content": [{"type": "image", "path": path}, {"type": "text", "text": question}]}]
            for path in (first, second)
            for question in QUESTIONS[1:]
        ),
    ]
    with VLM() as model:
        for conversation, output in zip(conversations, model.chat_many(conversations, on_error="raise"), strict=True):
            *images, question = conversation[0]["content"]
            names = " and ".join(Path(part["path"]).name for part in images)
            print(f"{names}: {question['text']} -> {output.text}")


if __name__ == "__main__":
    main()
