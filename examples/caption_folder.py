"""Caption every picture of a folder into JSON lines on stdout; one that cannot be read is reported and passed over.

python examples/caption_folder.py [FOLDER] > captions.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vlm import VLM

PICTURES = Path(__file__).parent / "pictures"
ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    with VLM() as model:
        # Any iterable will do; it is read a bounded number of pictures ahead, so a folder may hold millions.
        for output in model.caption_many(paths):
            path = paths[output.index]
            if output.error is not None:
                print(f"not captioned: {output.error}", file=sys.stderr)
                continue
            print(json.dumps({"path": str(path), "caption": output.text}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
