"""The crash-state explorer: record one save, then visit every content the disk may legally hold.

Reading order: `operations` (what was recorded), `recorder` (how), `states` (what a crash can
leave), one module per persistence model, `explore` (visit and judge), `audit` (the trace itself).
"""
