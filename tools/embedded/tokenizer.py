"""The tokenizer: byte-level BPE without merges, whose whole words are the grammar's.

With ``ignore_merges`` a pre-token that stands in the vocabulary is one token; any other text is one token a byte. So
printed text is spelled a character at a time, and every string, in any script, has ids.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .grammar import Spelled, Turn, corpus

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<end_of_utterance>"
IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIALS = [PAD, START, END, IMAGE, FAKE, GLOBAL]
IMAGE_TOKENS = 64
IMAGE_BLOCK = FAKE + GLOBAL + IMAGE * IMAGE_TOKENS + FAKE


def build_tokenizer() -> Tokenizer:
    """Specials first (ids 0 to 5), then the 256 byte characters, then the grammar's words in order of the alphabet."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = {w for text in corpus() for w, _ in split.pre_tokenize_str(text)}
    words = {w for w in words if len(w) > 1 and not any(c.isdigit() for c in w) and w not in ("Ġx",)}
    vocab = {t: i for i, t in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tokenizer


class Codec:
    """Conversations to token ids and labels, with a cache for grammar text."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer()
        self.pad, self.start, self.end, self.image, self.fake, self.globe = range(6)
        self.size = self.tokenizer.get_vocab_size()
        self._cache: dict[str, list[int]] = {}
        vocab = self.tokenizer.get_vocab()
        self._byte = {b: vocab[c] for b, c in byte_characters().items()}
        self.block = [self.fake, self.globe, *[self.image] * IMAGE_TOKENS, self.fake]

    def grammar(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text).ids
            if len(self._cache) < 200_000:
                self._cache[text] = ids
        return ids

    def spell(self, text: str) -> list[int]:
        return [self._byte[b] for b in text.encode()]

    def answer(self, pieces: list[str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self.spell(piece) if isinstance(piece, Spelled) else self.grammar(piece)
        return ids

    def conversation(
        self, turns: list[Turn], images: int, system: str = "", text_first: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and, for each, whether the model has to say it (answers and their end)."""
        ids, said = [self.start], [False]

        def add(new: list[int], say: bool = False) -> None:
            ids.extend(new)
            said.extend([say] * len(new))

        if system:
            add([*self.grammar("System:" + system), self.end, *self.grammar("\n")])
        for i, turn in enumerate(turns):
            question = (
                self.tokenizer.encode(turn.question_text).ids
                if len(turn.question) > 1
                else (self.grammar(turn.question_text))
            )
            blocks = self.block * images if i == 0 else []
            if i == 0:
                add(self.grammar("User:"))
                add([*question, *blocks] if text_first else [*blocks, *question])
            else:
                add(self.grammar("User:" + turn.question_text))
            add([self.end, *self.grammar("\nAssistant:")])
            add([*self.answer(turn.answer), self.end], say=True)
            add(self.grammar("\n"))
        return ids[:-1], said[:-1]

    def prompt(self, question: str, images: int) -> list[int]:
        """Ids up to where the answer begins."""
        ids = [self.start, *self.grammar("User:"), *self.block * images, *self.tokenizer.encode(question).ids]
        return [*ids, self.end, *self.grammar("\nAssistant:")]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies: itself if printable, else from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain}
    table.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)})
    return table
