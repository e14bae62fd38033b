"""What makes parts of the documentation: run by `make docs`, checked by tests."""
