"""See the docstrings of the modules in this room."""
