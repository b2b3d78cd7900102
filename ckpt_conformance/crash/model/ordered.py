"""File systems that keep metadata in order and commit it by transactions: one walk, other rules.

Operations on metadata are kept in order up to the last transaction that was committed. An fsync
commits the transaction that last changed its inode. New data is absent or a prefix in blocks of
4 KiB.
"""

from __future__ import annotations

from ckpt_conformance.crash.model.enumerate import Rules

RULES = {
    # data=ordered, delayed allocation, auto_da_alloc, no fast_commit: a rename over a file, or a
    # new size, is committed only with the data that it stands for.
    "ext4": Rules("ext4", replace_flushes=True, in_block=True, zeroes_tail=True),
    # A rename over a file does not flush the new one: old and new content can both be gone then.
    # The size of a file is logged when its data was written.
    "xfs": Rules("xfs", zeroes_tail=True),
}
