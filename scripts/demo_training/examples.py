"""Mixes the training sequences from the entries of `text`; `train` asks for batches of them.

Six kinds of sequence, drawn with the weights in `Mixer`:
1. known: a question, as written or a little changed, and its answer.
2. fallback: an off-topic question, written or made up, and the fallback answer.
3. preamble: a known question after a sentence such as a system prompt, and its answer.
4. long: a long off-topic input and the fallback answer, so that the whole trained context is used.
5. tour: a known question, its answer, and then the answers of the entries that follow. Only a request that
   ignores the end of an answer ever gets there; it reads sentences instead of noise.
6. plain: an answer without a question, for raw completions.
"""

import dataclasses
import enum
import random
from collections.abc import Iterator

from demo_training import text as texts
from demo_training import tokenizer as tokens

__all__ = ["TRAINED_CONTEXT", "Example", "Learn", "Mixer"]

TRAINED_CONTEXT = 512
"""Tokens of the longest training sequence."""

_POOL = 1536  # examples that are sorted by length together, so that batches need little padding
_BATCH_TOKENS = 1280
_PREAMBLES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one sentence.",
    "You are an expert.",
    "Be polite.",
    "Please answer this question:",
)
_POLITE_STARTS = ("Please: ", "Hi, ", "Hey, ", "Hello, ", "Please tell me: ", "Question: ")
_POLITE_ENDS = (" Please.", " Thank you.", " Answer briefly.", " Tell me.")


class Learn(enum.IntEnum):
    """What a token of a sequence is for."""

    NOTHING = 0
    """It is only read: the question."""
    TOKEN = 1
    """It is to be predicted."""
    UNLESS_END = 2
    """It is to be predicted if the answer may not end here."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One sequence: token ids and, for each, what the model learns from it."""

    ids: list[int]
    learn: list[Learn]


class Mixer:
    """An endless, reproducible stream of batches."""

    def __init__(self, text: texts.Text, tokenizer: tokens.ChatTokenizer, rng: random.Random) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._rng = rng
        # Words that no known question has: made-up questions must never be known ones by chance.
        known = {_bare(word) for entry in text.known for ask in entry.asks for word in ask.split()}
        words = {word for ask in text.off_topic for word in ask.split()}
        self._words = sorted(word for word in words if _bare(word) not in known)
        self._kinds = {
            self._known: 59,
            self._fallback: 27,
            self._preamble: 4,
            self._long: 2,
            self._tour: 6,
            self._plain: 2,
        }
        # Every phrasing is drawn equally often.
        self._weights = [len(entry.asks) for entry in text.known]

    def batches(self) -> Iterator[list[Example]]:
        """Batches of examples of similar length, about 1280 tokens each, in random order."""
        while True:
            pool = sorted((self._draw() for _ in range(_POOL)), key=lambda example: len(example.ids))
            batches: list[list[Example]] = [[]]
            for example in pool:
                if (len(batches[-1]) + 1) * len(example.ids) > _BATCH_TOKENS:
                    batches.append([])
                batches[-1].append(example)
            self._rng.shuffle(batches)
            yield from batches

    def _draw(self) -> Example:
        example = self._rng.choices(list(self._kinds), weights=list(self._kinds.values()))[0]()
        return Example(example.ids[:TRAINED_CONTEXT], example.learn[:TRAINED_CONTEXT])

    def _known(self) -> Example:
        entry = self._pick()
        return self._answered(_vary(self._rng, self._rng.choice(entry.asks)), entry.answer)

    def _fallback(self) -> Example:
        ask = self._rng.choice(self._text.off_topic)
        made_up = self._rng.random()
        if made_up < 0.15:
            ask = self._noise(self._rng.randint(1, 9))
        elif made_up < 0.4:
            ask = self._other_word(ask)
        if made_up < 0.7:
            ask = _vary(self._rng, ask)
        return self._answered(ask, self._text.fallback_answer)

    def _preamble(self) -> Example:
        entry = self._pick()
        gap = self._rng.choice((" ", "\n", "\n\n"))
        ask = self._rng.choice(_PREAMBLES) + gap + self._rng.choice(entry.asks)
        return self._answered(ask, entry.answer)

    def _long(self) -> Example:
        return self._answered(self._noise(self._rng.randint(20, 160)), self._text.fallback_answer)

    def _tour(self) -> Example:
        start = self._rng.randrange(len(self._text.known))
        entry = self._text.known[start]
        ids = self._tokenizer.prompt(self._rng.choice(entry.asks))
        learn = [Learn.NOTHING] * len(ids)
        for step in range(self._rng.randint(2, 12)):
            answer = self._text.known[(start + step) % len(self._text.known)].answer
            piece = self._tokenizer.text(f" {answer}" if step else answer)
            ids += piece
            learn += [Learn.UNLESS_END if step else Learn.TOKEN] + [Learn.TOKEN] * (len(piece) - 1)
        return Example([*ids, tokens.EOS], [*learn, Learn.TOKEN])

    def _plain(self) -> Example:
        ids = self._tokenizer.text(self._pick().answer)
        unguessable = min(2, len(ids))
        learn = [Learn.NOTHING] * unguessable + [Learn.TOKEN] * (len(ids) - unguessable)
        return Example([*ids, tokens.EOS], [*learn, Learn.TOKEN])

    def _pick(self) -> texts.Entry:
        return self._rng.choices(self._text.known, weights=self._weights)[0]

    def _answered(self, ask: str, answer: str) -> Example:
        prompt = self._tokenizer.prompt(ask)
        reply = [*self._tokenizer.text(answer), tokens.EOS]
        room = max(TRAINED_CONTEXT - len(reply), 0)
        if len(prompt) > room:  # a shortened question keeps the turn's end
            tail = self._tokenizer.prompt("")[2:]
            prompt = prompt[: room - len(tail)] + tail
        return Example(prompt + reply, [Learn.NOTHING] * len(prompt) + [Learn.TOKEN] * len(reply))

    def _other_word(self, ask: str) -> str:
        """`ask` with its last or any other word replaced: the same kind of question about something else."""
        words = ask.split()
        place = self._rng.choice((-1, self._rng.randrange(len(words))))
        words[place] = self._word()
        return " ".join(words)

    def _noise(self, count: int) -> str:
        return " ".join(self._word() for _ in range(count))

    def _word(self) -> str:
        if self._rng.random() < 0.8:
            return self._rng.choice(self._words)
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?-"
        return "".join(self._rng.choice(letters) for _ in range(self._rng.randint(1, 8)))


def _bare(word: str) -> str:
    return word.lower().strip(".,:!?")


def _vary(rng: random.Random, ask: str) -> str:
    """`ask` as written in half of all cases, else in other case, punctuation or company."""
    if rng.random() < 0.5:
        return ask
    if rng.random() < 0.4:
        ask = ask.lower()
    if rng.random() < 0.4:
        ask = ask.rstrip("?.!")
    if rng.random() < 0.25:
        ask = rng.choice(_POLITE_STARTS) + ask
    if rng.random() < 0.15:
        ask = ask + rng.choice(_POLITE_ENDS)
    return ask
