"""Orders in which tasks take turns at their system calls: made, reduced, shrunk, written as a line.

Tasks are operations of a manager that run at once, such as two saves, or an upload and a rotation.
`reduction` says which orders differ, `exploring` tries them, `running` runs one of them.
"""
