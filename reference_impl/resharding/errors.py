"""What resharding refuses; each error says where, what was found, and what to do next."""

from __future__ import annotations

from ckpt_conformance.reference_impl.errors import CheckpointMismatch


class ReshardError(CheckpointMismatch, ValueError):
    """A source, a destination, or statements between them that do not fit."""


class InvalidShard(ReshardError):  # noqa: N818 - named like the others
    """A description of a shard that cannot be true."""


class MissingShard(ReshardError):  # noqa: N818 - named like the others
    """Elements that no shard holds."""


class NotInvertible(ReshardError):  # noqa: N818 - named like the others
    """A mapping that cannot be undone: something was left out, or converted with a loss."""


class StatementError(ReshardError):
    """A statement that cannot be read, or cannot be carried out.

    Attributes:
        statement: its text.
        number: which one, from 1.
        column: where in it, from 1.
        reason: what is wrong.
    """

    def __init__(
        self, statement: str, number: int, column: int, reason: str, width: int = 1
    ) -> None:
        """Show the statement with a mark below the place."""
        mark = " " * (column - 1) + "^" * max(width, 1)
        super().__init__(
            f"statement {number}, column {column}: {reason}\n    {statement}\n    {mark}"
        )
        self.statement, self.number, self.column, self.reason = statement, number, column, reason
        self.width = width

    def __reduce__(self) -> tuple[type[StatementError], tuple[str, int, int, str, int]]:
        """Let it travel between processes, as errors of ranks do."""
        return type(self), (self.statement, self.number, self.column, self.reason, self.width)


class UnexpectedCharacter(StatementError, RuntimeError):  # noqa: N818 - named like the others
    """A character that stands in no statement (P052)."""
