"""TWO models: how the student's circuit relates to the teacher's.

This package has the name of its main function. Python binds a package in its parent as soon as any
of its modules is imported, so the package is itself callable: ``circuitkd.compare(...)`` means
``circuitkd.compare.comparison.compare(...)`` whatever was imported before.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from circuitkd.compare.comparison import compare

        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
