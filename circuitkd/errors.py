"""Errors that a user can act on.

Every error is a sentence that says what to do. ``InputError`` and its children are raised before
any long work starts (the command line exits with 2); ``RunError`` and its children happen while
running (exit code 1).
"""


class CircuitKDError(Exception):
    """Base of all errors that circuitkd raises on purpose."""


class InputError(CircuitKDError, ValueError):
    """Something that was asked for cannot be done; nothing has been computed yet."""


class ModelError(InputError):
    """A model is unknown, unreachable, incomplete, unsafe to read, or holds NaN."""


class ArchitectureError(ModelError):
    """A model's architecture is not supported, or does not add up to its residual stream."""


class TaskError(InputError):
    """A task is unknown, or its file is wrong."""


class VocabularyError(TaskError):
    """A tokenizer lacks what a task needs."""


class RunDirectoryError(InputError):
    """A run directory cannot be written, or belongs to a run with other arguments."""


class RunError(CircuitKDError, RuntimeError):
    """Something went wrong while running."""


class HookError(RunError):
    """A hook did not fire as often as it must; the numbers would be wrong."""
