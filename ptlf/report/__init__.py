"""What a run leaves behind and how it is shown. Reads and writes JSON; never touches a model."""
