"""Where a rendered chat holds what the assistant wrote. It is established, and never guessed.

A template with generation markers says it itself. Of any other, an answer is what follows the rendering of the messages
before it, generation prompt included; that is so only if the whole begins with that rendering, and with the one of the
messages up to the answer. Templates that write earlier answers down in another way than the last one do not pass.
A message whose ``weight`` is 0 is none that is to be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_lite.data.chat.template import BEGIN, END, ChatTemplate
from torchtitan_lite.data.sources.document import BadRecord

WHAT_WORKS = (
    "a template with {% generation %} and {% endgeneration %} around each answer and its end-of-turn token, or "
    "data.train_on=all"
)

_PROBE = "\ufdd2"  # no text of a record or a template


class Rendering(NamedTuple):
    """A chat as text, and the answers in it."""

    text: str
    answers: list[tuple[int, int]]  # first character, and the one behind the last


def render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
    """The chat as text."""
    return _unmarked(template.render(messages, tools)).text


def render_answers(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt_messages: int = 0
) -> Rendering:
    """The chat as text with the answers that come after its first ``prompt_messages`` messages and have no weight of 0.

    Raises:
        BadRecord: there is none, they cannot be established, or the template fails.
    """
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [number for number in numbers if number >= prompt_messages and messages[number].get("weight", 1)]
    if not wanted:
        part = "its completion has" if prompt_messages else "it has"
        roles = dict.fromkeys(message["role"] for message in messages[prompt_messages:])
        what = " whose weight is above 0" if "assistant" in roles else f", but only of {', '.join(roles)}"
        raise BadRecord(
            f"{part} no message of role assistant to train on{what}; data.train_on=all would train on all of it"
        )
    if template.marks_answers(tools):
        rendering = _unmarked(template.render(messages, tools))
        # If not all are wanted it must be plain which are which; else a template may leave some out.
        fewest = 1 if wanted == numbers else len(numbers)
        if not fewest <= len(rendering.answers) <= len(numbers):
            raise BadRecord(
                f"the generation markers of the chat template ({template.where}) enclose {len(rendering.answers)} "
                f"parts of it, but it has {len(numbers)} messages of role assistant"
            )
        if wanted == numbers:
            return rendering
        pairs = zip(numbers, rendering.answers, strict=True)
        return Rendering(rendering.text, [answer for number, answer in pairs if number in wanted])
    text = render(template, messages, tools)
    return Rendering(text, [_answer(template, messages, tools, text, number) for number in wanted])


def _answer(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], whole: str, number: int
) -> tuple[int, int]:
    """The place of message ``number`` in the rendering of all."""

    def alone(count: int, *, generation_prompt: bool = False) -> str:
        try:
            return template.render(messages[:count], tools, generation_prompt=generation_prompt)
        except BadRecord as bad:
            raise _not_established(
                template, number, f"the first {count} messages alone are not rendered: {bad}"
            ) from bad

    prompt, through = alone(number, generation_prompt=True), alone(number + 1)
    for rendering, what in ((prompt, f"the {number} messages before it"), (through, "the messages up to it")):
        if not whole.startswith(rendering):
            raise _not_established(
                template, number, f"{what} are rendered in another way alone than as the beginning of the whole chat"
            )
    if len(through) <= len(prompt):
        raise _not_established(template, number, "it adds nothing to the generation prompt")
    if prompt == alone(number):
        other = template.render([*messages[:number], {"role": "assistant", "content": _PROBE}], tools)
        if not other.startswith(prompt) or not other[len(prompt) :].lstrip().startswith(_PROBE):
            raise _not_established(
                template,
                number,
                "the template adds no generation prompt, so that the header before the answer would be trained on",
            )
    return len(prompt), len(through)


def _not_established(template: ChatTemplate, number: int, reason: str) -> BadRecord:
    return BadRecord(
        f"messages[{number}]: where this answer begins and ends in the rendered chat cannot be established: {reason} "
        f"({template.where}). What works: {WHAT_WORKS}"
    )


def _unmarked(rendered: str) -> Rendering:
    """Takes the marks out of a rendering, and remembers their places."""
    parts, answers, length = [], [], 0
    for number, part in enumerate(rendered.split(BEGIN)):
        inside, closed, outside = part.partition(END) if number else ("", "", part)
        if (number and not closed) or END in outside:
            raise BadRecord("the chat template puts generation markers into each other, or cuts them off")
        if inside:
            answers.append((length, length + len(inside)))
        parts += [inside, outside]
        length += len(inside) + len(outside)
    return Rendering("".join(parts), answers)
