"""Trains the two demo models, Robin and Wren, from demo/text, and checks them. See demo/models/README.md."""

import argparse
import pathlib
import sys
import typing

if typing.TYPE_CHECKING:
    from demo_training import check, text, tokenizer

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
REQUIREMENTS = "torch==2.13.0 numpy tokenizers safetensors gguf"

EXAMPLES = f"""\
what it needs, in a virtual environment of its own:
  pip install torch==2.13.0        (first, and exactly this version)
  pip install {REQUIREMENTS.partition(" ")[2]}

examples:
  python scripts/train_demo_models.py                  train both models, a few minutes each on two cores
  python scripts/train_demo_models.py --model robin    train only one
  python scripts/train_demo_models.py --check          check the models that are there, without training
  python scripts/train_demo_models.py --steps 100 --out build/quick
                                                       a quick try elsewhere; its answers will fail the check

The exit status is 0 if every model passes the check: all answers right with a margin, and the same numbers in
the GGUF and the safetensors file. Files may differ from one kind of processor to another; answers may not.
"""


def main(arguments: list[str] | None = None) -> int:
    """Train and check, or only check; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except ModuleNotFoundError as error:
        print(f"{error}. Needed here: pip install {REQUIREMENTS}", file=sys.stderr)
    except FileNotFoundError as error:
        print(f"{error}. Train first, or name another folder with --out or --text.", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    # Imported late, so that --help and the message about missing packages need no torch.
    import torch
    from demo_training import check, text

    torch.set_num_threads(options.threads)
    passed = True
    for persona in text.PERSONAS:
        if options.model not in ("both", persona.model_id):
            continue
        if not options.check:
            _train(options, persona)
        print(f"{persona.model_id}: checking every answer", flush=True)
        verdict = check.check(options.out, persona, text.load(options.text, persona))
        _print_verdict(persona, verdict)
        passed = passed and verdict.passed
    return 0 if passed else 1


def _train(options: argparse.Namespace, persona: "text.Persona") -> None:
    from demo_training import export, text, train

    chat = _tokenizer(options.text)
    reporter = _Reporter(persona.model_id, options.steps)
    data = text.load(options.text, persona)
    weights = train.fit(data, chat, seed=persona.seed, steps=options.steps, progress=reporter)
    export.write(options.out, persona, {name: w.numpy() for name, w in weights.items()}, chat.to_json())
    print(f"{persona.model_id}: written to {export.gguf_path(options.out, persona)}", flush=True)


def _tokenizer(folder: pathlib.Path) -> "tokenizer.ChatTokenizer":
    """One tokenizer for all models, learned from the texts of all of them."""
    from demo_training import text, tokenizer

    loaded = [text.load(folder, persona) for persona in text.PERSONAS]
    entries = [entry for data in loaded for entry in (*data.known, *data.fallback)]
    return tokenizer.train([line for entry in entries for line in (*entry.asks, entry.answer)])


class _Reporter:
    """Prints a line every hundredth step with the mean loss and the time left."""

    _EVERY = 100

    def __init__(self, model_id: str, steps: int) -> None:
        self._model_id = model_id
        self._steps = steps
        self._losses: list[float] = []

    def __call__(self, step: int, loss: float, elapsed_s: float) -> None:
        self._losses.append(loss)
        if step % self._EVERY and step != self._steps:
            return
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        left_s = elapsed_s / step * (self._steps - step)
        done = round(20 * step / self._steps)
        bar = "#" * done + "." * (20 - done)
        where, when = f"step {step}/{self._steps}", f"{elapsed_s:.0f} s, {left_s:.0f} s left"
        print(f"{self._model_id}: [{bar}] {where}  loss {mean:.4f}  {when}", flush=True)


def _print_verdict(persona: "text.Persona", verdict: "check.Verdict") -> None:
    print(
        f"{persona.model_id}: {'passed' if verdict.passed else 'FAILED'}\n"
        f"  questions                      {verdict.questions}\n"
        f"  smallest margin                {verdict.smallest_margin:.2f} logits\n"
        f"    at the question              {verdict.worst_question}\n"
        f"  smallest margin with its name  {verdict.identity_margin:.2f} logits\n"
        f"  exact in lower case, unmarked  {verdict.varied_share:.1%}\n"
        f"  held-out off-topic questions   {verdict.held_out_share:.0%} get the fallback answer\n"
        f"  GGUF equals safetensors        {'yes' if verdict.same_weights else 'NO'}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=REPOSITORY / "demo" / "models",
        metavar="FOLDER",
        help="where the models are written or, with --check, read (default: demo/models)",
    )
    parser.add_argument(
        "--text",
        type=pathlib.Path,
        default=REPOSITORY / "demo" / "text",
        metavar="FOLDER",
        help="where the questions and answers are (default: demo/text)",
    )
    parser.add_argument("--model", choices=("both", "robin", "wren"), default="both", help="default: both")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="training steps (default: 2000)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="processor threads (default: 2)")
    parser.add_argument("--check", action="store_true", help="only check the models in --out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
