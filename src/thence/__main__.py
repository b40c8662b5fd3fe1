"""``python -m thence``."""

from thence.cli import main

main()
