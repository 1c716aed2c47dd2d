"""The terminal that reports are printed to.

What is printed holds names and errors of models, engines, tenants and files, which come from
elsewhere: brackets in them are text, and never markup that styles or fails.
"""

from rich.console import Console


class _Plain(Console):
    """Leaves it to the command line what becomes of an output whose reader has left."""

    def on_broken_pipe(self) -> None:
        """Called by the library, which would end the process with 1."""
        raise BrokenPipeError


def plain_console(
    *, width: int | None = None, soft_wrap: bool = False, stderr: bool = False
) -> Console:
    """A console that prints text as it is; styles are given by ``Text`` and ``style``."""
    return _Plain(
        width=width, soft_wrap=soft_wrap, stderr=stderr, highlight=False, markup=False, emoji=False
    )
