"""Fits the network to the batches of `examples`; `export` takes the result.

scripts/train_demo_models.py calls it.
"""

import math
import random
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from demo_training import examples, model, text, tokenizer

__all__ = ["Progress", "fit"]

Progress = Callable[[int, float, float], None]
"""Called with the step just done, its loss and the seconds since the start."""

_PEAK_RATE = 2e-3
_FINAL_RATE = 2e-5
_WARM_UP_STEPS = 50
_WEIGHT_DECAY = 0.05


def fit(
    data: text.Text, chat: tokenizer.ChatTokenizer, *, seed: int, steps: int, progress: Progress
) -> dict[str, Tensor]:
    """Train for `steps` batches and return the weights by name, rounded to f16.

    Runs on the CPU, where the same seed, text and torch give the same numbers on the same kind of processor.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    network = model.Llama(model.Shape())
    optimizer = torch.optim.AdamW(network.parameters(), lr=_PEAK_RATE, weight_decay=_WEIGHT_DECAY, betas=(0.9, 0.98))
    batches = examples.Mixer(data, chat, random.Random(seed)).batches()
    started = time.monotonic()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        loss = _step(network, optimizer, batches)
        progress(step, loss, time.monotonic() - started)
    return {name: weight.detach().to(torch.float16) for name, weight in network.state_dict().items()}


def _step(network: model.Llama, optimizer: torch.optim.Optimizer, batches: Iterator[list[examples.Example]]) -> float:
    ids, learn = _tensors(next(batches))
    wanted = learn[:, 1:] != examples.Learn.NOTHING
    targets, kinds = ids[:, 1:][wanted], learn[:, 1:][wanted]
    no_end = torch.zeros(len(kinds), tokenizer.VOCABULARY)
    no_end[kinds == examples.Learn.UNLESS_END, tokenizer.EOS] = -torch.inf
    loss = functional.cross_entropy(network(ids[:, :-1], wanted) + no_end, targets)
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _tensors(batch: list[examples.Example]) -> tuple[Tensor, Tensor]:
    """Token ids and what to learn from each, padded on the right; both (batch, length)."""
    length = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), length), tokenizer.PAD)
    learn = torch.full((len(batch), length), int(examples.Learn.NOTHING))
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        learn[row, : len(example.ids)] = torch.tensor(example.learn)
    return ids, learn


def _rate(step: int, steps: int) -> float:
    if step <= _WARM_UP_STEPS:
        return _PEAK_RATE * step / _WARM_UP_STEPS
    done = (step - _WARM_UP_STEPS) / max(steps - _WARM_UP_STEPS, 1)
    return _FINAL_RATE + (_PEAK_RATE - _FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2
