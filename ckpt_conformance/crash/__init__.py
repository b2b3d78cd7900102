"""The crash-state explorer: record one save, recover from every content the disk may legally hold.

Reading order: `model.states` (what a crash can leave), one module per persistence model in `model`,
`explore.exploration` (enumerate, recover, judge), `explore.audit` (the trace itself), `script` (the
same for a training script that nobody changed).
"""
