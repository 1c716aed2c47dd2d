"""Requests that nobody has sent yet: when they arrive, how long they are, what they share."""
