"""Code that a load may run, in files of any name: packed, in archives, exported, in text."""
