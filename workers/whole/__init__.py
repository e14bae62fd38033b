"""Both halves of a model in one process, for a model that fits one machine."""
