"""The console script: the command line, once it is sure that `cli` is ours."""

from cli.main import main

__all__ = ["main"]
