"""Where a rendered chat holds what the assistant wrote. It is established, and never guessed.

A template with generation markers says it itself. Of any other, an answer is what follows the rendering of the messages
before it, generation prompt included; that is so only if the whole begins with that rendering, and with the one of the
messages up to the answer. Templates that write earlier answers down in another way than the last one do not pass.
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
    """The chat as text with the answers that come after its first ``prompt_messages`` messages.

    Raises:
        BadRecord: there is none, they cannot be established, or the template fails.
    """
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [number for number in numbers if number >= prompt_messages]
    if not wanted:
        part = "its completion has" if prompt_messages else "it has"
        raise BadRecord(f"{part} no message of role assistant to train on; data.train_on=all would train on all of it")
    if template.marks_answers(tools):
        rendering = _unmarked(template.render(messages, tools))
        # Of a prompt's and a completion's answers it must be plain which are which; else a template may leave some out.
        fewest = len(numbers) if prompt_messages else 1
        if not fewest <= len(rendering.answers) <= len(numbers):
            raise BadRecord(
                f"the generation markers of the chat template ({template.where}) enclose {len(rendering.answers)} "
                f"parts of it, but it has {len(numbers)} messages of role assistant"
            )
        return Rendering(rendering.text, rendering.answers[-len(wanted) :])
    text = render(template, messages, tools)
    return Rendering(text, [_answer(template, messages, tools, text, number) for number in wanted])


def _answer(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], whole: str, number: int
) -> tuple[int, int]:
    """The place of message ``number`` in the rendering of all."""
    prompt = template.render(messages[:number], tools, generation_prompt=True)
    through = template.render(messages[: number + 1], tools)
    for rendering, what in ((prompt, f"the {number} messages before it"), (through, "the messages up to it")):
        if not whole.startswith(rendering):
            raise _not_established(
                template, number, f"{what} are rendered in another way alone than as the beginning of the whole chat"
            )
    if len(through) <= len(prompt):
        raise _not_established(template, number, "it adds nothing to the generation prompt")
    if prompt == template.render(messages[:number], tools):
        content = messages[number].get("content", "").strip()
        if not content or not whole[len(prompt) :].lstrip().startswith(content):
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
        if number and not closed:
            raise BadRecord("the chat template puts generation markers into each other")
        if inside:
            answers.append((length, length + len(inside)))
        parts += [inside, outside]
        length += len(inside) + len(outside)
    return Rendering("".join(parts), answers)
