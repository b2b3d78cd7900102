"""Judge a checkpoint directory from its bytes alone: no adapter, no training code, no unpickling.

`layouts` finds the checkpoints, one module per format reads them, `sums` verifies digests and CRCs,
`judge` puts it together. Nothing here writes, and nothing imports torch.
"""
