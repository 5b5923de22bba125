"""A run: its settings, how it is built, the loop over tasks, its state and its record."""
