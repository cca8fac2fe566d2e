"""Faces and their sizes, with cached metrics."""

from __future__ import annotations

import functools
from io import BytesIO
from pathlib import Path

from PIL import ImageFont

USUAL = tuple(
    f"/usr/share/fonts/{folder}" for folder in ("truetype/dejavu", "truetype/liberation", "dejavu", "liberation")
)
BUILT_IN = ""  # path of the face that Pillow brings


class Font:
    """One face at one size in pixels."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        face = path or BytesIO(built_in())
        self.pil = ImageFont.truetype(face, size, layout_engine=ImageFont.Layout.BASIC)
        self.ascent, self.descent = self.pil.getmetrics()
        self._advance: dict[str, float] = {}

    def advance(self, char: str) -> float:
        """Width of a character, without kerning."""
        if char not in self._advance:
            self._advance[char] = self.pil.getlength(char)
        return self._advance[char]

    def length(self, string: str) -> float:
        """Width of a line in pixels."""
        return self.pil.getlength(string)

    def height(self) -> int:
        """Ascent and descent together."""
        return self.ascent + self.descent


class Face:
    """A font file."""

    def __init__(self, path: str) -> None:
        self.path, self.name = path, Path(path).stem

    def at(self, size: int) -> Font:
        return load_font(self.path, size)


@functools.cache
def built_in() -> bytes:
    """The font file inside Pillow."""
    default = ImageFont.load_default(16)
    assert isinstance(default, ImageFont.FreeTypeFont), "Pillow without FreeType"
    assert isinstance(default.path, BytesIO)
    return default.path.getvalue()


@functools.lru_cache(maxsize=4096)
def load_font(path: str, size: int) -> Font:
    return Font(path, size)


def find_faces(folders: list[str]) -> list[Face]:
    """Faces of the folders, by name; display and mathematics faces left out."""
    paths = [p for folder in folders for p in Path(folder).rglob("*.ttf")]
    skip = ("Math", "Display", "STIX", "cmb", "cme", "cmm", "cmr", "cms", "cmt")  # no full set of characters
    named = {p.stem: str(p) for p in paths if not any(s in p.stem for s in skip)}
    return [Face(named[name]) for name in sorted(named)]


def default_folders() -> list[str]:
    """Where Debian and others keep DejaVu and Liberation, the faces of the embedded model."""
    found = [str(p) for p in map(Path, USUAL) if p.is_dir()]
    if not found:
        raise FileNotFoundError(f"no fonts in {', '.join(USUAL)}: install DejaVu and Liberation or name their folders")
    return found


def plain_faces(faces: list[Face]) -> list[Face]:
    """Upright faces that are easy to read small (for charts)."""
    upright = [f for f in faces if not any(s in f.name for s in ("Italic", "Oblique", "Light", "Cond", "Narrow"))]
    return [f for f in upright if "Sans" in f.name] or upright or faces
