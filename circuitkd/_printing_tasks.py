"""What tasks and their samples look like in a terminal."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd.tasks import Sentence, Task, TextPrompt

if TYPE_CHECKING:
    from circuitkd.prompts import PromptGroup, Prompts

_END = "END"
_LABEL_STYLES = ("bright_blue", "dark_orange", "green", "magenta", "bright_cyan", "yellow")


def tasks_view(tasks: Sequence[Task]) -> RenderableType:
    """One row a task: its name, what it asks, and its variants."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task", no_wrap=True)
    table.add_column("what it asks")
    table.add_column("variants")
    for task in tasks:
        table.add_row(
            Text(task.name, "bold"), Text(task.description), Text(", ".join(task.variants))
        )
    more = "circuitkd tasks show NAME prints samples; your own task file works in place of NAME."
    return Group(table, "", Text(more, "dim"))


def text_samples_view(task: Task, prompts: Sequence[TextPrompt]) -> RenderableType:
    """Sample prompts as text. A label stands in brackets after its word."""
    grid = _samples_grid()
    for number, prompt in enumerate(prompts, 1):
        answer = _answer(prompt.correct, prompt.incorrect, prompt.valid)
        clean = Text.assemble(_marked(task, prompt.clean), answer)
        grid.add_row(Text(str(number), "dim"), Text("clean", "dim"), clean)
        grid.add_row("", Text("corrupted", "dim"), _marked(task, prompt.corrupted))
    return Group(_heading(task, prompts[0].variant if prompts else None), "", grid)


def token_samples_view(
    task: Task, prompts: "Prompts", decode: Callable[[int], str]
) -> RenderableType:
    """Sample prompts as one model reads them, in sampling order, tokens divided by a space.

    ``decode`` gives the text of one token; spaces in it are shown as ``·``.
    """
    samples = [
        (int(place), group, row)
        for group in prompts.groups
        for row, place in enumerate(group.index.tolist())
    ]
    grid = _samples_grid()
    for place, group, row in sorted(samples, key=lambda sample: sample[0]):
        at = {int(where[row]): label for label, where in group.positions.items()}
        answer = _answer(
            _visible(decode(int(group.correct[row]))),
            _visible(decode(int(group.incorrect[row]))),
            _valid_endings(group, row, decode),
        )
        clean = _tokens(task, group.clean[row].tolist(), at, decode)
        corrupted = _tokens(task, group.corrupted[row].tolist(), at, decode)
        grid.add_row(Text(str(place + 1), "dim"), Text("clean", "dim"), clean + answer)
        grid.add_row("", Text("corrupted", "dim"), corrupted)
    bos = f"each prompt begins with {prompts.bos}" if prompts.bos else "no BOS token"
    return Group(_heading(task, prompts.variant), Text(bos, "dim"), "", grid)


def _samples_grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column()
    grid.add_column(overflow="fold")
    return grid


def _heading(task: Task, variant: str | None) -> Text:
    changed = f", variant {variant}: {task.variants[variant].description}" if variant else ""
    return Text.assemble((task.name, "bold"), f": {task.title}{changed}")


def _marked(task: Task, sentence: Sentence) -> Text:
    text, done = Text(), 0
    for label, (start, end) in sorted(sentence.spans.items(), key=lambda item: item[1]):
        text.append(sentence.text[done:start])
        text.append(sentence.text[start:end] + f"[{label}]", _style(task, label))
        done = end
    text.append(sentence.text[done:])
    text.append(f"[{_END}]", _style(task, _END))
    return text


def _tokens(
    task: Task, ids: Sequence[int], at: dict[int, str], decode: Callable[[int], str]
) -> Text:
    parts = [
        Text(_visible(decode(token)) + f"[{at[place]}]", _style(task, at[place]))
        if place in at
        else Text(_visible(decode(token)))
        for place, token in enumerate(ids)
    ]
    return Text(" ").join(parts)


def _valid_endings(group: "PromptGroup", row: int, decode: Callable[[int], str]) -> tuple[str, ...]:
    if group.candidates is None or group.valid is None:
        return ()
    return tuple(_visible(decode(token)) for token in group.candidates[group.valid[row]].tolist())


def _answer(correct: str, incorrect: str, valid: Sequence[str]) -> Text:
    right, wrong = correct.strip(), incorrect.strip()
    if len(valid) > 1:
        right = f"{valid[0].strip()} … {valid[-1].strip()} ({len(valid)} right endings)"
    return Text.assemble(("  → ", "dim"), (right, "bold green"), (f", not {wrong}", "dim"))


def _visible(token: str) -> str:
    return token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def _style(task: Task, label: str) -> str:
    return _LABEL_STYLES[task.labels.index(label) % len(_LABEL_STYLES)]
