"""
The C++ core of poise. Use the package poise; this module follows it without notice.
"""

from __future__ import annotations

class Bug(RuntimeError): ...
class Error(RuntimeError): ...

import typing

__all__: list[str] = ["Bug", "Error", "log_write", "set_log_level"]

def log_write(level: typing.SupportsInt, line: str) -> None:
    """
    Writes one line to the runtime's log (0 debug, 1 info, 2 warning, 3 error).
    """

def set_log_level(level: str) -> None:
    """
    Drops log lines below level: debug, info, warning or error.
    """
