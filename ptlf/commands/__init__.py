"""What the commands do: a file per family, with a function for each command that takes its options by name, calls, and
prints. `parser.py` declares them."""
