"""A store of objects that misbehaves: a proxy in front of a real one, and what it does to requests.

`proxy` records and injects, `faults` says what stores do, `protocol` reads S3's requests.
"""
