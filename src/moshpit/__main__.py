"""``python -m moshpit`` is the same as ``moshpit``."""

from moshpit.cli import main

main()
