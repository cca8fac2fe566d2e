"""Caption one picture, offline, with the model inside the package.

python examples/caption_one.py [PICTURE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vlm import VLM, VLMError

PICTURES = Path(__file__).parent / "pictures"


def main() -> None:
    picture = sys.argv[1] if len(sys.argv) > 1 else min(PICTURES.glob("*.png"))
    with VLM() as model:
        try:
            output = model.caption(picture)
        except (VLMError, OSError) as error:
            sys.exit(f"error: {error}")
        print(output.text)
        print(f"{output.usage.prompt_tokens} prompt tokens, of which {output.usage.image_tokens} for the picture")


if __name__ == "__main__":
    main()
