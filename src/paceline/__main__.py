"""`python -m paceline`, for launchers that start a module."""

from paceline.cli.main import run

run()
