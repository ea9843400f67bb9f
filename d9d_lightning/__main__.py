"""``python -m d9d_lightning plan my_model.py:Model --batch my_model.py:batch --ranks 4``: look before you train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

USAGE = """usage: python -m d9d_lightning COMMAND ...

plan       how a module would be cut into stages, and how each schedule would do
schedule   draw a schedule, or compare all of them (the same as python -m d9d_lightning.schedule)

python -m d9d_lightning COMMAND --help tells more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Command line; that of the process by default.

    Returns:
        Exit status: 0, or 2 where the command line or the module is not understood.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else ""
    if command == "plan":
        from d9d_lightning.strategy.plan_command import main as plan

        return plan(given[1:])
    if command == "schedule":
        from d9d_lightning.schedule.__main__ import main as schedule

        return schedule(given[1:])
    (sys.stdout if command in ("-h", "--help") else sys.stderr).write(USAGE)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
