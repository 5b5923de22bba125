"""Callbacks for other libraries' training loops. Each module imports its library only when it is imported itself."""
