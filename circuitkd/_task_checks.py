"""Checks across the fields of a task file: every fault has its field and says what is allowed."""

from collections.abc import Mapping

from circuitkd._task_schema import (
    END,
    PLACEHOLDER,
    LocatedError,
    Location,
    Slot,
    TaskSpec,
    Template,
    Variant,
    pieces,
    resolve,
    say,
    slots_in,
)


def check_task(spec: TaskSpec) -> None:
    """Raise ``LocatedError`` for the first fault of ``spec``, its variants included."""
    _check_positions(spec)
    _check_slots(spec)
    for index, template in enumerate(spec.templates):
        _check_template(spec, template, ("templates", index))
    _check_corruption(spec)
    for name, variant in spec.variants.items():
        _check_variant(spec, variant, ("variants", name))


def _check_positions(spec: TaskSpec) -> None:
    for index, label in enumerate(spec.positions):
        if label == END or label in spec.positions[:index]:
            raise LocatedError(
                ("positions", index),
                f"{label!r} is taken; allowed: each label once, without END, which every task has",
            )


def _check_slots(spec: TaskSpec) -> None:
    for name, slot in spec.slots.items():
        _one_of(slot.source, spec.word_lists, ("slots", name, "from"), "a word list")
        for field, other in (("after", slot.after), ("upto", slot.upto)):
            if other is None:
                continue
            plain = [each for each, its in spec.slots.items() if its.reference is None]
            _one_of(other, plain, ("slots", name, field), "a slot drawn on its own")
            missing = set(spec.word_lists[spec.slots[other].source].words) - set(
                spec.word_lists[slot.source].words
            )
            if missing:
                raise LocatedError(
                    ("slots", name, field),
                    f"{sorted(missing)[0]!r}, a word of {other}, is not in {slot.source}; allowed: "
                    f"a slot all of whose words are in {slot.source}",
                )


def _one_of(value: str, allowed: Mapping[str, object] | list[str], at: Location, kind: str) -> None:
    if value not in allowed:
        raise LocatedError(at, f"{value!r} is not {kind}; allowed: {say(allowed)}")


def _check_template(spec: TaskSpec, template: Template, at: Location) -> None:
    _check_braces(template.text, (*at, "text"))
    for slot in slots_in(template.text):
        _one_of(slot, spec.slots, (*at, "text"), "a slot")
    if template.text != template.text.rstrip():
        raise LocatedError(
            (*at, "text"),
            "the template ends with a space; allowed: text up to the answer, whose own space "
            "belongs to the field answer",
        )
    _check_labels(spec, template, (*at, "text"))
    _check_answers(spec, template, at)
    for label, source in (template.redraw or {}).items():
        _one_of(label, list(spec.positions), (*at, "redraw", label), "a position")
        _one_of(source, spec.word_lists, (*at, "redraw", label), "a word list")


def _check_braces(text: str, at: Location) -> None:
    if any(brace in PLACEHOLDER.sub("", text) for brace in "{}"):
        raise LocatedError(at, "a brace stands alone; allowed: {slot} or {slot:label}")


def _check_labels(spec: TaskSpec, template: Template, at: Location) -> None:
    found = [
        label
        for _, slot, own in pieces(template.text)
        if slot is not None and (label := spec.label_of(slot, own)) is not None
    ]
    for label in found:
        _one_of(label, list(spec.positions), at, "a label listed in positions")
    for label in spec.positions:
        if found.count(label) != 1:
            raise LocatedError(
                at,
                f"the label {label} occurs {found.count(label)} times; allowed: every label of "
                f"positions ({', '.join(spec.positions)}) once in each template",
            )


def _check_answers(spec: TaskSpec, template: Template, at: Location) -> None:
    answer, distractor = spec.answer_of(template), spec.distractor_of(template)
    answer_at = ("answer",) if template.answer is None else (*at, "answer")
    distractor_at = ("distractor",) if template.distractor is None else (*at, "distractor")
    for text, place in ((answer, answer_at), (distractor, distractor_at)):
        _check_braces(text, place)
        for slot in slots_in(text):
            _one_of(slot, spec.slots, place, "a slot")
    if answer == distractor:
        raise LocatedError(distractor_at, "the distractor is the answer; allowed: another text")
    present = slots_in(template.text)
    for slot in slots_in(answer):
        if not _is_determined(spec, slot, present):
            raise LocatedError(
                (*at, "text"),
                f"the template lacks the answer slot {{{slot}}}; allowed: a template with "
                f"{{{slot}}}, or an answer that follows from the template's slots by run, after "
                "or upto",
            )
    if spec.metric == "probability_difference":
        for text, place in ((answer, answer_at), (distractor, distractor_at)):
            if not any(spec.slots[slot].reference for slot in slots_in(text)):
                raise LocatedError(
                    place,
                    "probability_difference sums over all endings; allowed: a slot with after "
                    "or upto",
                )


def _is_determined(spec: TaskSpec, slot: str, present: tuple[str, ...]) -> bool:
    wanted = spec.slots[slot]
    if slot in present or wanted.reference in present:
        return True
    return wanted.run is not None and any(_same_run(wanted, spec.slots[name]) for name in present)


def _same_run(one: Slot, other: Slot) -> bool:
    return other.run is not None and one.source == other.source


def _check_corruption(spec: TaskSpec) -> None:
    corruption = spec.corruption
    if not corruption.redraw and not corruption.set:
        raise LocatedError(("corruption",), "nothing is corrupted; allowed: redraw, set or both")
    for field in ("redraw", "set"):
        for label in getattr(corruption, field):
            _one_of(label, list(spec.positions), ("corruption", field, label), "a position")
    for label, source in corruption.redraw.items():
        if source is not None:
            _one_of(source, spec.word_lists, ("corruption", "redraw", label), "a word list")
    for label in corruption.no_step or ():
        _one_of(label, list(corruption.redraw), ("corruption", "no_step"), "a redrawn label")


def _check_variant(spec: TaskSpec, variant: Variant, at: Location) -> None:
    for name in variant.words:
        _one_of(name, spec.word_lists, (*at, "words", name), "a word list of the task")
    changed = resolve(spec, variant)
    before = [template.text for template in spec.templates]
    after = [template.text for template in changed["templates"]]
    if variant.replace and set(before) & set(after):
        raise LocatedError(
            (*at, "replace"),
            f"it leaves a template as it was ({(set(before) & set(after)).pop()!r}); allowed: "
            "words of which each template has at least one",
        )
    if before == after and spec.word_lists == changed["word_lists"]:
        raise LocatedError(
            at, "it changes nothing; allowed: words, templates, prefix, replace or case"
        )
    try:
        resolved = spec.model_copy(update=changed)
        _check_slots(resolved)
        for index, template in enumerate(resolved.templates):
            place = (*at, "templates", index) if variant.templates else at
            _check_template(resolved, template, place)
    except LocatedError as error:
        if error.location[: len(at)] == at:
            raise
        raise LocatedError(at, f"with this variant, {error}") from error
