"""What ends one sequence, and no other."""

from __future__ import annotations


class Fault(Exception):
    """Its code is stable; its message is one sentence, and never holds what was asked or written."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


NOT_A_NUMBER = Fault("numeric_error", "the model's output is not a number for this sequence")
