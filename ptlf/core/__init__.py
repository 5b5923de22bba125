"""What every room may use, and knows no room: errors, files, settings, randomness, processes, the batch of a step."""
