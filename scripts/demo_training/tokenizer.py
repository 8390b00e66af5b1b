"""The byte-level BPE tokenizer and the chat template; both demo models share them.

`examples` and `check` encode with it, `export` writes its vocabulary and merges into both file formats.
"""

import json
import typing
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "EOS",
    "PAD",
    "SPECIALS",
    "VOCABULARY",
    "ChatTokenizer",
    "merges_of",
    "train",
]

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Texts of tokens PAD, BOS and EOS."""
VOCABULARY = 1024

# Only the last user turn is shown to the model, which learned no other shape. System messages are read and
# left out: an engine that sees a template ignore them altogether would paste them into the user's turn.
CHAT_TEMPLATE = """\
{%- set turn = namespace(user='', assistant='') -%}
{%- for message in messages -%}
  {%- if message['content'] is string -%}
    {%- set text = message['content'] | trim -%}
  {%- else -%}
    {%- set parts = namespace(text='') -%}
    {%- for part in message['content'] or [] -%}
      {%- if part['type'] == 'text' -%}{%- set parts.text = parts.text + part['text'] -%}{%- endif -%}
    {%- endfor -%}
    {%- set text = parts.text | trim -%}
  {%- endif -%}
  {%- if message['role'] == 'user' -%}
    {%- set turn.user = text -%}
    {%- set turn.assistant = '' -%}
  {%- elif message['role'] == 'assistant' -%}
    {%- set turn.assistant = text -%}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>user\\n' + turn.user + '<|im_end|>\\n' -}}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- elif turn.assistant -%}
  {{- '<|im_start|>assistant\\n' + turn.assistant + '<|im_end|>\\n' -}}
{%- endif -%}
"""


class ChatTokenizer:
    """Encodes chat turns the way the engines do."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> list[int]:
        """Tokens of plain text, special tokens included where the text spells them out."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, ask: str) -> list[int]:
        """Tokens of one user turn up to where the answer starts: what CHAT_TEMPLATE renders."""
        return self.text(f"{SPECIALS[BOS]}user\n{ask.strip()}{SPECIALS[EOS]}\n{SPECIALS[BOS]}assistant\n")

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return str(self._tokenizer.to_str(pretty=True)) + "\n"

    @classmethod
    def from_json(cls, content: str) -> typing.Self:
        """Read what `to_json` wrote."""
        return cls(tokenizers.Tokenizer.from_str(content))


def train(texts: Iterable[str]) -> ChatTokenizer:
    """Learn VOCABULARY tokens from `texts`; the same texts in the same order give the same tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"too little text for {VOCABULARY} tokens: learned {tokenizer.get_vocab_size()}")
    return ChatTokenizer(tokenizer)


def merges_of(tokenizer_json: str) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges as `left right`, as GGUF wants them."""
    model = json.loads(tokenizer_json)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, merges
