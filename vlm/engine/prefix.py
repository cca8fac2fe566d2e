"""What a block of the KV cache holds, as a hash: two blocks with one hash are interchangeable.

Keys and values of a token depend on all that stands before it, so each block's hash covers that of the block before.
It covers the token ids, the positions (which for some models depend on the pictures' sizes), and for image tokens
which rows of which picture they are. A picture is known by a key that whoever made the request computed from its
pixels and from how they were preprocessed; after a picture without a key nothing is shared.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence as SequenceOf

from vlm.engine.request import Sequence


def block_hashes(sequence: Sequence, block_size: int, count: int) -> SequenceOf[bytes]:
    """Hashes of the first `count` blocks, which must be full; fewer where a picture has no key.

    What was computed is kept in the sequence: its tokens are only ever added to.
    """
    known = sequence.block_hashes
    while len(known) < count:
        start = len(known) * block_size
        key = _hash(sequence, start, start + block_size, known[-1] if known else b"")
        if key is None:
            break
        known.append(key)
    return known[:count]


def _hash(sequence: Sequence, start: int, stop: int, parent: bytes) -> bytes | None:
    assert stop <= sequence.num_tokens, "only full blocks have a hash"
    digest = hashlib.sha256(parent)
    digest.update(array("q", sequence.tokens(start, stop)).tobytes())
    digest.update(sequence.positions(start, stop).numpy().tobytes())
    for piece in sequence.image_rows.pieces(start, stop):
        if (key := sequence.request.key_of(piece.image)) is None:
            return None
        digest.update(struct.pack("<QQ", piece.first, len(key)) + key)
    return digest.digest()
