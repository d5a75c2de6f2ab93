"""Errors that are the user's to mend: shown as one line on stderr, exit status 1, never a traceback."""


class UserError(Exception):
    """What happened, where, and what to do next, in one line."""
