"""Tasks take turns at their system calls: who goes on (`taking`), and what calls have in common."""
