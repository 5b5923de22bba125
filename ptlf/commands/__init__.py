"""What the commands do: a file per family, with a function per command. `parser.py` declares them."""
