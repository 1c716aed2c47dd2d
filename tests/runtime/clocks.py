"""Times for templates that print the date."""

from datetime import datetime


def new_year() -> datetime:
    """A fixed day."""
    return datetime(2031, 1, 1, 8, 30)  # noqa: DTZ001 - templates print local time
