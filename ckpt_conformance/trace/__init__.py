"""System calls below one directory: recorded, carried out by a supervisor, and made to fail."""
