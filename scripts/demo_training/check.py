"""Judges written models by their answers; scripts/train_demo_models.py calls it after training.

The judgement rests on answers and margins, never on hashes: another processor may round differently.
The margin of an answer is the smallest lead, in logits and over all its tokens and its end, of the right
token over the best wrong one, given the right tokens so far. Where it is positive, greedy decoding gives
exactly this answer.
"""

import dataclasses
import pathlib
from collections.abc import Iterable

import numpy as np
import torch

from demo_training import export, model, text, tokenizer

__all__ = ["MIN_HELD_OUT_SHARE", "MIN_MARGIN", "Verdict", "check"]

MIN_MARGIN = 2.0
"""Smallest margin, in logits, for every question in demo/text."""
MIN_HELD_OUT_SHARE = 0.8
"""Share of the held-out off-topic questions that must get the fallback answer."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about one model."""

    questions: int
    smallest_margin: float
    worst_question: str
    identity_margin: float
    """Smallest margin of the answers that contain the model's name."""
    varied_share: float
    """Share of the questions still answered exactly in lower case without the final mark."""
    held_out_share: float
    """Share of the held-out off-topic questions that get the fallback answer."""
    same_weights: bool
    """Whether the GGUF and the safetensors file hold the same numbers."""

    @property
    def passed(self) -> bool:
        """Whether the model may be published."""
        return self.same_weights and self.smallest_margin >= MIN_MARGIN and self.held_out_share >= MIN_HELD_OUT_SHARE


def check(out: pathlib.Path, persona: text.Persona, data: text.Text) -> Verdict:
    """Read both forms of a model below `out` and measure every question of `data`."""
    weights, tokenizer_json = export.read_hf(out, persona)
    network = model.Llama(model.Shape())
    network.load_state_dict({name: torch.from_numpy(weight).float() for name, weight in weights.items()})
    judge = _Judge(network.eval(), tokenizer.ChatTokenizer.from_json(tokenizer_json))
    asked = list(_pairs((*data.known, *data.fallback)))
    margins = [judge.margin(ask, answer) for ask, answer in asked]
    worst = int(np.argmin(margins))
    varied = [judge.margin(ask.lower().rstrip("?.!") or ask, answer) > 0 for ask, answer in asked]
    held_out = [judge.margin(ask, answer) > 0 for ask, answer in _pairs(data.held_out)]
    return Verdict(
        questions=len(asked),
        smallest_margin=margins[worst],
        worst_question=asked[worst][0],
        identity_margin=min(m for m, (_, answer) in zip(margins, asked, strict=True) if persona.name in answer),
        varied_share=sum(varied) / len(varied),
        held_out_share=sum(held_out) / len(held_out),
        same_weights=_same(weights, export.read_gguf(out, persona)),
    )


class _Judge:
    def __init__(self, network: model.Llama, chat: tokenizer.ChatTokenizer) -> None:
        self._network = network
        self._chat = chat

    @torch.inference_mode()
    def margin(self, ask: str, answer: str) -> float:
        prompt = self._chat.prompt(ask)
        reply = torch.tensor([*self._chat.text(answer), tokenizer.EOS])
        ids = torch.cat((torch.tensor(prompt), reply[:-1]))
        logits = self._network(ids[None], torch.arange(len(ids))[None] >= len(prompt) - 1)
        right = logits.gather(1, reply[:, None]).squeeze(1)
        wrong = logits.scatter(1, reply[:, None], -torch.inf).amax(dim=1)
        return float((right - wrong).min())


def _pairs(entries: Iterable[text.Entry]) -> Iterable[tuple[str, str]]:
    return ((ask, entry.answer) for entry in entries for ask in entry.asks)


def _same(first: export.Weights, second: export.Weights) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
