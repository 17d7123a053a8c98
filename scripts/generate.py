"""Text from a model: of a run's step, adapters included, or of a Hugging Face or Meta folder.

    python scripts/generate.py outputs/checkpoint/step-100 "def main():" "import "
    python scripts/generate.py ~/Llama-3.2-1B-Instruct --chat --temperature 0.7 --top-p 0.9
    python scripts/generate.py outputs/hf/step-100 --chat --system "Be brief." "What is a list?" --max-new-tokens 200

Several prompts run as one batch, each drawing for itself. Without a prompt, lines are read from the terminal (or a
pipe): with --chat they are one conversation, else a prompt each. A single answer is written as it comes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for environments without the package installed

from tqdm import tqdm


def main(argv: Sequence[str]) -> None:
    options = own_options().parse_intermixed_args(argv)  # prompts may stand between options

    # Imported here: torch takes seconds, which --help need not wait for.
    import torch

    from torchtitan_lite.convert.formats import assets_of, format_of, open_weights
    from torchtitan_lite.generation.loading import load_model
    from torchtitan_lite.generation.sampling import Sampling
    from torchtitan_lite.generation.text import TextSide

    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens={options.max_new_tokens}: must be at least 1")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    assets = options.assets or assets_of(options.model, format_of(options.model))
    if assets is None:
        raise ValueError(f"{options.model}: no tokenizer beside the weights; --assets names the folder of one")
    side = TextSide.of(assets, options.chat_template)
    weights = open_weights(options.model, base=options.base)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    with tqdm(
        total=weights.args.parameters, unit=" parameters", unit_scale=True, disable=None, leave=False, desc="Loading"
    ) as bar:
        model = load_model(weights, device, getattr(torch, dtype), bar.update)
    talk = Talk(model, side, sampling, options.max_new_tokens, quiet=options.quiet)
    if options.chat:
        converse(talk, options.system, options.prompt)
    elif options.prompt:
        talk.go_on([side.prompt(text) for text in options.prompt], options.prompt)
    else:
        for line in lines("prompt> "):
            talk.go_on([side.prompt(line)], [line])


class Talk:
    """A model that answers on the terminal."""

    def __init__(self, model, side, sampling, max_new_tokens: int, *, quiet: bool) -> None:
        self.model, self.side, self.sampling, self.max_new_tokens = model, side, sampling, max_new_tokens
        self.quiet = quiet

    def go_on(self, prompts: list[list[int]], shown: list[str]) -> None:
        """What follows each prompt, as it comes where there is one, else one after the other."""
        if len(prompts) == 1:
            print(shown[0], end="", flush=True)
            self.answer(prompts[0], self.side.stop_ids, goes_on=True)
            return
        began = time.perf_counter()
        found = self._generated(prompts, self.side.stop_ids)
        for number, (text, prompt, ids) in enumerate(zip(shown, prompts, found, strict=True), 1):
            print(f"--- {number}\n{text}{self.side.continued(prompt, ids)}")
        self._report(sum(map(len, found)), began)

    def answer(self, prompt: list[int], stop_ids: frozenset[int], *, goes_on: bool = False) -> str:
        """One answer, written as it comes; ``goes_on``: it is of one text with the prompt. Returns its text."""
        from torchtitan_lite.generation.text import Streamed

        streamed, began = Streamed(self.side, prompt if goes_on else ()), time.perf_counter()
        (ids,) = self._generated([prompt], stop_ids, lambda row, token: print(streamed.add(token), end="", flush=True))
        print(streamed.rest())
        self._report(len(ids), began)
        return self.side.decode(ids)

    def _generated(self, prompts, stop_ids, on_token=lambda row, token: None) -> list[list[int]]:
        from torchtitan_lite.generation.generate import generate

        return generate(
            self.model,
            prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=stop_ids,
            on_token=on_token,
        )

    def _report(self, tokens: int, began: float) -> None:
        if not self.quiet:
            seconds = time.perf_counter() - began
            print(f"[{tokens} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s]", file=sys.stderr)


def converse(talk: Talk, system: str | None, asked: list[str]) -> None:
    """A conversation: the questions of the command line, or of the terminal until it ends."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    stop_ids = None
    for question in asked or lines("you> "):
        messages.append({"role": "user", "content": question})
        prompt = talk.side.chat(messages)
        stop_ids = talk.side.chat_stop_ids() if stop_ids is None else stop_ids
        if len(asked) > 1:
            print(f"you> {question}")
        messages.append({"role": "assistant", "content": talk.answer(prompt, stop_ids)})


def lines(invitation: str) -> Iterator[str]:
    """Lines of the terminal, or of what is piped in, until it ends."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print(invitation, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="step-N folder of a run, or a folder of Hugging Face or Meta")
    parser.add_argument("prompt", nargs="*", help="texts to go on with; with --chat what a user asks, in turn")
    parser.add_argument("--chat", action="store_true", help="a conversation, by the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="for each answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that make up P")
    parser.add_argument("--seed", type=int, default=0, help="of the draws: the same gives the same text")
    parser.add_argument("--assets", metavar="FOLDER", help="tokenizer and chat template (default: beside the weights)")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file instead of the folder's template")
    parser.add_argument("--base", metavar="FOLDER", help="weights that a step's adapters were trained beside")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--quiet", action="store_true", help="no line about speed")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:  # of weights, tokenizer, template or options
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
