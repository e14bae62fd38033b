"""The command line: what people type. Imports no torch; each command loads what it needs when it runs."""
